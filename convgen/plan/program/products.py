"""The best ways of a product by its own price, its values stored as it likes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from heapq import heappop, heappush

from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way, made, wanted
from convgen.plan.program.every_way import every_way
from convgen.program.rows import Stored, kept

MOST = 6  # ways of a product that a search has
MESSAGES = 4  # latencies by which not splitting a product may be slower than its fastest way, and is tried too
MOST_SLOWER = 3  # a way whose local work takes more than so many times the fastest's is not looked at


def best_ways(operation: Operation, price: Price, parameters: tuple[str, ...], count: int) -> tuple[Way, ...]:
    """The best of all ways of a product, at most `MOST`; and not to split it at all, where that takes little longer.

    Args:
        parameters: by operand, if it is one, the type in which its gradient is summed; else "".
    """
    return _best(operation, price, parameters, min(count, MOST))


@lru_cache(maxsize=4096)
def _best(operation: Operation, price: Price, parameters: tuple[str, ...], count: int) -> tuple[Way, ...]:
    coming = iter(ways := _by_least(operation, price, parameters))
    own = ways.own
    found: list[Way] = []
    after = next(coming, None)
    waiting: list[tuple[int, int, int, Way]] = []  # a heap: picoseconds so far, number, how many steps these are of
    while len(found) < count and (waiting or after):
        if after and not (waiting and waiting[0][0] < after[0]):
            heappush(waiting, (after[0], after[1], 0, after[2]))
            after = next(coming, None)
            continue
        so_far, number, steps, way = heappop(waiting)
        if steps == own.steps:  # all others take at least as much already
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
        """Look at one more way. Parameters are priced only for ways whose local work is within the least total."""
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
        self._indices = [
            [frozenset(i for d in o.dims for i in d.indices) for o in (*one.inputs, *one.results)]
            for one in operation.signatures
        ]
        self._known: dict[object, int] = {}

    def computing(self, local: int) -> int:
        """Picoseconds of local work: forward, and backward for each operand."""
        return local * (1 + len(self.parameters))

    def least(self, local: int, way: Way) -> int:
        """A lower bound of a way's picoseconds: local work, and what is moved of parameters."""
        total = self.computing(local)
        for k, parameter in enumerate(self.parameters):
            if parameter:
                total += self._once(self._fetched, k, way)
                total += self._once(self._collected, k, way)
        return total

    def step(self, number: int, way: Way) -> int:
        """The price of the next value that a way moves. Results come first, each with its gradient; then each operand
        that is no parameter, and then its gradient, whose price takes longer to find."""
        if number < self._results:
            return self._once(self._made, len(self.parameters) + number, way)
        k, is_gradient = divmod(number - self._results, 2)
        return self._once(self._collected if is_gradient else self._fetched, self._read[k], way)

    def _once(self, of: Callable[[int, Way], int], place: int, way: Way) -> int:
        """The price of one move, remembered for all ways that cost the same: those that give the value's own indices
        the same axes, and the other indices together the same."""
        number, roles = way
        indices = self._indices[number][place]
        own, others = list[tuple[str, Axes]](), list[str]()
        for role in roles:
            if role[0] in indices:
                own.append(role)
            else:
                others += role[1]
        key = of.__name__, number, place, tuple(own), tuple(sorted(others))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = of(place, way)
        return known

    def _made(self, place: int, way: Way) -> int:
        signature, roles = self.operation.signatures[way[0]], dict(way[1])
        result = signature.results[place - len(self.parameters)]
        sets, makes = self.price.tensors(signature)[result.name], self.price.wants(signature, result, way[1])
        stored = tuple(made(result, signature, roles))
        costs = self.price.reduced(sets, makes, stored, signature.reduction)
        return int((costs + self.price.fetched(sets, stored, makes.summed)).min())

    def _stored(self, k: int, way: Way) -> tuple[Signature, Operand, Stored]:
        """An operand, and how it is stored for a way."""
        signature = self.operation.signatures[way[0]]
        operand = signature.inputs[k]
        return signature, operand, (kept if self.parameters[k] else wanted)(operand, signature, dict(way[1]))

    def _fetched(self, k: int, way: Way) -> int:
        signature, operand, stored = self._stored(k, way)
        wants = self.price.wants(signature, operand, way[1])
        return int(self.price.fetched(self.price.tensors(signature)[operand.name], (stored,), wants)[0])

    def _collected(self, k: int, way: Way) -> int:
        """An operand's gradient, of a parameter in the type in which it is summed."""
        signature, operand, stored = self._stored(k, way)
        found, parameter = self.price.gradient(signature, operand, way[1]), self.parameters[k]
        sets = self.price.tensors(signature)[operand.name]
        return int(self.price.of(parameter).collected(sets, found, (stored,), parameter=bool(parameter))[0])
