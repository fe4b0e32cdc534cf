"""What the model says of each step of a compiled layer: the rows of the table, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convgen.cost.model import Model, StepCost
from convgen.cost.schedule import schedule_cost
from convgen.cost.symbolic import formulas
from convgen.explain.formula import formula_text
from convgen.program.nodes import PHASES, Convert, Phase

if TYPE_CHECKING:
    from convgen.compiler import Compiled


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        kind: its operation in the schedule's text; `over`: the axes of a collective.
        formula: elements that it sends, or flops of a local operation, for an interior rank where extents divide.
    """

    phase: Phase
    step: str
    kind: str
    over: tuple[str, ...]
    cost: StepCost
    formula: str

    @property
    def communicates(self) -> bool:
        return bool(self.over)


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over the steps of one phase, or of all; each step's slowest rank."""

    elements: int
    sent_bytes: int
    flops: int
    seconds: float


def rows(compiled: Compiled) -> tuple[Row, ...]:
    """Every step of the schedule, in order."""
    known = formulas(
        compiled.schedule,
        compiled.layer.conv,
        compiled.layer.element_bytes,
        virtual_padding=compiled.space.virtual_padding,
    )
    cost = schedule_cost(compiled.schedule, Model(compiled.space, compiled.machine, compiled.layer.dtype))
    steps = {step.result: step for _, step in compiled.schedule.steps()}
    found: list[Row] = []
    for s in cost.steps:
        step = steps[s.result]
        over = step.over if isinstance(step, Convert) else ()
        text = formula_text(known[s.result], compiled.schedule.grid)
        found.append(Row(s.phase, s.result, s.kind, over, s.cost, text))
    return tuple(found)


def total(of: Sequence[Row], phase: Phase | None = None) -> Total:
    """Sums of one phase, or of all."""
    costs = [r.cost for r in of if phase in (None, r.phase)]
    return Total(
        sum(c.elements for c in costs),
        sum(c.sent_bytes for c in costs),
        sum(c.flops for c in costs),
        sum(c.time_ps for c in costs) / 10**12,
    )


def totals(of: Sequence[Row]) -> dict[str, Total]:
    """By phase, and `all`."""
    return {**{phase: total(of, phase) for phase in PHASES}, "all": total(of)}
