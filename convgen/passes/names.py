"""Names of values: other ones for some, or those that lowering gives for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convgen.operations.layer import MADE_BY
from convgen.program.build import SUFFIX
from convgen.program.nodes import GIVEN, PHASES, RESULTS, Compute, Convert, Schedule, Step


def rename(step: Step, names: Mapping[str, str]) -> Step:
    """A step whose values, read and made, have other names; the same object where they have not."""
    result = names.get(step.result, step.result)
    match step:
        case Compute():
            inputs, own = (tuple(names.get(v, v) for v in values) for values in (step.inputs, step.own))
            same = (result, inputs, own) == (step.result, step.inputs, step.own)
            return step if same else replace(step, result=result, inputs=inputs, own=own)
        case Convert():
            source = names.get(step.source, step.source)
            same = (result, source) == (step.result, step.source)
            return step if same else replace(step, result=result, source=source)


def renamed(schedule: Schedule, names: Mapping[str, str]) -> Schedule:
    """The schedule with other names for some values."""
    forward, data, filter_ = (tuple(rename(s, names) for s in schedule.section(phase)) for phase in PHASES)
    return replace(schedule, forward=forward, backward_data=data, backward_filter=filter_)


def named(schedule: Schedule) -> Schedule:
    """The schedule with values named by what makes them, each name once, as lowering names them."""
    names = {name: name for name in (*GIVEN, *RESULTS)}
    taken = set(names)

    def fresh(name: str) -> str:
        candidate, n = name, 1
        while candidate in taken:
            n += 1
            candidate = f"{name}_{n}"
        taken.add(candidate)
        return candidate

    for phase in PHASES:
        steps = schedule.section(phase)
        for step in steps:
            if isinstance(step, Compute) and step.operation == "add_bias" and step.inputs[0] not in names:
                names[step.inputs[0]] = fresh("y_summed")
        for step in steps:
            if step.result not in names:
                names[step.result] = fresh(_word(step, names))
    return renamed(schedule, names)


def _word(step: Step, names: Mapping[str, str]) -> str:
    """What a value is called unless another is: its tensor, and what happened to it."""
    match step:
        case Convert():
            halo = step.kind == "exchange" and step.type.has_window
            return f"{names[step.source].split('_')[0]}_{'halo' if halo else SUFFIX[step.kind]}"
        case Compute():
            return MADE_BY[step.operation] + ("_partial" if step.type.partial else "_local")
