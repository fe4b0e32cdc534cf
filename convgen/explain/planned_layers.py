"""A plan layer by layer: neighbouring rows of a module of the source are a layer, with their cost together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from convgen.algebra.notation import roles_text
from convgen.cost.every_output import Kept, every_output
from convgen.cost.machine import Machine
from convgen.cost.network_memory import fullest
from convgen.cost.rows import price_on
from convgen.explain.planned_steps import Step, Steps
from convgen.plan.program.ranks import NetworkPlan
from convgen.program.network import Program, label
from convgen.program.rows import PlacedRow, Stored

ACTIVATIONS = ("input", "made")


@dataclass(frozen=True, eq=False)
class Layer:
    """Rows of one module.

    Attributes:
        readers: for each value, the numbers of the rows that read it.
        numbers: those of its rows.
        product: the row with the products; None if there is none.
        kept: the bytes that it keeps on the fullest rank, by what they are.
        runner_up: the second-best roles of the product, and by how many seconds the whole plan is longer with them.
    """

    name: str
    kind: str
    program: Program
    readers: Mapping[str, set[int]]
    numbers: tuple[int, ...]
    steps: tuple[Step, ...]
    product: PlacedRow | None
    kept: tuple[tuple[str, int], ...]
    runner_up: tuple[str, float] | None

    @property
    def rows(self) -> list[PlacedRow]:
        return [self.program.rows[i] for i in self.numbers]

    @cached_property
    def makes(self) -> str:
        """The value that others read."""
        return next((v for row in reversed(self.rows) for v in row.bound.makes if v and not self._inner(v)), "") or (
            label(self.rows[-1])
        )

    def _inner(self, value: str) -> bool:
        readers = self.readers.get(value)
        return bool(readers and readers.issubset(self.numbers)) or any(v == value for _, v in self.program.updates)

    @cached_property
    def reads(self) -> dict[str, Stored]:
        """The activations of other layers that it reads, and how they are stored."""
        made = {v for row in self.rows for v in row.bound.makes}
        values = self.program.values
        names = (v for row in self.rows for v in row.bound.reads if v not in made)
        return {v: values[v].stored for v in names if values[v].kind in ACTIVATIONS}

    @property
    def stored(self) -> Stored | None:
        value = self.program.values.get(self.makes)
        return value.stored if value is not None and value.shape else None

    @property
    def w(self) -> Stored | None:
        """How the product's first parameter is stored."""
        if self.product is None:
            return None
        values = self.program.values
        return next((values[v].stored for v in self.product.bound.reads if values[v].kind == "parameter"), None)

    @property
    def roles(self) -> str | None:
        """The text of the roles in forward, and of each gradient with other roles."""
        if self.product is None:
            return None
        forward = roles_text(self.product.roles) or "none"
        others = [
            f"d{self.product.signature.inputs[k].name} {text}"
            for k, one in self.product.derived
            if (text := roles_text(one.roles) or "none") != forward
        ]
        return "; ".join([forward, *others])

    @property
    def working(self) -> int:
        """How many ranks do different work in forward."""
        row = self.product or self.rows[-1]
        return prod(self.program.grid.sizes[a] for _, axes in row.roles for a in axes)

    @property
    def compute_ps(self) -> int:
        return sum(s.time_ps for s in self.steps if not s.communicates)

    @property
    def moving_ps(self) -> int:
        return sum(s.time_ps for s in self.steps if s.communicates)

    @property
    def sent_bytes(self) -> int:
        return sum(s.sent_bytes for s in self.steps)

    @property
    def kept_bytes(self) -> int:
        return sum(count for _, count in self.kept)

    @property
    def redistributes(self) -> bool:
        """Whether anything travels for it beside a norm's statistics."""
        return self.sent_bytes > 0 and not (self.product or self.rows[-1]).bound.operation.normalises


def layers_of(found: NetworkPlan, machine: Machine, dtype: str) -> list[Layer]:
    """The plan's layers, in the network's order."""
    program = found.program
    steps = Steps(program, price_on(program.grid, machine, dtype))
    kept = kept_by_row(found)
    readers: dict[str, set[int]] = {}
    for i, row in enumerate(program.rows):
        for value in row.bound.reads:
            readers.setdefault(value, set()).add(i)
    layers: list[Layer] = []
    for numbers in _groups(program):
        rows = [program.rows[i] for i in numbers]
        own = [i for i in numbers if program.rows[i].bound.operation.is_product]
        first = own[0] if own else None
        runner = None
        if first is not None and first in found.runner_up:
            (_, roles), more_s = found.runner_up[first]
            runner = roles_text(roles) or "none", more_s
        takes: dict[str, int] = {}
        for i in numbers:
            for what, count in kept.get(i, ()):
                takes[what] = takes.get(what, 0) + count
        row = None if first is None else program.rows[first]
        layers.append(
            Layer(
                name=rows[0].bound.module or label(rows[-1]),
                kind=(row or rows[-1]).bound.operation.name,
                program=program,
                readers=readers,
                numbers=tuple(numbers),
                steps=tuple(s for i in numbers for s in steps.of(i)),
                product=row,
                kept=tuple(takes.items()),
                runner_up=runner,
            )
        )
    return layers


def kept_by_row(found: NetworkPlan) -> dict[int | None, list[tuple[str, int]]]:
    """By a row's number, or None for no row, what is kept and its bytes, counted as the plan's memory was."""
    room, by_row = found.room, dict[int | None, list[tuple[str, int]]]()
    if room.keep == "every":
        every: Iterator[Kept] = every_output(found.program, room.parameter_bytes)
        for one in every:
            by_row.setdefault(one.row, []).append((one.what, one.bytes))
        return by_row
    walk = found.walk or fullest(found.program, room.states)
    for row, what, count in walk.by_row():
        by_row.setdefault(row, []).append((what, count))
    return by_row


def _groups(program: Program) -> Iterator[Sequence[int]]:
    """The groups of neighbouring rows of one module; a module with several products has a group for each."""
    group: list[int] = []
    for i, row in enumerate(program.rows):
        last = program.rows[i - 1].bound.module if i else None
        again = row.bound.operation.is_product and any(program.rows[n].bound.operation.is_product for n in group)
        if group and (row.bound.module != last or again or not row.bound.module):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
