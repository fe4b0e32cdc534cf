"""Prices below which no step of training is, whatever overlaps in it: a sum over rows, as searches need.

A step is forward, then backward. In each, a rank computes its part, and waits for collectives that nothing hides; and
all its collectives share one link, a byte after the other (cost/link.py). So each pass takes at least either of these
times, and at least any mean of the two:

    share (what one rank computes + what can't be hidden) + (1 - share) (seconds of bytes that move)

which is a sum over rows. Halos, gathers, scatters and sums may be hidden; transposes (all_to_all) never are. Bytes are
priced as part of many, by the algorithm that is best for many, since buckets and chunks may choose another one. Halos
count nothing, as one wide halo may stand for several (widen-halos); neither do bytes on machines with measured
collectives, as these say nothing of other sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Kind
from convgen.cost.collectives import usable
from convgen.cost.links import collective_seconds
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS, Moves, Priced
from convgen.cost.routes import Exchange, Step
from convgen.cost.rows import Price
from convgen.cost.timeline import rank_seconds
from convgen.operations.row import Operation

MANY = 1 << 40  # bytes of so large a collective that latencies don't matter
WAITED = ("all_to_all",)


class Relaxed(Price):
    """Prices of a row's steps as parts of a lower bound.

    Args:
        price: what steps cost.
        rank: the rank whose computing counts.
        share: the weight of computing and of what can't be hidden; bytes have the rest.
    """

    def __init__(self, price: Price, rank: int, share: float) -> None:
        super().__init__(price.grid, price.machine, price.dtype, price.computed)
        self.price, self.rank, self.share = price, rank, share
        self._local: dict[object, int] = {}
        self.moves = _Waited(price, share)

    def of(self, kind: str) -> Price:
        other = self.price.of(kind)
        if other is self.price:
            return self
        if kind not in self._others:
            self._others[kind] = Relaxed(other, self.rank, self.share)
        return self._others[kind]

    def _find_local(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None,
        derived: Collection[int],
    ) -> int:
        seconds = rank_seconds(self.price, operation, way, tuple(roles.items()), tuple(asked or ()), tuple(derived))
        return int(self.share * float(seconds[self.rank]) * PICOSECONDS)


class _Waited(Moves):
    """What conversions make ranks wait, or keep links busy, weighted."""

    def __init__(self, price: Price, share: float) -> None:
        super().__init__(price.grid, price.machine, price.element_bytes)
        self.share = share

    def _priced(self, step: Step) -> Priced:
        if isinstance(step, Exchange):
            return Priced(step.sent, 0)
        kind, over, sent, busy = step
        waited = super()._priced(step).ps if kind in WAITED else 0
        machine = self.machine
        each = 0.0 if machine.steps or machine.misfits else byte_seconds(self.grid, machine, kind, over)
        moving = busy * self.element_bytes * each * PICOSECONDS
        return Priced(sent, int(self.share * waited + (1 - self.share) * min(moving, waited or moving)))


@lru_cache(maxsize=1 << 12)
def byte_seconds(grid: Grid, machine: Machine, kind: Kind, over: Axes) -> float:
    """The least seconds for each byte that a rank sends, as one of many."""
    how = machine.collectives.of(kind)
    names = usable(kind, grid.over(over)) if how == "best" else (how,)

    def seconds(count: int, name: str) -> float:
        return collective_seconds(grid, machine.levels, kind, over, count, machine.add_s_per_byte, name)[0]

    return min(seconds(2 * MANY, name) - seconds(MANY, name) for name in names) / MANY
