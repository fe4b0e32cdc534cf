"""The verdict of a race: which kernel is faster than ATen, by how much, and how sure that is.

A kernel is stored if it is faster than ATen by more than WORTH, in two sittings of its own and in the module itself. A
case that isn't clear is stored with its doubt, and measured again next time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.tune.bench_cpu import ATEN
from convgen.tune.intervals import Interval, of_ratios
from convgen.tune.rounds import TIED

WORTH = 1.03  # a kernel less than so many times as fast as ATen is not worth storing
# A choice is sure where the fastest one, which it may stand for, is less than BEHIND times as fast, and it is more than
# AHEAD times as fast as each that is ranked before it. Between the two is room for what a sitting has to itself.
BEHIND, AHEAD = 1.06, 1.04
APART = 1.25  # two sittings whose medians differ by more than this factor show noise that neither sees


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict that is stored for a problem.

    Attributes:
        label: the kernel's; ATEN if ATen's plain call stays.
        gain: ATen's time over the kernel's, or over the best kernel's if ATen's call stays. None if one of the two is
            missing.
        module: the untuned module's time over the tuned one's.
        doubt: why the verdict is not sure; empty if it is.
    """

    label: str
    gain: Interval | None = None
    module: Interval | None = None
    doubt: str = ""


def right(records: Mapping[str, Any]) -> dict[str, list[float]]:
    """The laps of racers that made no mistake, by label."""
    return {label: r["laps"] for label, r in records.items() if "cause" not in r}


def challenger(records: Mapping[str, Any], order: Sequence[str]) -> str | None:
    """The kernel that a race found fastest, or one tied with it that is ranked before it; None if none is right.

    A challenger that is not worth storing stands for no better one.

    Args:
        order: the labels in the ranking's order.
    """
    laps = _kernels(records)
    if not laps:
        return None
    best = _fastest(records, laps)
    tied = [label for label in laps if of_ratios(laps[label], laps[best]).median <= TIED]
    gains = {label: gain_of(records, label) for label in tied}
    worth = [label for label, gain in gains.items() if gain is None or gain.median > WORTH]
    return min(worth or [best], key=order.index)


def rivals(records: Mapping[str, Any], label: str, order: Sequence[str]) -> str:
    """Why it is not sure that this challenger is the best; empty if it is.

    A kernel that is ranked before it may still tie with it; or it may be well behind the fastest, with which it was
    taken to tie.
    """
    laps = _kernels(records)
    best = _fastest(records, laps)
    for other in order[: order.index(label)]:
        if other in laps and (behind := of_ratios(laps[other], laps[label])).low <= AHEAD:
            return f"{other} may be as fast: takes {behind} times as long"
    if label != best and (behind := of_ratios(laps[label], laps[best])).high > BEHIND:
        return f"{best} may be {behind} times as fast"
    return ""


def _kernels(records: Mapping[str, Any]) -> dict[str, list[float]]:
    return {label: found for label, found in right(records).items() if label != ATEN}


def _fastest(records: Mapping[str, Any], laps: Mapping[str, list[float]]) -> str:
    """The fastest racer, by its ratio to ATen in the same rounds, as racers that were out early have fewer rounds."""
    aten = right(records).get(ATEN)
    if aten is None:
        return min(laps, key=lambda label: statistics.median(laps[label]))
    return max(laps, key=lambda label: of_ratios(aten, laps[label]).median)


def against_family(records: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's records in which ATen is the best kernel of the family `aten`, as a module has ATen, which copies its
    result.

    That kernel's label is kept under `label`. If the family can't do the problem, there is nothing to beat.
    """
    laps = right(records)
    family = [label for label in laps if label.startswith("aten")]
    rest = {label: r for label, r in records.items() if not label.startswith("aten") and label != ATEN}
    if not family:
        return rest
    best = min(family, key=lambda label: statistics.median(laps[label]))
    return rest | {ATEN: {**records[best], "label": best}}


def gain_of(records: Mapping[str, Any], label: str) -> Interval | None:
    """How many times as fast as ATen a kernel is; None if ATen has no way, or made a mistake."""
    laps = right(records)
    return of_ratios(laps[ATEN], laps[label]) if {ATEN, label} <= laps.keys() else None


def judged(label: str, first: Interval, second: Interval | None, module: Interval | None, rival: str = "") -> Verdict:
    """The verdict on a challenger.

    Args:
        first, second: its gain in two sittings; second is None if the first was enough.
        module: the gain of the whole module; None if it was not run.
        rival: why another kernel may be the best.
    """
    gain = first if second is None else first.hull(second)
    if gain.high < WORTH:
        return Verdict(ATEN, gain)
    if second is None:
        return Verdict(ATEN, gain, doubt=f"{label} may be {gain} times as fast")
    noisy = max(first.median / second.median, second.median / first.median) > APART
    apart = f"sittings differ: {first} and {second} times as fast" if noisy else ""
    if module is not None and module.low <= 1.0:
        if module.high < WORTH:
            return Verdict(ATEN, gain, module, apart)
        return Verdict(ATEN, gain, module, f"{label} may make its module {module} times as fast")
    if gain.low > 1.0:
        near = "" if gain.low > WORTH else f"gains little: {gain}"
        return Verdict(label, gain, module, apart or near or rival)
    return Verdict(ATEN, gain, module, apart or f"{label} may be {gain} times as fast")
