"""What a race says: which kernel is faster than ATen, by how much, and how sure that is.

A kernel is stored where it makes its module faster by more than is worth a word, in two sittings of its own and in the
module itself. What lies between the clear cases is stored with its doubt, and measured again next time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.tune.bench_cpu import ATEN
from convgen.tune.intervals import Interval, of_ratios
from convgen.tune.rounds import TIED

WORTH = 1.03  # times as fast as ATen: less is not worth another kernel
# A choice is sure where the fastest one, which it may stand for, is less than BEHIND times as fast, and it is more than
# AHEAD times as fast as each that is ranked before it. Between the two is room for what a sitting has to itself.
BEHIND, AHEAD = 1.06, 1.04
APART = 1.25  # medians of two sittings that are farther apart show a noise that neither sees


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is stored of a problem.

    Attributes:
        label: the kernel's; ATEN where its plain call stays.
        gain: ATen's time over the kernel's; of the best kernel where ATen's call stays. None where one of them is none.
        module: the untuned module's time over the tuned one's.
        doubt: empty where it is sure; else why it is not.
    """

    label: str
    gain: Interval | None = None
    module: Interval | None = None
    doubt: str = ""


def right(records: Mapping[str, Any]) -> dict[str, list[float]]:
    """Laps of what made no mistake, by label."""
    return {label: r["laps"] for label, r in records.items() if "cause" not in r}


def challenger(records: Mapping[str, Any], order: Sequence[str]) -> str | None:
    """The kernel that a race found fastest, or one tied with it that is ranked before it; None where none is right.

    One that is not worth storing stands for none that is.

    Args:
        order: labels by the ranking.
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
    """Why it is not sure that this challenger is the one; empty where it is.

    Another that is ranked before it may tie yet; or it may be well behind the fastest, which it stands for.
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
    """By what ATen takes in the same rounds: those that were out early have fewer of them."""
    aten = right(records).get(ATEN)
    if aten is None:
        return min(laps, key=lambda label: statistics.median(laps[label]))
    return max(laps, key=lambda label: of_ratios(aten, laps[label]).median)


def against_family(records: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's records with ATen as a module has it, which copies its result: the family's best is what is to be beaten.

    Its label is kept under `label`. Where the family can't the problem, there is nothing to beat.
    """
    laps = right(records)
    family = [label for label in laps if label.startswith("aten")]
    rest = {label: r for label, r in records.items() if not label.startswith("aten") and label != ATEN}
    if not family:
        return rest
    best = min(family, key=lambda label: statistics.median(laps[label]))
    return rest | {ATEN: {**records[best], "label": best}}


def gain_of(records: Mapping[str, Any], label: str) -> Interval | None:
    """How many times as fast as ATen; None where ATen has no way, or made a mistake."""
    laps = right(records)
    return of_ratios(laps[ATEN], laps[label]) if {ATEN, label} <= laps.keys() else None


def judged(label: str, first: Interval, second: Interval | None, module: Interval | None, rival: str = "") -> Verdict:
    """The verdict on a challenger.

    Args:
        first, second: its gain in two sittings; None where the first was enough.
        module: of the module as a whole; None where none was run.
        rival: why another may be the one.
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
