"""The best ways of a product by its own price, its values stored as it likes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Layout
from convgen.algebra.signature import Operand, Signature
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Roles, Way, made, wanted
from convgen.plan.program.every_way import every_way
from convgen.program.rows import Stored, kept

MOST = 6
MESSAGES = 4
MOST_SLOWER = 3  # a way whose local work takes more than so many times the fastest's is not looked at


def best_ways(operation: Operation, price: Price, parameters: tuple[str, ...], count: int) -> tuple[Way, ...]:
    """The best of all ways of a product, at most `MOST`; and not to split it at all, where that takes little longer.

    Args:
        parameters: by operand, if it is one, the type in which its gradient is summed; else "".
    """
    return _best(operation, price, parameters, min(count, MOST))


@lru_cache(maxsize=4096)
def _best(operation: Operation, price: Price, parameters: tuple[str, ...], count: int) -> tuple[Way, ...]:
    own, coming = _OwnPrice(operation, price, parameters), iter(ways := _by_least(operation, price, parameters))
    found: list[Way] = []
    after = next(coming, None)
    waiting: list[tuple[int, int, int, Way]] = []  # a heap: picoseconds so far, number, how many steps these are of
    while len(found) < count and (waiting or after):
        if after and not (waiting and waiting[0][0] < after[0]):
            heappush(waiting, (after[0], after[1], 0, after[2]))
            after = next(coming, None)
            continue
        so_far, number, steps, way = heappop(waiting)
        if steps == own.steps:  # others take as much already
            found.append(way)
        else:
            heappush(waiting, (so_far + own.step(steps, way), number, steps + 1, way))
    return tuple(found) if _WHOLE in found or not _is_small(operation, price, ways.fastest) else (*found, _WHOLE)


_WHOLE: Way = (0, ())


def _is_small(operation: Operation, price: Price, fastest: int) -> bool:
    """Whether to compute all of it on every rank takes no longer, by more than a few messages do, than to split it."""
    if operation.signatures[0].reduction == "max":
        return False
    latency_s = max(level.latency_s for level in price.machine.levels)
    return (price.local(operation, 0, {}) - fastest) / PICOSECONDS <= MESSAGES * latency_s


class _ByLeast:
    """(picoseconds without what is moved of activations, number, way), least first: as many as are asked for."""

    def __init__(self, operation: Operation, price: Price, parameters: tuple[str, ...]) -> None:
        self.own = _OwnPrice(operation, price, parameters)
        by_work = sorted((local, i, way) for i, (local, way) in enumerate(every_way(operation, price, MOST_SLOWER)))
        self.fastest = min((local for local, _, _ in by_work), default=0)
        self.waiting, self.sorted = iter(by_work), list[tuple[int, int, Way]]()
        self.next = next(self.waiting, None)
        self.seen: list[tuple[int, int, Way]] = []  # a heap

    def __iter__(self) -> Iterator[tuple[int, int, Way]]:
        k = 0
        while k < len(self.sorted) or self._one_more():
            yield self.sorted[k]
            k += 1

    def _one_more(self) -> bool:
        """Parameters are priced of those ways alone whose local work is no more than what others take in all."""
        while self.next is not None and (not self.seen or self.own.computing(self.next[0]) <= self.seen[0][0]):
            local, i, way = self.next
            heappush(self.seen, (self.own.least(local, way), i, way))
            self.next = next(self.waiting, None)
        if self.seen:
            self.sorted.append(heappop(self.seen))
            return True
        return False


@lru_cache(maxsize=4096)
def _by_least(operation: Operation, price: Price, parameters: tuple[str, ...]) -> _ByLeast:
    return _ByLeast(operation, price, parameters)


class _OwnPrice:
    """Picoseconds of a product's row with its gradients by the vjp, one after the other of the steps that it takes."""

    def __init__(self, operation: Operation, price: Price, parameters: tuple[str, ...]) -> None:
        self.operation, self.price, self.parameters = operation, price, parameters
        self._results = len(operation.signatures[0].results)
        self._read = [k for k, parameter in enumerate(parameters) if not parameter]
        self.steps = self._results + 2 * len(self._read)
        self._known: dict[tuple[IndexSets, Layout, bool], int] = {}

    def computing(self, local: int) -> int:
        """Forward, and for each operand backward."""
        return local * (1 + len(self.parameters))

    def least(self, local: int, way: Way) -> int:
        """With what is moved of parameters alone."""
        signature, roles = self.operation.signatures[way[0]], dict(way[1])
        total = self.computing(local)
        for operand, parameter in zip(signature.inputs, self.parameters, strict=True):
            if parameter:
                stored = kept(operand, signature, roles)
                total += self._fetched(signature, operand, way[1], stored)
                total += self._collected(signature, operand, way[1], stored, parameter)
        return total

    def step(self, number: int, way: Way) -> int:
        """What is moved of a result and its gradient; then of each operand that is no parameter, of its gradient, then
        of it."""
        signature, roles = self.operation.signatures[way[0]], dict(way[1])
        if number < self._results:
            result = signature.results[number]
            sets, makes = self.price.tensors(signature)[result.name], self.price.wants(signature, result, way[1])
            stored = tuple(made(result, signature, roles))
            costs = self.price.reduced(sets, makes, stored, signature.reduction)
            return int((costs + self.price.fetched(sets, stored, makes.summed)).min())
        k, is_fetch = divmod(number - self._results, 2)
        operand = signature.inputs[self._read[k]]
        of = self._fetched if is_fetch else self._collected
        return of(signature, operand, way[1], wanted(operand, signature, roles))

    def _fetched(self, signature: Signature, operand: Operand, roles: Roles, stored: Stored) -> int:
        sets, wants = self.price.tensors(signature)[operand.name], self.price.wants(signature, operand, roles)
        if (known := self._known.get((sets, wants, True))) is None:
            known = self._known[sets, wants, True] = int(self.price.fetched(sets, (stored,), wants)[0])
        return known

    def _collected(
        self, signature: Signature, operand: Operand, roles: Roles, stored: Stored, parameter: str = ""
    ) -> int:
        """An operand's gradient.

        Args:
            parameter: of one the type in which its gradient is summed.
        """
        sets, found = self.price.tensors(signature)[operand.name], self.price.gradient(signature, operand, roles)
        if (known := self._known.get((sets, found, False))) is None:
            there = self.price.of(parameter)
            known = int(there.collected(sets, found, (stored,), parameter=bool(parameter))[0])
            self._known[sets, found, False] = known
        return known
