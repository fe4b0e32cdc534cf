"""A row's price as a table over the storage of its values: what is asked, what is answered (asking.py), and the best of
its options for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from convgen.cost.rows import Price
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.plan.parts import Room
from convgen.plan.program.candidates import Way
from convgen.program.biases import NONE, Biased
from convgen.program.rows import PlacedRow, Stored, place, place_gradient, stored_by_name
from convgen.program.types import RowTypes

Table = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Option:
    """A way of a row, and how the parameters that it places are stored, by number of the operand."""

    way: Way
    parameters: tuple[tuple[int, Stored], ...] = ()


@dataclass(frozen=True, eq=False)
class Question:
    """A row whose way is to be found.

    Attributes:
        operands, results: by operand or result its candidates; None: a parameter that this row places.
        options: the row's; `gradients` has the ways of each derived row.
        wanted: by operand, whether it wants a gradient.
        learnt: by operand, whether it is a parameter.
        types: in which the row computes, and in which it moves and makes values.
        room: which memory is counted, and how.
        bias: what the row has to do with a bias.
        again: whether operands that were gathered are not kept for backward, and gathered again.
    """

    operation: Operation
    operands: tuple[tuple[Stored, ...] | None, ...]
    results: tuple[tuple[Stored, ...], ...]
    options: tuple[Option, ...]
    gradients: tuple[tuple[str, tuple[Way, ...]], ...]
    wanted: tuple[bool, ...]
    learnt: tuple[bool, ...]
    types: RowTypes
    room: Room
    bias: Biased = NONE
    again: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys(option.way for option in self.options))


@dataclass
class Answer:
    """For each option, over (operands without parameters..., results...): costs, and bytes that it takes.

    Attributes:
        by_way: the least costs of each way.
        derived: for each option, by operand: its gradient's ways, and in each cell the number of one, -1 for the vjp.
    """

    question: Question
    costs: Table
    memory: Table
    by_way: Table
    derived: list[dict[str, tuple[Table, list[Way]]]] = field(default_factory=list[dict[str, tuple[Table, list[Way]]]])


@dataclass(frozen=True, eq=False)
class Choice:
    """An option for each cell."""

    answer: Answer
    option: NDArray[np.int64]

    @cached_property
    def table(self) -> Table:
        return np.take_along_axis(self.answer.costs, self.option[None], 0)[0]

    @cached_property
    def memory(self) -> Table:
        return np.take_along_axis(self.answer.memory, self.option[None], 0)[0]


def fastest(answer: Answer) -> Choice:
    """The option of least cost."""
    return Choice(answer, answer.costs.argmin(0))


def choices(answers: Sequence[Answer]) -> list[Choice]:
    """For each answer the fastest option of each cell and the one with least memory; none that another one beats."""
    found: list[Choice] = []
    for answer in answers:
        cheap = np.where(answer.memory == answer.memory.min(0), answer.costs, NEVER)
        for one in (fastest(answer), Choice(answer, cheap.argmin(0))):
            worse = [(a.table <= one.table).all() and (a.memory <= one.memory).all() for a in found]
            found += [] if any(worse) else [one]
    return found


def placed(choice: Choice, cell: tuple[int, ...], bound: Bound, price: Price) -> PlacedRow:
    """The row of a cell of its table."""
    answer, q = choice.answer, choice.answer.question
    w = int(choice.option[cell])
    (number, roles), parameters = q.options[w].way, dict(q.options[w].parameters)
    signature, nests = bound.operation.signatures[number], dict(roles)
    places = iter(cell)
    reads = [parameters[k] if c is None else c[next(places)] for k, c in enumerate(q.operands)]
    makes = [c[next(places)] for c in q.results]
    derived: dict[str, PlacedRow] = {}
    stored = stored_by_name(signature, reads, makes)
    for name, (cells, ways) in answer.derived[w].items():
        if (taken := int(cells[cell])) >= 0:
            own_way, own_roles = ways[taken]
            derived[name] = place_gradient(bound, name, price.grid, own_way, dict(own_roles), stored)
    return place(bound, price.grid, number, nests, reads, makes, derived)
