"""The cost of a schedule, added up from its steps.

There are two objectives. Seconds: the steps one after the other, each as slow as its slowest rank. Bytes: what a rank
sends over the three phases, taken as the sum over the steps of the most that any rank sends in that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion
from convgen.cost.model import FREE, Model, StepCost
from convgen.program.nodes import PHASES, Compute, Convert, Phase, Schedule, Step


@dataclass(frozen=True, slots=True)
class CostedStep:
    """A step, named by its result, with what it costs.

    Attributes:
        kind: its operation in the schedule's text; `over`: the axes of a collective.
    """

    result: str
    phase: Phase
    kind: str
    over: Axes
    cost: StepCost


@dataclass(frozen=True)
class ScheduleCost:
    """Costs of all steps in order, and their sums."""

    steps: tuple[CostedStep, ...]

    def total(self, *phases: Phase) -> StepCost:
        """The sum over the phases named, or over all, of what each step's busiest rank sends, computes and takes."""
        return sum((s.cost for s in self.steps if s.phase in (phases or PHASES)), start=FREE)


def schedule_cost(schedule: Schedule, model: Model) -> ScheduleCost:
    """What the schedule costs under a model of its space, machine and dtype."""
    types = schedule.types()
    return ScheduleCost(
        tuple(
            CostedStep(step.result, phase, kind_of(step), over_of(step), step_cost(step, types, model))
            for phase, step in schedule.steps()
        )
    )


def kind_of(step: Step) -> str:
    """The operation's name in the schedule's text."""
    match step:
        case Compute():
            return step.operation
        case Convert():
            return step.kind


def over_of(step: Step) -> Axes:
    """The axes of a collective; none of another step."""
    return step.over if isinstance(step, Convert) else ()


def step_cost(step: Step, types: Mapping[str, Layout], model: Model) -> StepCost:
    """One step's cost; `types` has the layout of every value it reads."""
    match step:
        case Compute(operation="add_bias"):
            return model.add_bias(step.type)
        case Compute(operation="sum_bias"):
            return model.sum_bias(types[step.inputs[0]], step.type)
        case Compute():
            return model.convolution((types[step.inputs[0]], types[step.inputs[1]], step.type))
        case Convert():
            return model.conversion(Conversion(step.kind, step.over, types[step.source], step.type))
