"""A row's price as a table over the storage of its values: the best of its ways for each.

What is moved for an operand depends on the row's roles and on how this operand is stored alone, so that a table is the
minimum, over few ways, of sums of vectors. The gradient of an operand is the vjp's, or a row of its own with roles of
its own, whichever is cheaper there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.involved import NAME, most_elements
from convgen.algebra.layout import Layout
from convgen.algebra.signature import Operand, Signature
from convgen.cost.rows import Price
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.plan.parts import Room
from convgen.plan.program.candidates import Way
from convgen.program.biases import NONE, Biased
from convgen.program.rows import PlacedRow, Stored, converted, place, place_gradient, stored_by_name
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
        options: of the row; `gradients` are ways of each derived row.
        wanted: by operand, whether it wants a gradient.
        learnt: by operand, whether it is a parameter.
        types: of what it moves and makes.
        room: what is counted of memory.
        bias: what it has to do with one.
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
    """Of each option, over (operands without parameters..., results...): costs, and bytes that it takes.

    Attributes:
        by_way: the least costs of each way.
        derived: of each option, by the name of an operand, cells' numbers of a way of its gradient's row.
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
    """Of each answer the fastest option of each cell, and the one that takes least memory; those alike once."""
    found: list[Choice] = []
    for answer in answers:
        cheap = np.where(answer.memory == answer.memory.min(0), answer.costs, NEVER)
        for one in (fastest(answer), Choice(answer, cheap.argmin(0))):
            worse = [(a.table <= one.table).all() and (a.memory <= one.memory).all() for a in found]
            found += [] if any(worse) else [one]
    return found


class Asking:
    """Tables of one row."""

    def __init__(self, question: Question, price: Price) -> None:
        self.q, self.price = question, price
        self.numbers = {o.name: k for k, o in enumerate(question.operation.signatures[0].inputs)}
        self.places = [k for k, c in enumerate(question.operands) if c is not None]
        self.shape = [len(question.operands[k] or ()) for k in self.places] + [len(c) for c in question.results]
        self.product = question.operation.is_product
        self._found: dict[object, Table] = {}

    def answer(self) -> Answer:
        tables: list[Table] = []
        takes: list[Table] = []
        derived: list[dict[str, tuple[Table, list[Way]]]] = []
        for option in self.q.options:
            table, own = self._of(option)
            tables.append(table)
            takes.append(self._memory(option, own))
            derived.append(own)
        stacked = np.stack(tables)
        of = {way: [k for k, option in enumerate(self.q.options) if option.way == way] for way in self.q.ways}
        by_way = np.stack([stacked[some].min(0) for some in of.values()])
        return Answer(self.q, stacked, np.stack(takes), by_way, derived)

    def _memory(self, option: Option, own: Mapping[str, tuple[Table, list[Way]]]) -> Table:
        """Bytes on the fullest rank: parameters with gradient and optimizer's states, and what of operands is moved
        here and kept for the vjp.

        Args:
            own: gradients' own rows.
        """
        q, (number, roles), parameters = self.q, option.way, dict(option.parameters)
        price, signature = self.price, q.operation.signatures[number]
        tensors = price.tensors(signature)
        total = np.zeros(self.shape, dtype=np.int64)
        again = self._again(signature, own)
        for k, operand in enumerate(signature.inputs):
            sets = tensors[operand.name]
            if (candidates := q.operands[k]) is None:
                each = q.room.parameter_bytes(q.types.reads[k])
                total += most_elements(sets, Layout(NAME, parameters[k])) * each
            elif operand.gradient and any(q.wanted) and (self.product or q.room.keep == "needed"):
                wants = price.wants(signature, operand, roles)
                there = price.of(q.types.fetch[k])
                moved = there.fetched(sets, candidates, wants) > 0
                total += np.where(again, 0, self._spread(moved * most_elements(sets, wants) * there.element_bytes, k))
        return total

    def _again(self, signature: Signature, own: Mapping[str, tuple[Table, list[Way]]]) -> NDArray[np.bool_]:
        """Cells in which the gradients of all parameters are rows of their own: they read operands as these are
        stored, so that nothing that was gathered is kept for them."""
        learnt = [o.name for o, of, w in zip(signature.inputs, self.q.learnt, self.q.wanted, strict=True) if of and w]
        if not learnt or any(name not in own for name in learnt):
            return np.zeros(self.shape, dtype=bool)
        return np.all(np.stack([own[name][0] >= 0 for name in learnt]), 0)

    # ---------------------------------------------------------------- one option
    def _of(self, option: Option) -> tuple[Table, dict[str, tuple[Table, list[Way]]]]:
        q, price, types, parameters = self.q, self.price, self.q.types, dict(option.parameters)
        number, roles = option.way
        signature = q.operation.signatures[number]
        tensors = price.tensors(signature)
        local = price.of(types.local).local(q.operation, number, dict(roles))
        total = np.full(self.shape, local, dtype=np.int64)
        moves = np.zeros(self.shape, dtype=np.bool_)  # what a bias reads or makes
        bias = q.bias if price.machine.adds_biases else NONE
        vjp: dict[int, Table] = {}
        for k, operand in enumerate(signature.inputs):
            sets = tensors[operand.name]
            wants = price.wants(signature, operand, roles)
            stored = self._stored(k, parameters)
            total += self._spread(price.of(types.fetch[k]).fetched(sets, stored, wants), k)
            if bias.is_bias:
                moves |= self._spread(np.array([bool(converted(sets, Layout(NAME, s), wants)) for s in stored]), k)
            if operand.gradient and q.wanted[k]:
                found = price.gradient(signature, operand, roles)
                back, here = (
                    price.of(kind).collected(sets, found, stored, parameter=q.learnt[k])
                    for kind in (types.back[k], types.back_here[k])
                )
                if types.back[k] != types.back_here[k]:
                    back = np.where([Layout(NAME, s) == wants for s in stored], here, back)
                vjp[k] = self._spread(back, k)
        given = np.zeros(self.shape, dtype=np.int64)
        for j, result in enumerate(signature.results):
            sets, stored = tensors[result.name], q.results[j]
            makes = price.wants(signature, result, roles)
            made = price.of(types.store[j]).reduced(sets, makes, stored, signature.reduction)
            total += self._spread(made, j, result=True)
            if bias != NONE:
                goes = np.array([bool(converted(sets, makes, Layout(NAME, s))) for s in stored])
                moves |= self._spread(goes, j, result=True)
            if bias.behind is not None:
                passes = [price.of(types.local).over_stored(bias.behind, s) for s in stored]
                total += np.where(moves, self._spread(np.array(passes), j, result=True), 0)
            if result.gradient:
                dy = price.of(types.given[j]).fetched(sets, stored, replace(makes, partial=()))
                given += self._spread(dy, j, result=True)
        if bias.is_bias:
            total -= np.where(moves, 0, local)
        own: dict[str, tuple[Table, list[Way]]] = {}
        for name, ways in q.gradients:
            k = self.numbers[name]
            if ways and (q.wanted[k] or signature.reduction != "sum"):  # inputs may want gradients all the same
                own[name] = self._derived(signature, name, ways, parameters)
        return self._with_gradients(option.way, total, given, vjp, own)

    def _stored(self, k: int, parameters: Mapping[int, Stored]) -> tuple[Stored, ...]:
        """How an operand may be stored; a parameter that this row places, as it wants it."""
        return (parameters[k],) if k in parameters else self.q.operands[k] or ()

    def _with_gradients(
        self,
        way: Way,
        total: Table,
        given: Table,
        vjp: Mapping[int, Table],
        own: dict[str, tuple[Table, list[Way]]],
    ) -> tuple[Table, dict[str, tuple[Table, list[Way]]]]:
        """The cheapest choice, for all operands, of the vjp or a row of its own; what is fetched for vjps is once."""
        operation, (number, roles) = self.q.operation, way
        signature, names = operation.signatures[number], list(own)
        chosen: dict[str, tuple[Table, list[Way]]] = {}
        must = set(names) if signature.reduction != "sum" else {n for n in names if self._gathers(n)}
        every = ({n for b, n in enumerate(names) if bits >> b & 1} for bits in range(1 << len(names)))
        choices = [some for some in every if must <= some]
        options: list[tuple[Table, dict[str, Table]]] = []  # costs, and cells' numbers of a way of each row
        for rows in choices:
            table = np.zeros(self.shape, dtype=np.int64)
            by_vjp = [k for k in vjp if signature.inputs[k].name not in rows]
            for k in by_vjp:
                table = table + vjp[k]
            if by_vjp:
                here = self.price.of(self.q.types.local)
                table = table + given + here.local(operation, number, dict(roles), by_vjp)
            wanted = {n: own[n] for n in names if n in rows and self.q.wanted[self.numbers[n]]}
            least = sum((tables.min(0) for tables, _ in wanted.values()), table)
            ways = {n: own[n][0].argmin(0) for n in rows}
            options.append((least, ways))
            for numbers, saved in self._shared(way, wanted, with_vjp=bool(by_vjp)):
                costs = sum((own[n][0][i] for n, i in numbers.items()), table) - saved
                costs = sum((own[n][0].min(0) for n in wanted if n not in numbers), costs)
                options.append((costs, ways | {n: np.full(self.shape, i) for n, i in numbers.items()}))
        stacked = np.stack([costs for costs, _ in options])
        best, which = stacked.min(0), stacked.argmin(0)
        for n in names:
            cells = np.full(self.shape, -1)
            for i, (_, ways) in enumerate(options):
                cells = np.where(which == i, ways[n], cells) if n in ways else cells
            chosen[n] = (cells, own[n][1])
        return total + best, chosen

    def _shared(
        self, way: Way, own: Mapping[str, tuple[Table, list[Way]]], *, with_vjp: bool
    ) -> Iterator[tuple[dict[str, int], Table]]:
        """Gradients' rows by ways that fetch the result's gradient alike, or as the vjp does, and what that saves."""
        q, price, signature = self.q, self.price, self.q.operation.signatures[way[0]]
        if len(signature.results) != 1:
            return
        ((result,), stored) = signature.results, q.results[0]
        groups: dict[object, tuple[Table, dict[str, list[int]]]] = {}  # what is fetched, and ways by row
        makes, price = replace(price.wants(signature, result, way[1]), partial=()), price.of(q.types.given[0])
        for name, (_, ways) in own.items():
            one = q.operation.gradients[name]
            for i, (number, roles) in enumerate(ways):
                theirs = one.operation.signatures[number]
                operand = next(o for o, r in zip(theirs.inputs, one.reads, strict=True) if r == f"d{result.name}")
                sets, wants = price.tensors(theirs)[operand.name], price.wants(theirs, operand, roles)
                key = (wants, sets) if wants.has_window else wants
                group = groups.setdefault(key, (price.fetched(sets, stored, wants), {}))
                group[1].setdefault(name, []).append(i)
        for key, (costs, of) in groups.items():
            by_vjp = with_vjp and key == makes
            for some in product(*([None, *numbers] for numbers in of.values())) if costs.any() else ():
                numbers = {name: i for name, i in zip(of, some, strict=True) if i is not None}
                if (fewer := len(numbers) + by_vjp - 1) > 0:
                    yield numbers, self._spread(costs * fewer, 0, result=True)

    def _gathers(self, name: str) -> bool:
        """Whether this gradient must be a row of its own, which reads operands as they are stored."""
        return self.q.again and self.q.learnt[self.numbers[name]]

    def _derived(
        self, signature: Signature, name: str, ways: Sequence[Way], parameters: Mapping[int, Stored]
    ) -> tuple[Table, list[Way]]:
        """A table a way of the gradient's own row."""
        key = name, signature.results, tuple(parameters.items())
        if (known := self._found.get(key)) is None:
            known = np.stack([self._row(signature, name, way, parameters) for way in ways])
            self._found[key] = known
        return known, list(ways)

    def _row(self, signature: Signature, name: str, way: Way, parameters: Mapping[int, Stored]) -> Table:
        """One way of it; what parameters don't matter to is found once for all of theirs."""
        one = self.q.operation.gradients[name]
        (number, roles), price, types = way, self.price, self.q.types.of(name)
        theirs = one.operation.signatures[number]
        tensors, results = price.tensors(theirs), {r.name: j for j, r in enumerate(signature.results)}
        (result,) = theirs.results
        read = list(zip(zip(theirs.inputs, types.fetch, strict=True), one.reads, strict=True))

        def fetched(typed: tuple[Operand, str], source: str) -> Table:
            operand, price = typed[0], self.price.of(typed[1])
            sets = tensors[operand.name]
            wants = price.wants(theirs, operand, roles)
            if (k := self.numbers.get(source)) is not None:
                return self._spread(price.fetched(sets, self._stored(k, parameters), wants), k)
            j = results.get(source, results.get(source.removeprefix("d"), 0))
            return self._spread(price.fetched(sets, self.q.results[j], wants), j, result=True)

        def collected() -> Table:
            sets, k = tensors[result.name], self.numbers[name]
            makes, stored = price.wants(theirs, result, roles), self._stored(k, parameters)
            sums = price.of(types.store)
            return self._spread(sums.reduced(sets, makes, stored, theirs.reduction, parameter=self.q.learnt[k]), k)

        here = [self.numbers[source] in parameters if source in self.numbers else False for _, source in read]
        if (table := self._found.get((name, signature.results, way))) is None:
            local = price.of(types.local).local(one.operation, number, dict(roles))
            table = np.full(self.shape, local, dtype=np.int64)
            for (operand, source), parameter in zip(read, here, strict=True):
                if not parameter:
                    table = table + fetched(operand, source)
            if self.numbers[name] not in parameters:
                table = table + collected()
            self._found[name, signature.results, way] = table
        for (operand, source), parameter in zip(read, here, strict=True):
            if parameter:
                table = table + fetched(operand, source)
        return table + collected() if self.numbers[name] in parameters else table

    def _spread(self, costs: NDArray[Any], k: int, *, result: bool = False) -> NDArray[Any]:
        """A vector over an operand's candidates, or a result's, beside those of the others; a parameter has one."""
        if not result and k not in self.places:
            return costs[0]
        d = len(self.places) + k if result else self.places.index(k)
        return costs.reshape([-1 if i == d else 1 for i in range(len(self.shape))])


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
