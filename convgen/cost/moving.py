"""What conversions cost on a machine: the time of the busiest rank, for any tensors.

Each is counted on the axes that it involves (algebra/involved). On a machine of several levels, or whose links are
shared, an exchange is priced message by message; where these are more than MOST_PAIRS, as if all of them crossed the
outermost level that they reach: a bound from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import Involved, Rest, involved, largest, overlapping, small_chain, widths
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, Kind
from convgen.cost.exchanges import exchange_traffic
from convgen.cost.links import MOST_PAIRS, Links, collective_seconds, direct_all_to_all, slowest
from convgen.cost.machine import Machine
from convgen.cost.traffic import elements_received, elements_sent

PICOSECONDS = 10**12
Counts = NDArray[np.int64]


def sent_elements(sets: IndexSets, c: Conversion) -> Counts:
    """Elements that leave each rank."""
    if c.kind == "exchange" and c.reduction is not None:
        return _flows(sets, c.src, c.dst, adds=True)[0][0].sum(axis=1)
    return elements_sent(sets, c.kind, c.over, c.src, c.dst)


class Moves:
    """Conversions on a grid of a machine's ranks.

    Args:
        element_bytes: of what is moved.
    """

    def __init__(self, grid: Grid, machine: Machine, element_bytes: int) -> None:
        self.grid, self.machine, self.element_bytes = grid, machine, element_bytes
        self.links = Links(grid, machine.levels)
        self.plain = len(machine.levels) == 1 and machine.levels[0].shared_bytes_per_s is None

    def conversion(self, sets: IndexSets, c: Conversion, rest: Sequence[Rest] = ()) -> int:
        """Picoseconds of a conversion; a slice takes none.

        Args:
            rest: dimensions that `sets` leaves out.
        """
        return 0 if c.kind == "slice" else self._priced(involved(sets, c.src, c.dst), c, rest)

    def chain(self, sets: IndexSets, src: Layout, dst: Layout) -> int:
        """Picoseconds from one layout to another."""
        if src == dst:
            return 0
        part = involved(sets, src, dst)
        chain = small_chain(part.sets, part.src, part.dst)
        if len(chain) == 1:
            return 0 if chain[0].kind == "slice" else self._priced(part, chain[0], ())
        return sum(self.conversion(part.sets, c, part.rest) for c in chain)

    def _priced(self, part: Involved, c: Conversion, rest: Sequence[Rest]) -> int:
        others = (*rest, *part.rest)
        left = prod([largest(self.grid.axes, r) for r in others])
        if c.kind == "exchange":
            return round(self._exchange(part.sets, part.src, part.dst, others, left, c) * PICOSECONDS)
        count = busiest(part.sets, c.kind, c.over, part.src, part.dst) * left
        if c.kind == "all_reduce":
            p = self.grid.over(c.over)
            count += (p - 2) * -(-count // p)
        return round(self._collective(c.kind, c.over, count * self.element_bytes) * PICOSECONDS)

    def _collective(self, kind: Kind, over: Axes, sent_bytes: int) -> float:
        machine = self.machine
        algorithm = machine.collectives.of(kind)
        if kind == "all_to_all" and algorithm == "direct":
            start, each = direct_all_to_all(self.grid, machine.levels, over)  # linear in the bytes
            return start + sent_bytes * each
        what = (self.grid, machine.levels, kind, over, sent_bytes, machine.add_s_per_byte, algorithm)
        return collective_seconds(*what)[0]

    def _exchange(
        self, sets: IndexSets, src: Layout, dst: Layout, rest: Sequence[Rest], left: int, c: Conversion
    ) -> float:
        levels, adds = self.machine.levels, c.reduction is not None
        if not self.plain and self.grid.ranks * sets.grid.ranks <= MOST_PAIRS:
            return self._message_by_message(sets.grid, messages(sets, src, dst, adds=adds), rest)
        busy, peers = most_traffic(sets, src, dst, adds=adds)
        count = busy * left * self.element_bytes
        if self.plain:
            return peers * levels[0].latency_s + count / levels[0].bytes_per_s
        return peers * max(one.latency_s for one in levels) + count * slowest(self.grid, levels, c.over)

    def _message_by_message(self, small: Grid, found: tuple[Counts, Counts, Counts], rest: Sequence[Rest]) -> float:
        grid, (counts, sender, receiver) = self.grid, found
        if not len(counts):
            return 0.0
        base = np.flatnonzero(sum(grid.coordinates[a] for a in small.names) == 0)
        stride = {a: prod(n for _, n in grid.axes[i + 1 :]) for i, a in enumerate(grid.names)}
        place = np.sum([small.coordinates[a] * stride[a] for a in small.names], axis=0)
        size = np.full(len(base), self.element_bytes, dtype=np.int64)
        for r in rest:
            size = size * widths(grid.axes, r)[base]
        base, size = base[size > 0], size[size > 0]
        src, dst = (np.add.outer(base, place[end]).ravel() for end in (sender, receiver))
        return self.links.exchange(src, dst, np.multiply.outer(size, counts).ravel())


@lru_cache(maxsize=1 << 16)
def busiest(sets: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> int:
    """Elements that the busiest rank sends or receives in a collective; of an all-reduce those that it holds."""
    if kind == "all_reduce":
        return int(sets.elements(src).max())
    what = (sets, kind, over, src, dst)
    return int(np.maximum(elements_sent(*what), elements_received(*what)).max())


@lru_cache(maxsize=1 << 16)
def most_traffic(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[int, int]:
    """Of an exchange: the most elements that a rank sends or receives, and the most messages of one."""
    _, busy, peers = exchange_traffic(sets, src, dst, adds=adds)
    return busy, peers


@lru_cache(maxsize=1 << 14)
def messages(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[Counts, Counts, Counts]:
    """Of an exchange: (elements, sender, receiver) of every message.

    Args:
        adds: what ranks hold overlaps, and is added where it is stored.
    """
    flows, members = _flows(sets, src, dst, adds=adds)
    group, one, other = np.nonzero(flows)
    return flows[group, one, other], members[group, one], members[group, other]


def _flows(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[Counts, Counts]:
    """Elements, [groups, from, to], and the ranks of each group."""
    if not adds:
        members, flows = sets.flows(src, dst)
        return flows, members
    flows = overlapping(sets, src, dst)
    np.fill_diagonal(flows, 0)
    return flows[None], np.arange(sets.grid.ranks)[None]
