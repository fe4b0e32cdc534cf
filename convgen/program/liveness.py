"""Which steps run together in a module's two functions, and when each value is let go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convgen.program.nodes import GIVEN, Schedule, Step, reads

GRADIENTS = ("dx", "dw", "db")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row that run if any of the gradients `needed` is asked for, or always, if that is empty.

    `dropped` has, for each step, the values that have no reader after it.
    """

    steps: tuple[Step, ...]
    needed: tuple[str, ...]
    dropped: tuple[tuple[str, ...], ...]


def forward_stretch(schedule: Schedule) -> Stretch:
    """All of forward, which leaves y and what backward reads."""
    return _stretch(schedule, schedule.forward, (), kept=("y", *schedule.held()))


def backward_stretches(schedule: Schedule) -> tuple[Stretch, ...]:
    """Both backward phases, cut wherever the set of gradients changes that need a step."""
    steps = (*schedule.backward_data, *schedule.backward_filter)
    needs = _needs(steps)
    stretches: list[Stretch] = []
    start = 0
    while start < len(steps):
        end = start
        while end < len(steps) and needs[steps[end].result] == needs[steps[start].result]:
            end += 1
        later = [v for step in steps[end:] for v in reads(step)]
        needed = tuple(r for r in GRADIENTS if r in needs[steps[start].result])
        stretches.append(_stretch(schedule, steps[start:end], needed, kept=(*GRADIENTS, *later)))
        start = end
    return tuple(stretches)


def _stretch(schedule: Schedule, steps: tuple[Step, ...], needed: tuple[str, ...], kept: Iterable[str]) -> Stretch:
    keep = {*kept, *GIVEN, *schedule.held()}
    dropped: list[tuple[str, ...]] = []
    for i, step in enumerate(steps):
        later = {v for s in steps[i + 1 :] for v in reads(s)}
        dropped.append(tuple(v for v in dict.fromkeys(reads(step)) if v not in keep | later))
    return Stretch(steps, needed, tuple(dropped))


def _needs(steps: Sequence[Step]) -> dict[str, frozenset[str]]:
    """For each value, the gradients that depend on it."""
    needs: dict[str, frozenset[str]] = {r: frozenset((r,)) for r in GRADIENTS}
    for step in reversed(steps):
        for value in reads(step):
            needs[value] = needs.get(value, frozenset()) | needs[step.result]
    return needs
