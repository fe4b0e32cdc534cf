"""Share equal conversions: one value serves every step that would make the same one.

    backward_data:                                       backward_data:
      %dy_gathered = all_gather %dy over=C                 %dy_gathered = all_gather %dy over=C
      %dx = conv_backward_data %dy_gathered, %w            %dx = conv_backward_data %dy_gathered, %w
    backward_filter:                              --->   backward_filter:
      %dy_gathered_2 = all_gather %dy over=C
      %t = conv_backward_filter %dy_gathered_2, %x         %t = conv_backward_filter %dy_gathered, %x

Needs:  nothing.
Sound:  values are immutable, and equal conversions of one value are equal on every rank.
Leaves: conversions of w (forward's is gone by backward; keeping it would cost a copy of w), those of x in
        backward unless x is held gathered (`hold_x`), and slices of forward's values: a slice is free, and a view of x
        can't be held beside x; backward shares a collective that reads such a slice all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.layout import Layout
from convgen.passes.contract import Context, SchedulePass
from convgen.program.nodes import RESULTS, Compute, Convert, Schedule, Step, reads

Key = tuple[str, str, tuple[str, ...], Layout]


@dataclass(frozen=True)
class Share(SchedulePass):
    """Merge equal conversions within backward, and with forward's where x is held gathered."""

    name: ClassVar[str] = "share"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        known: dict[Key, str] = {}
        same: dict[str, str] = {}  # a value -> the first value equal to it

        def key_of(step: Convert) -> Key:
            return step.kind, same.get(step.source, step.source), step.over, step.type

        if schedule.hold_x == "gathered":
            for step in schedule.forward:
                if isinstance(step, Convert) and step.type.tensor == "x":
                    known[key_of(step)] = step.result
        forward = {step.result for step in schedule.forward}
        sections: list[tuple[Step, ...]] = []
        names: dict[str, str] = {}
        for steps in (schedule.backward_data, schedule.backward_filter):
            kept: list[Step] = []
            for old in steps:
                step = _reading(old, names)
                # A result keeps its own name; only inputs are shared.
                if isinstance(step, Convert) and step.result not in RESULTS:
                    first = known.setdefault(key_of(step), step.result)
                    if first != step.result:
                        same[step.result] = first
                        if step.kind != "slice" or first not in forward:
                            names[step.result] = first
                            continue
                kept.append(step)
            sections.append(tuple(kept))
        data, filter_ = _without_unread(sections)
        if data == schedule.backward_data and filter_ == schedule.backward_filter:
            return schedule
        return replace(schedule, backward_data=data, backward_filter=filter_)


def _reading(step: Step, names: Mapping[str, str]) -> Step:
    """A step that reads values by other names; the same object where it reads none of them."""
    if names.keys().isdisjoint(reads(step)):
        return step
    match step:
        case Compute():
            inputs, own = (tuple(names.get(v, v) for v in values) for values in (step.inputs, step.own))
            return replace(step, inputs=inputs, own=own)
        case Convert():
            return replace(step, source=names[step.source])


def _without_unread(sections: list[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    """Drop conversions that nothing reads any more."""
    read = {name for steps in sections for step in steps for name in reads(step)} | set(RESULTS)
    kept = [tuple(s for s in steps if s.result in read) for steps in sections]
    return kept if kept == sections else _without_unread(kept)
