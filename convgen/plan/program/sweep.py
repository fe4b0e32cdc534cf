"""Each product of a program by every way that it has, one row after the other, until none is better.

The exact search (search.py) has few ways of a product, in which every rank has something to do, and draws (nearby.py)
meet one of several hundred seldom. Where a device's time is steps of whole tiles, a way with idle ranks may take least.
A way is placed only where its local work alone takes less than the row does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import inf

from convgen.cost.rows import Price
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way
from convgen.plan.program.every_way import every_way
from convgen.plan.program.nearby import Change, Nearby
from convgen.plan.program.row_costs import Laid

SWEEPS = 3  # at most: what a row has found may make another one's way better
OFTEN = 4  # times that a row is looked at from some rows on, at most, as a mean over all
MOST = 24  # ways of a row, or of one of its gradients, those with the least local work


def sweep(near: Nearby) -> None:
    """Take for each product the ways, and for each value the storage, that cost least, until nothing gets better."""
    for _ in range(SWEEPS):
        better = sum(_lay(near, i) for i, bound in enumerate(near.bounds) if bound.operation.is_product)
        if not better + sum(_store(near, value) for value in near.free):
            return


def settle(near: Nearby, rows: Iterable[int]) -> None:
    """The same from some rows on: those that share a value with a row that gets better are looked at after it."""
    waiting, left = dict.fromkeys(sorted(rows)), OFTEN * len(near.bounds)
    while waiting and left:
        i, left, before = next(iter(waiting)), left - 1, near.time_ps
        del waiting[i]
        if near.bounds[i].operation.is_product:
            _lay(near, i)
        values = [v for v in dict.fromkeys((*near.bounds[i].reads, *near.bounds[i].makes)) if v in near.are_free]
        for value in values:
            _store(near, value)
        if near.time_ps < before:
            waiting.update(dict.fromkeys(j for v in values for j in near.touching[v] if j != i))


def _lay(near: Nearby, i: int) -> bool:
    """Whether a row is laid otherwise."""
    return _taken(near, (near.changed({}, {i: laid}, cheaper=True) for laid in _less_work(near, i)))


def _store(near: Nearby, value: str) -> bool:
    """Whether a value is stored otherwise, as a row or one of its gradients likes it."""
    others = [value, *([near.with_[value]] if value in near.with_ else [])]
    rows = [(i, near.hows[i].laid) for i in near.touching[value]]
    liked = {near.liked(value, i, roles) for i, laid in rows for _, roles in (laid.way, *laid.gradients.values())}
    liked.discard(near.stored[value])
    return _taken(near, (near.changed(dict.fromkeys(others, stored), {}, cheaper=True) for stored in sorted(liked)))


def _taken(near: Nearby, changes: Iterable[Change | None]) -> bool:
    """Whether one of these costs less; takes the one that costs least."""
    if found := [change for change in changes if change is not None]:
        near.take(min(found, key=lambda change: change.more_ps))
    return bool(found)


def _less_work(near: Nearby, i: int) -> Iterator[Laid]:
    """Other ways of a row and of its gradients, with less local work than it has now."""
    operation, (now, own), price = near.bounds[i].operation, near.hows[i].laid, near.price_of(i)
    here_ps = price.local(operation, now[0], dict(now[1]))
    yield from (Laid(way, own) for way in _faster(operation, price, here_ps))
    for name, one in operation.gradients.items():
        there = own.get(name)
        most_ps = price.local(one.operation, there[0], dict(there[1])) if there else near.costs[i].alone
        yield from (Laid(now, {**own, name: way}) for way in _faster(one.operation, price, most_ps))
        if there and operation.signatures[now[0]].reduction == "sum":
            yield Laid(now, {other: way for other, way in own.items() if other != name})


def _faster(operation: Operation, price: Price, than_ps: int) -> Iterator[Way]:
    for local_ps, way in _by_work(operation, price)[:MOST]:
        if local_ps >= than_ps:
            return
        yield way


@lru_cache(maxsize=1024)
def _by_work(operation: Operation, price: Price) -> list[tuple[int, Way]]:
    return sorted(every_way(operation, price, inf, idle=True), key=lambda pair: pair[0])
