"""A row's price as a table over the storage of its values: the best of its ways for each.

What is moved for an operand depends on the row's roles and on how this operand is stored alone, so that a table is the
minimum, over few ways, of sums of vectors. The gradient of an operand is the vjp's, or a row of its own with roles of
its own, whichever is cheaper there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.layout import Layout
from convgen.algebra.signature import Signature
from convgen.algebra.wants import layout
from convgen.cost.rows import Price
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way
from convgen.program.rows import (
    PlacedRow,
    Stored,
    collect,
    converted,
    index_sets,
    kept,
    place,
    place_gradient,
    reduced,
    stored_by_name,
)

Table = NDArray[np.int64]
PARAMETER_COPIES = 3  # itself, its gradient, an optimizer's state


@dataclass(frozen=True)
class Question:
    """A row whose way is to be found.

    Attributes:
        operands, results: by operand or result its candidates; None: a parameter that this row places.
        ways: of the row; `gradients` of each derived row.
        wanted: by operand, whether it wants a gradient.
    """

    operation: Operation
    operands: tuple[tuple[Stored, ...] | None, ...]
    results: tuple[tuple[Stored, ...], ...]
    ways: tuple[Way, ...]
    gradients: tuple[tuple[str, tuple[Way, ...]], ...]
    wanted: tuple[bool, ...]


@dataclass
class Answer:
    """Costs over (operands without parameters..., results...), and the way that each cell is of."""

    question: Question
    table: Table
    best: NDArray[np.int64]
    memory: Table
    derived: list[dict[str, tuple[Table, list[Way]]]] = field(default_factory=list[dict[str, tuple[Table, list[Way]]]])


class Asking:
    """Tables of one row."""

    def __init__(self, question: Question, price: Price) -> None:
        self.q, self.price = question, price
        self.numbers = {o.name: k for k, o in enumerate(question.operation.signatures[0].inputs)}
        self.places = [k for k, c in enumerate(question.operands) if c is not None]
        self.shape = [len(question.operands[k] or ()) for k in self.places] + [len(c) for c in question.results]

    def answer(self) -> Answer:
        tables: list[Table] = []
        takes: list[Table] = []
        derived: list[dict[str, tuple[Table, list[Way]]]] = []
        for way in self.q.ways:
            table, own = self._of(way)
            tables.append(table)
            takes.append(self._memory(way))
            derived.append(own)
        stacked = np.stack(tables)
        best = stacked.argmin(0)
        memory = np.take_along_axis(np.stack(takes), best[None], 0)[0]
        return Answer(self.q, stacked.min(0), best, memory, derived)

    def _memory(self, way: Way) -> Table:
        """Bytes on the fullest rank: parameters with gradient and optimizer's states, and what of operands is fetched
        and kept for the vjp."""
        q, number, nests = self.q, way[0], dict(way[1])
        signature = q.operation.signatures[number]
        sets, size = index_sets(signature, self.price.grid), self.price.element_bytes
        total = np.zeros(self.shape, dtype=np.int64)
        for k, operand in enumerate(signature.inputs):
            if q.operands[k] is None:
                stored = Layout(operand.name, kept(operand, signature, nests))
                total += int(sets.elements(stored).max()) * size * PARAMETER_COPIES
                continue
            wants = layout(sets, operand, signature.wants(operand, nests))
            held = int(sets.elements(wants).max()) * size if operand.gradient and any(q.wanted) else 0
            moved = [Layout(operand.name, s) != wants for s in q.operands[k] or ()]
            total += self._spread([held if there else 0 for there in moved], k)
        return total

    # ---------------------------------------------------------------- one way
    def _of(self, way: Way) -> tuple[Table, dict[str, tuple[Table, list[Way]]]]:
        q, price = self.q, self.price
        number, nests = way[0], dict(way[1])
        signature = q.operation.signatures[number]
        sets = index_sets(signature, price.grid)
        local = price.local(q.operation, number, nests)
        parameters = {k: kept(signature.inputs[k], signature, nests) for k, c in enumerate(q.operands) if c is None}
        total = np.full(self.shape, local, dtype=np.int64)
        vjp: dict[int, Table] = {}
        for k, operand in enumerate(signature.inputs):
            wants = layout(sets, operand, signature.wants(operand, nests))
            found = layout(sets, operand, signature.gradient(operand, nests))
            stored = [parameters[k]] if k in parameters else list(q.operands[k] or ())
            total += self._spread(
                [self._cost(number, converted(sets, Layout(operand.name, s), wants)) for s in stored], k
            )
            if operand.gradient and q.wanted[k]:
                back = [self._cost(number, collect(sets, found, Layout(operand.name, s))) for s in stored]
                vjp[k] = self._spread(back, k) + local
        given = np.zeros(self.shape, dtype=np.int64)
        for j, result in enumerate(signature.results):
            makes = layout(sets, result, signature.wants(result, nests))
            whole = replace(makes, partial=())
            layouts = [Layout(result.name, s) for s in q.results[j]]
            total += self._spread(
                [self._cost(number, reduced(sets, makes, t, signature)) for t in layouts], j, result=True
            )
            if result.gradient:
                given += self._spread([self._cost(number, converted(sets, t, whole)) for t in layouts], j, result=True)
        own: dict[str, tuple[Table, list[Way]]] = {}
        for name, ways in q.gradients:
            k = self.numbers[name]
            if q.wanted[k] and ways:
                own[name] = self._derived(signature, name, ways, parameters)
        return self._with_gradients(signature, total, given, vjp, own)

    def _with_gradients(
        self,
        signature: Signature,
        total: Table,
        given: Table,
        vjp: Mapping[int, Table],
        own: dict[str, tuple[Table, list[Way]]],
    ) -> tuple[Table, dict[str, tuple[Table, list[Way]]]]:
        """The cheapest choice, for all operands, of the vjp or a row of its own; what is fetched for vjps is once."""
        names = list(own)
        chosen: dict[str, tuple[Table, list[Way]]] = {}
        must = signature.reduction != "sum"
        choices = [set(names)] if must else [
            {n for b, n in enumerate(names) if bits >> b & 1} for bits in range(1 << len(names))
        ]  # fmt: skip
        options: list[Table] = []
        for rows in choices:
            table = np.zeros(self.shape, dtype=np.int64)
            by_vjp = [k for k in vjp if signature.inputs[k].name not in rows]
            for k in by_vjp:
                table = table + vjp[k]
            if by_vjp:
                table = table + given
            for n in rows:
                table = table + own[n][0].min(0)
            options.append(table)
        stacked = np.stack(options)
        best, which = stacked.min(0), stacked.argmin(0)
        for n in names:
            taken = np.isin(which, [i for i, rows in enumerate(choices) if n in rows])
            cells = np.where(taken, own[n][0].argmin(0), -1)
            chosen[n] = (cells, own[n][1])
        return total + best, chosen

    def _derived(
        self, signature: Signature, name: str, ways: Sequence[Way], parameters: Mapping[int, Stored]
    ) -> tuple[Table, list[Way]]:
        """A table a way of the gradient's own row."""
        one = self.q.operation.gradients[name]
        results = {r.name: j for j, r in enumerate(signature.results)}
        found: list[Table] = []
        for number, roles in ways:
            theirs, nests = one.operation.signatures[number], dict(roles)
            sets = index_sets(theirs, self.price.grid)
            table = np.full(self.shape, self.price.local(one.operation, number, nests), dtype=np.int64)
            for operand, source in zip(theirs.inputs, one.reads, strict=True):
                wants = layout(sets, operand, theirs.wants(operand, nests))
                k = self.numbers.get(source)
                j = results.get(source, results.get(source.removeprefix("d"), 0))
                if k is not None:
                    stored = [parameters[k]] if k in parameters else list(self.q.operands[k] or ())
                else:
                    stored = list(self.q.results[j])
                costs = [
                    self._cost_of(one.operation, number, converted(sets, Layout(operand.name, s), wants))
                    for s in stored
                ]
                table += self._spread(costs, j if k is None else k, result=k is None)
            (result,) = theirs.results
            makes, k = layout(sets, result, theirs.wants(result, nests)), self.numbers[name]
            stored = [parameters[k]] if k in parameters else list(self.q.operands[k] or ())
            costs = [
                self._cost_of(one.operation, number, reduced(sets, makes, Layout(result.name, s), theirs))
                for s in stored
            ]
            table += self._spread(costs, k)
            found.append(table)
        return np.stack(found), list(ways)

    def _cost(self, way: int, chain: Sequence[object]) -> int:
        return self._cost_of(self.q.operation, way, chain)

    def _cost_of(self, operation: Operation, way: int, chain: Sequence[object]) -> int:
        return sum(self.price.conversion(operation, way, c) for c in chain)  # type: ignore[arg-type]

    def _spread(self, costs: Sequence[int], k: int, *, result: bool = False) -> Table:
        """A vector over an operand's candidates, or a result's, beside those of the others; a parameter has one."""
        if not result and k not in self.places:
            return np.array(costs[0], dtype=np.int64)
        d = len(self.places) + k if result else self.places.index(k)
        return np.array(costs, dtype=np.int64).reshape([-1 if i == d else 1 for i in range(len(self.shape))])


def placed(answer: Answer, cell: tuple[int, ...], bound: Bound, price: Price) -> PlacedRow:
    """The row of a cell of its table."""
    q = answer.question
    w = int(answer.best[cell])
    number, roles = q.ways[w]
    signature, nests = bound.operation.signatures[number], dict(roles)
    places = iter(cell)
    reads = [
        kept(signature.inputs[k], signature, nests) if c is None else c[next(places)] for k, c in enumerate(q.operands)
    ]
    makes = [c[next(places)] for c in q.results]
    derived: dict[str, PlacedRow] = {}
    stored = stored_by_name(signature, reads, makes)
    for name, (cells, ways) in answer.derived[w].items():
        if (choice := int(cells[cell])) >= 0:
            own_way, own_roles = ways[choice]
            derived[name] = place_gradient(bound, name, price.grid, own_way, dict(own_roles), stored)
    return place(bound, price.grid, number, nests, reads, makes, derived)
