"""A program, its index sets, and what checks ask of them. A box is an interval per dimension (`IndexSets.held`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from convgen.algebra.conv import Phase
from convgen.algebra.index_sets import Box
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Operand, Signature
from convgen.algebra.space import Space
from convgen.operations.layer import MADE_BY, Row, rows
from convgen.program.nodes import GIVEN, TENSOR_OF, Compute, Convert, Schedule, Step
from convgen.program.verify.typed import Counts, Travel

Fault = tuple[Step | None, str]


@dataclass(frozen=True)
class Computed:
    """An operation of a program as a check sees it: its row, and each operand and the result with its type."""

    step: Compute
    row: Row
    signature: Signature
    operands: tuple[tuple[Operand, Layout], ...]
    result: tuple[Operand, Layout]

    @property
    def all(self) -> tuple[tuple[Operand, Layout], ...]:
        """The result, then the operands: the result's blocks are what a rank has to make."""
        return (self.result, *self.operands)


class Facts:
    """A schedule, its space, and what the checks ask of them."""

    def __init__(self, schedule: Schedule, space: Space) -> None:
        self.schedule, self.space = schedule, space
        self.stored = dict(schedule.stored)
        self.types = schedule.types()
        self.rows: Mapping[str, Row] = rows(space.conv)

    @cached_property
    def steps(self) -> tuple[tuple[Phase, Step], ...]:
        return tuple(self.schedule.steps())

    @cached_property
    def conversions(self) -> tuple[tuple[Convert, Travel], ...]:
        return tuple((s, self._travel(s)) for _, s in self.steps if isinstance(s, Convert))

    def _travel(self, step: Convert) -> Travel:
        return Travel(Conversion(step.kind, step.over, self.types[step.source], step.type), self.space)

    @cached_property
    def origins(self) -> dict[str, str]:
        """Which of x, w, bias, dy, y, dx, dw, db each value holds, whatever its layout; "" for one not known."""
        found = {n: n for n in GIVEN if TENSOR_OF[n] in self.stored}
        for _, step in self.steps:
            match step:
                case Compute():
                    found[step.result] = MADE_BY[step.operation]
                case Convert():
                    found[step.result] = found.get(step.source, "")
        return found

    @cached_property
    def results(self) -> dict[str, Phase]:
        """By name, the section that has to make it: y, dx, dw, and db where there is a bias."""
        made: dict[str, Phase] = {row.makes: row.section for row in self.rows.values()}
        return {name: section for name, section in made.items() if TENSOR_OF[name] in self.stored}

    @cached_property
    def computed(self) -> tuple[Computed, ...]:
        """Every operation with its operands; a convolution's bias is no operand of its products."""
        found: list[Computed] = []
        for _, step in self.steps:
            if isinstance(step, Compute) and (row := self.rows.get(step.operation)):
                signature = row.signature(step.way)
                operands = tuple(
                    (operand, self.types[value]) for operand, value in zip(signature.inputs, step.inputs, strict=False)
                )
                found.append(Computed(step, row, signature, operands, (signature.results[0], step.type)))
        return tuple(found)

    def held(self, layout: Layout) -> Box:
        return self.space.held(layout)


def interval(pair: Counts) -> str:
    return f"[{pair[0]}, {pair[1]})"


def listed(axes: Axes) -> str:
    return ",".join(axes) or "no axis"
