"""What each option of a row costs, over the storage of its values: counted over many options at once.

What moves for an operand depends on the row's roles and on how this operand is stored, and on nothing else. So a table
is the minimum, over few ways, of sums of vectors. The gradient of an operand is the vjp's, or a row of its own with
roles of its own, whichever is cheaper there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.involved import NAME, most_elements
from convgen.algebra.layout import Layout
from convgen.cost.busiest import Counts
from convgen.cost.rows import Price
from convgen.plan.program.candidates import Roles, Way
from convgen.plan.program.gradient_rows import Cells, GradientRows
from convgen.plan.program.tables import NEVER, Answer, Option, Question, Table
from convgen.program.biases import NONE
from convgen.program.rows import Stored

_VJP = np.array(-1)
AT_ONCE = 1 << 17  # cells of one array of options, their gradients' ways and storages: 1 MiB


def answered(question: Question, price: Price, back: Price | None = None) -> Answer:
    """Tables of a row.

    Args:
        back: the price of backward, where it is another than forward's.
    """
    q, cells, back = question, Cells(question), back or price
    rows = GradientRows(q, back, cells)
    costs = np.empty((len(q.options), *cells.shape), dtype=np.int64)
    memory, derived = np.empty_like(costs), [dict[str, tuple[Table, list[Way]]]() for _ in q.options]
    most = AT_ONCE // max(prod(cells.shape) * max((len(ways) for ways in rows.ways.values()), default=1), 1)
    for some in _at_once(q, max(most, 1)):
        options = _Options(q, price, back, cells, rows, [q.options[i] for i in some])
        costs[some], own = options.costs()
        memory[some] = options.memory(own)
        for name, taken in own.items():
            for i, one in zip(some, taken, strict=True):
                derived[i][name] = one, rows.ways[name]
    of = {way: [k for k, option in enumerate(q.options) if option.way == way] for way in q.ways}
    return Answer(q, costs, memory, np.stack([costs[some].min(0) for some in of.values()]), derived)


def _at_once(question: Question, most: int) -> Iterator[list[int]]:
    """Numbers of options with one signature, at most so many."""
    of: dict[int, list[int]] = {}
    for i, option in enumerate(question.options):
        of.setdefault(option.way[0], []).append(i)
    for some in of.values():
        yield from (some[i : i + most] for i in range(0, len(some), most))


class _Choice(NamedTuple):
    """Some gradients by rows of their own: what all gradients cost, and the ways of those rows, [options, cells...]."""

    costs: Table
    ways: Mapping[str, Table]


class _Options:
    """Options with one signature."""

    def __init__(
        self, q: Question, price: Price, back: Price, cells: Cells, rows: GradientRows, some: Sequence[Option]
    ) -> None:
        self.q, self.price, self.back, self.cells, self.rows, self.some = q, price, back, cells, rows, some
        self.number = some[0].way[0]
        self.signature = q.operation.signatures[self.number]
        self.tensors = price.tensors(self.signature)
        self.shape = (len(some), *cells.shape)
        numbers = dict[Roles, int]()
        self.of = [numbers.setdefault(option.way[1], len(numbers)) for option in some]
        self.roles = [*numbers]
        self._rows: dict[str, Table] = {}
        self._known: dict[tuple[str, object], tuple[Table, Table]] = {}

    # ---------------------------------------------------------------- vectors
    def _by_roles(self, each: Callable[[Roles], int]) -> Table:
        """Costs that roles alone decide, the same for all storages."""
        return self.cells.spread(np.array([each(roles) for roles in self.roles], dtype=np.int64)[self.of])

    def _over(self, place: int, each: Callable[[Roles, tuple[Stored, ...]], Counts]) -> Table:
        """Costs that roles and the storage of one value decide; the option says how a parameter is stored."""
        if (stored := self.cells.candidates[place]) is not None:
            return self.cells.spread(np.array([each(roles, stored) for roles in self.roles])[self.of], place)
        numbers = [each(one.way[1], (dict(one.parameters)[place],))[0] for one in self.some]
        return self.cells.spread(np.array(numbers, dtype=np.int64))

    # ---------------------------------------------------------------- picoseconds
    def costs(self) -> tuple[Table, dict[str, Table]]:
        """Costs, [options, cells...]; and by gradient with a row of its own the number of its way, -1 for the vjp."""
        here, total = self.price.of(self.q.types.local), self.cells.spread(np.zeros(len(self.some), dtype=np.int64))
        local = self._by_roles(lambda roles: here.local(self.q.operation, self.number, dict(roles)))
        for k in range(len(self.signature.inputs)):
            total = total + self._over(k, partial(self._fetched, k))
        for j in range(len(self.signature.results)):
            total = total + self._over(self.cells.operands + j, partial(self._made, j))
        total = total + self._with_bias(local)
        choices = [*self._choices(self.rows.names(self.signature))]
        each = np.stack([np.broadcast_to(one.costs, self.shape) for one in choices])
        which = each.argmin(0)
        own: dict[str, Table] = {}
        for name in self.rows.names(self.signature):
            ways = [np.broadcast_to(one.ways.get(name, _VJP), self.shape) for one in choices]
            own[name] = np.take_along_axis(np.stack(ways), which[None], 0)[0]
        return total + np.take_along_axis(each, which[None], 0)[0], own

    def _with_bias(self, local: Table) -> Table:
        """Local work forward. A bias that stays has none: its product does it, by a pass where its own result moves.

        Args:
            local: the row's own, by option and cell.
        """
        bias = self.q.bias if self.price.machine.adds_biases else NONE
        if bias == NONE:
            return local
        places = [self.cells.operands + j for j in range(len(self.signature.results))]
        moves = sum(self._over(place, partial(self._moves, place)) for place in places)
        if bias.is_bias:
            read = (self._over(k, partial(self._moves, k)) for k in range(len(self.signature.inputs)))
            return np.where(sum(read, moves) > 0, local, 0)
        assert bias.behind is not None
        behind, here = bias.behind, self.price.of(self.q.types.local)
        passes = self._over(places[0], lambda _, stored: np.array([here.over_stored(behind, s) for s in stored]))
        return local + np.where(moves > 0, passes, 0)

    def _moves(self, place: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        """By storage, 1 where the value moves to the row, or from it, and 0 where it does not."""
        own = (*self.signature.inputs, *self.signature.results)[place]
        wants = self.price.wants(self.signature, own, roles)
        return np.array([Layout(NAME, s) != wants for s in stored], dtype=np.int64)

    def _fetched(self, k: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        operand = self.signature.inputs[k]
        wants = self.price.wants(self.signature, operand, roles)
        return self.price.of(self.q.types.fetch[k]).fetched(self.tensors[operand.name], stored, wants)

    def _made(self, j: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        result, reduction = self.signature.results[j], self.signature.reduction
        makes = self.price.wants(self.signature, result, roles)
        return self.price.of(self.q.types.store[j]).reduced(self.tensors[result.name], makes, stored, reduction)

    def _given(self, j: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        """The price of fetching a result's gradient for the vjp."""
        result = self.signature.results[j]
        wants = self.price.wants(self.signature, result, roles).summed
        return self.back.of(self.q.types.given[j]).fetched(self.tensors[result.name], stored, wants)

    def _back(self, k: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        """The price of bringing an operand's gradient from the vjp to where it is stored."""
        operand, types = self.signature.inputs[k], self.q.types
        found, sets = self.price.gradient(self.signature, operand, roles), self.tensors[operand.name]
        back, here = (
            self.back.of(kind).collected(sets, found, stored, parameter=self.q.learnt[k])
            for kind in (types.back[k], types.back_here[k])
        )
        if types.back[k] == types.back_here[k]:
            return back
        wants = self.price.wants(self.signature, operand, roles)
        return np.where([Layout(NAME, s) == wants for s in stored], here, back)

    # ---------------------------------------------------------------- gradients
    def _choices(self, names: Sequence[str]) -> Iterator[_Choice]:
        """Every choice of the vjp or rows of their own; the vjp fetches a result's gradient once for all operands."""
        inputs = self.signature.inputs
        vjp = {
            k: self._over(k, partial(self._back, k))
            for k, operand in enumerate(inputs)
            if operand.gradient and self.q.wanted[k]
        }
        results = [j for j, result in enumerate(self.signature.results) if result.gradient] if vjp else []
        given = [self._over(self.cells.operands + j, partial(self._given, j)) for j in results]
        by_sums = self.signature.reduction == "sum"
        must = {n for n in names if not by_sums or self.rows.must_be(n)}
        every = ({n for b, n in enumerate(names) if bits >> b & 1} for bits in range(1 << len(names)))
        for own in (some for some in every if must <= some):
            by_vjp = [k for k in vjp if inputs[k].name not in own]
            table = self.cells.spread(np.zeros(len(self.some), dtype=np.int64))
            if by_vjp:
                table = sum(given, table + self._by_roles(partial(self._vjp, by_vjp)))
            table = sum((vjp[k] for k in by_vjp), table)
            wanted = [n for n in names if n in own and self.rows.is_wanted(n)]
            ways = {n: self._least(n, None)[1] for n in names if n in own}
            yield _Choice(sum((self._least(n, None)[0] for n in wanted), table), ways)
            for keys, saved, fewer in self._shared(wanted, with_vjp=bool(by_vjp)):
                costs = sum((self._least(n, keys.get(n))[0] for n in wanted), table) - saved
                by_key = {n: self._least(n, key)[1] for n, key in keys.items()}
                yield _Choice(np.where(fewer > 0, costs, NEVER), ways | by_key)

    def _vjp(self, operands: Sequence[int], roles: Roles) -> int:
        here = self.back.of(self.q.types.local)
        return here.local(self.q.operation, self.number, dict(roles), operands)

    def _least(self, name: str, key: object) -> tuple[Table, Table]:
        """Least picoseconds of a gradient's row, [options, cells...], and the number of the first way that takes them.

        Args:
            key: only ways that fetch the result's gradient so; None: all ways.
        """
        if (known := self._known.get((name, key))) is None:
            if name not in self._rows:
                self._rows[name] = self.rows.tables(name, self.signature, [one.parameters for one in self.some])
            table, numbers = self._rows[name], np.arange(len(self.rows.ways[name]))
            if key is not None:
                numbers = numbers[
                    [fetch.key == key for fetch in self.rows.fetches(name, self.signature.results[0].name)]
                ]
                table = table[:, numbers]
            known = self._known[name, key] = table.min(1), numbers[table.argmin(1)]
        return known

    def _shared(self, names: Sequence[str], *, with_vjp: bool) -> Iterator[tuple[dict[str, object], Table, Table]]:
        """Choices of gradients' rows that share one fetch of the result's gradient, with each other or with the vjp.

        Yields for each choice the key of the fetch (`_least`) by gradient, the picoseconds that sharing saves, and, by
        option, the number of fetches saved. Of ways that fetch alike the cheapest is best.
        """
        if len(self.signature.results) != 1:
            return
        (result,) = self.signature.results
        groups: dict[object, tuple[Counts, list[str]]] = {}
        for name in names:
            for fetch in self.rows.fetches(name, result.name):
                _, of = groups.setdefault(fetch.key, (fetch.costs, []))
                if name not in of:
                    of.append(name)
        makes = [self.price.wants(self.signature, result, roles).summed for roles in self.roles]
        for key, (costs, of) in groups.items():
            by_vjp = np.array([with_vjp and key == one for one in makes], dtype=np.int64)[self.of]
            for some in product((False, True), repeat=len(of)) if costs.any() else ():
                keys = {name: key for name, is_taken in zip(of, some, strict=True) if is_taken}
                fewer = len(keys) - 1 + by_vjp
                if keys and fewer.any():
                    saved = self.cells.spread(np.multiply.outer(fewer, costs), self.cells.operands)
                    yield keys, saved, self.cells.spread(fewer)

    # ---------------------------------------------------------------- bytes
    def memory(self, own: Mapping[str, Table]) -> Table:
        """Bytes on the fullest rank, [options, cells...]: parameters with gradient and optimizer's states, and operands
        that move to the row and are kept for the vjp.

        Args:
            own: as `costs` gives it.
        """
        q, total = self.q, np.zeros(self.shape, dtype=np.int64)
        again = self._again(own)
        for k, operand in enumerate(self.signature.inputs):
            if self.cells.candidates[k] is None:
                total += self._over(k, partial(self._parameter, k))
            elif operand.gradient and any(q.wanted) and (q.operation.is_product or q.room.keep == "needed"):
                total += np.where(again, 0, self._over(k, partial(self._gathered, k)))
        return total

    def _parameter(self, k: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        each, sets = self.q.room.parameter_bytes(self.q.types.reads[k]), self.tensors[self.signature.inputs[k].name]
        return np.array([most_elements(sets, Layout(NAME, one)) * each for one in stored], dtype=np.int64)

    def _gathered(self, k: int, roles: Roles, stored: tuple[Stored, ...]) -> Counts:
        operand, there = self.signature.inputs[k], self.price.of(self.q.types.fetch[k])
        sets, wants = self.tensors[operand.name], self.price.wants(self.signature, operand, roles)
        return (self._fetched(k, roles, stored) > 0) * (most_elements(sets, wants) * there.element_bytes)

    def _again(self, own: Mapping[str, Table]) -> NDArray[np.bool_]:
        """Where the gradients of all parameters are rows of their own: they read operands as these are stored, so that
        nothing that was gathered is kept for them."""
        sides = zip(self.signature.inputs, self.q.learnt, self.q.wanted, strict=True)
        learnt = [o.name for o, is_learnt, is_wanted in sides if is_learnt and is_wanted]
        if not learnt or any(name not in own for name in learnt):
            return np.zeros(self.shape, dtype=bool)
        return np.all(np.stack([own[name] >= 0 for name in learnt]), 0)
