"""The price of a row's gradients by rows of their own: each way of each, over the storage of the row's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from convgen.algebra.signature import Signature
from convgen.cost.busiest import Counts
from convgen.cost.rows import Price
from convgen.plan.program.candidates import Way
from convgen.plan.program.tables import Question, Table
from convgen.program.rows import Stored

Parameters = tuple[tuple[int, Stored], ...]
Moved = Callable[[tuple[Stored, ...]], Counts]


class Cells:
    """Places of a row's values, operands first, then results, and the dimensions of its table that are theirs."""

    def __init__(self, question: Question) -> None:
        self.candidates = (*question.operands, *question.results)
        self.operands = len(question.operands)
        places = [place for place, some in enumerate(self.candidates) if some is not None]
        self.dims = {place: d for d, place in enumerate(places)}
        self.shape = tuple([len(self.candidates[place] or ()) for place in places])

    def spread(self, costs: Table, place: int | None = None) -> Table:
        """Costs with the table's dimensions: vectors over a value's candidates, [several, candidates], or numbers,
        [several], that are the same in all cells."""
        d = None if place is None else self.dims[place]
        return costs.reshape(len(costs), *(-1 if i == d else 1 for i in range(len(self.shape))))


class Fetch(NamedTuple):
    """How a way of a gradient's row fetches the result's gradient: rows with equal keys share the fetch; `costs` are
    picoseconds, by how the result is stored."""

    key: object
    costs: Counts


class GradientRows:
    """The rows that may make a row's gradients, and their prices."""

    def __init__(self, question: Question, price: Price, cells: Cells) -> None:
        self.q, self.price, self.cells = question, price, cells
        self.numbers = {o.name: k for k, o in enumerate(question.operation.signatures[0].inputs)}
        self.ways = {name: list(ways) for name, ways in question.gradients}
        self._tables: dict[object, Table] = {}
        self._of_parameters: dict[object, Counts] = {}
        self._known_moves: dict[object, list[tuple[int, Moved]]] = {}
        self._fetches: dict[tuple[str, str], list[Fetch]] = {}

    def names(self, signature: Signature) -> list[str]:
        """Operands whose gradients may have rows of their own: those that want one, and all where the row is no sum."""
        some = [name for name, ways in self.ways.items() if ways]
        return [n for n in some if self.is_wanted(n) or signature.reduction != "sum"]

    def is_wanted(self, name: str) -> bool:
        return self.q.wanted[self.numbers[name]]

    def must_be(self, name: str) -> bool:
        """Whether this gradient must be a row of its own, which reads operands as they are stored."""
        return self.q.again and self.q.learnt[self.numbers[name]]

    def tables(self, name: str, signature: Signature, some: Sequence[Parameters]) -> Table:
        """[options, ways, cells...].

        Args:
            some: by option, how parameters are stored.
        """
        table = self._table(name, signature)
        of_parameters = [self._with_parameters(name, signature, one) for one in some]
        if not any(one.any() for one in of_parameters):
            return table[None]
        return table + np.stack(of_parameters).reshape(len(some), -1, *(1 for _ in self.cells.shape))

    def _table(self, name: str, signature: Signature) -> Table:
        """Costs of each way, but for the part that depends on how parameters are stored."""
        key = name, signature.results
        if (known := self._tables.get(key)) is None:
            known = self._tables[key] = np.stack([self._row(name, signature, way) for way in self.ways[name]])
        return known

    def _row(self, name: str, signature: Signature, way: Way) -> Table:
        operation, (number, roles) = self.q.operation.gradients[name].operation, way
        local = self.price.of(self.q.types.of(name).local).local(operation, number, dict(roles))
        table = np.full((1, *self.cells.shape), local, dtype=np.int64)
        for place, moved in self._moves(name, signature, way):
            if (stored := self.cells.candidates[place]) is not None:
                table = table + self.cells.spread(moved(stored)[None], place)
        return table[0]

    def _with_parameters(self, name: str, signature: Signature, parameters: Parameters) -> Counts:
        """The part of each way's costs that depends on how parameters are stored."""
        key = name, signature.results, parameters
        if (known := self._of_parameters.get(key)) is None:
            stored = dict(parameters)
            moves = [self._moves(name, signature, way) for way in self.ways[name]]
            each = [sum([int(moved((stored[p],))[0]) for p, moved in some if p in stored]) for some in moves]
            known = self._of_parameters[key] = np.array(each, dtype=np.int64)
        return known

    def _moves(self, name: str, signature: Signature, way: Way) -> list[tuple[int, Moved]]:
        """What a way fetches, and where its result goes: the place of each value, and the price by its storage."""
        key = name, signature.results, way
        if (known := self._known_moves.get(key)) is None:
            known = self._known_moves[key] = [*self._find_moves(name, signature, way)]
        return known

    def _find_moves(self, name: str, signature: Signature, way: Way) -> Iterator[tuple[int, Moved]]:
        one, types, k = self.q.operation.gradients[name], self.q.types.of(name), self.numbers[name]
        (number, roles), price = way, self.price
        theirs = one.operation.signatures[number]
        tensors, results = price.tensors(theirs), {r.name: j for j, r in enumerate(signature.results)}
        for operand, kind, source in zip(theirs.inputs, types.fetch, one.reads, strict=True):
            if (place := self.numbers.get(source)) is None:
                j = results.get(source, results.get(source.removeprefix("d"), 0))
                place = self.cells.operands + j
            wants = price.wants(theirs, operand, roles)
            yield place, partial(price.of(kind).fetched, tensors[operand.name], wanted=wants)
        (result,) = theirs.results
        sums, makes = price.of(types.store), price.wants(theirs, result, roles)
        sets, reduction, learnt = tensors[result.name], theirs.reduction, self.q.learnt[k]
        yield k, lambda stored: sums.reduced(sets, makes, stored, reduction, parameter=learnt)

    def fetches(self, name: str, result: str) -> list[Fetch]:
        """How each way fetches the result's gradient."""
        if (known := self._fetches.get((name, result))) is None:
            one, price, stored = (
                self.q.operation.gradients[name],
                self.price.of(self.q.types.given[0]),
                self.q.results[0],
            )
            known = self._fetches[name, result] = []
            for number, roles in self.ways[name]:
                theirs = one.operation.signatures[number]
                operand = next(o for o, r in zip(theirs.inputs, one.reads, strict=True) if r == f"d{result}")
                sets, wants = price.tensors(theirs)[operand.name], price.wants(theirs, operand, roles)
                key = (wants, sets) if wants.has_window else wants
                known.append(Fetch(key, price.fetched(sets, stored, wants)))
        return known
