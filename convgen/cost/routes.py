"""Routes of tensors from one layout to another on a grid: what moves, counted once, whatever links take of it.

Each conversion is counted on the axes that it involves (algebra/involved). Thousands of conversions are alike in all
that their price depends on, and are one route. On several levels of links, or shared links, an exchange is known by
what its messages put on the links; where there are more than MOST_PAIRS of them, by what its busiest rank sends and
receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from convgen.algebra.blocks import Uneven
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import (
    NAME,
    Involved,
    Rest,
    Side,
    collected,
    involved,
    largest,
    sides_of,
    small_chain,
    widths,
)
from convgen.algebra.layout import Axes, Layout, Window, one_of
from convgen.algebra.redistribute import Conversion, Kind
from convgen.algebra.signature import Reduction
from convgen.cost.busiest import Counts, busiest, messages, most_traffic, travelling
from convgen.cost.links import MOST_PAIRS, Links, Loads
from convgen.cost.machine import Level


class Collective(NamedTuple):
    """A collective; the elements that its busiest rank sends, and those that it sends or receives."""

    kind: Kind
    over: Axes
    sent: int
    busy: int


class Exchange(NamedTuple):
    """An exchange; the elements that its busiest rank sends, and those that it sends or receives.

    Attributes:
        peers: the most ranks that a rank has messages with.
        loads: what the messages put on the links, where all were looked at; `times` so many elements.
    """

    over: Axes
    sent: int
    busy: int
    peers: int
    loads: Loads | None = None
    times: int = 1


Step = Collective | Exchange
Stored = tuple[Axes, ...]
What = tuple[tuple[object, ...], Axes, Axes, int, tuple[object, ...]]
How = Literal["fetch", "collect"] | Reduction


@dataclass(eq=False, slots=True)
class Route:
    """What moves from one layout to another.

    Attributes:
        steps: collectives and exchanges; slices, which move nothing, are left out.
    """

    steps: tuple[Step, ...]


STAYS = Route(())


class Routes:
    """Routes on a grid, on levels of links that hold so many ranks each.

    Args:
        levels: those of any machine on which as many ranks share each level.
    """

    def __init__(self, grid: Grid, levels: tuple[Level, ...]) -> None:
        self.grid, self.links = grid, Links(grid, levels)
        self.plain = len(levels) == 1 and levels[0].shared_bytes_per_s is None
        self._known: dict[object, Route] = {}
        self._alone: dict[object, tuple[Conversion, tuple[int, int]]] = {}  # with what is sent of one element
        self._direct: dict[tuple[IndexSets, Layout, Layout], Route] = {}
        self._several: dict[object, tuple[Route, ...]] = {}
        self._stored: dict[Stored, Layout] = {}
        self._sides: dict[tuple[IndexSets, str], tuple[tuple[int, Side], ...]] = {}
        self._numbers: dict[Side, int] = {}
        self._rests: dict[Rest, tuple[int, bool]] = {}
        self._loads: dict[object, Loads] = {}
        self._crossed: dict[Axes, tuple[Counts, Counts, Counts]] = {}
        self._blocks: dict[tuple[int, Axes, Window | None], tuple[int, bool]] = {}

    def several(self, how: How, sets: IndexSets, one: Layout, stored: tuple[Stored, ...]) -> tuple[Route, ...]:
        """Routes between a layout and each of several storages. Machines with other links ask for the same."""
        key = how, sets, one, stored
        if (found := self._several.get(key)) is None:
            found = self._several[key] = tuple([self.one(how, sets, one, self._as_stored(s)) for s in stored])
        return found

    def one(self, how: How, sets: IndexSets, one: Layout, stored: Layout) -> Route:
        """The route from a tensor's storage to a layout; or, from a gradient or by a reduction, back to the storage."""
        if how == "fetch":
            return self.direct(sets, stored, one)
        return self.collecting(sets, one, stored) if how == "collect" else self.reducing(sets, one, stored, how)

    def _as_stored(self, stored: Stored) -> Layout:
        if (found := self._stored.get(stored)) is None:
            found = self._stored[stored] = one_of(Layout(NAME, stored))
        return found

    def direct(self, sets: IndexSets, src: Layout, dst: Layout) -> Route:
        """The route from one layout to another."""
        if src == dst:
            return STAYS
        key = sets, src, dst
        if (found := self._direct.get(key)) is None:
            what = self._what(sets, src, dst)
            if (found := self._known.get(what)) is None:
                found = self._known[what] = Route(self._chain(sets, src, dst, what))
            self._direct[key] = found
        return found

    def reducing(self, sets: IndexSets, made: Layout, stored: Layout, reduction: Reduction) -> Route:
        """The route from a result as a row makes it to where it is stored; what is no sum is gathered first."""
        if reduction == "sum" or not made.partial:
            return self.direct(sets, made, stored)
        what = reduction, sets, made, stored
        if (known := self._known.get(what)) is None:
            first = self.step(sets, Conversion("all_gather", made.partial, made, made.summed, reduction))
            rest = self.direct(sets, made.summed, stored).steps
            known = self._known[what] = Route(rest if first is None else (first, *rest))
        return known

    def collecting(self, sets: IndexSets, found: Layout, stored: Layout) -> Route:
        """The route from a gradient as a row found it to where the operand is stored."""
        if not found.has_window:
            return self.direct(sets, found, stored)
        what = "collected", self._what(sets, found, stored)
        if (known := self._known.get(what)) is None:
            steps = (self.step(sets, c) for c in collected(sets, found, stored))
            known = self._known[what] = Route(tuple([step for step in steps if step is not None]))
        return known

    def step(self, sets: IndexSets, c: Conversion, rest: Sequence[Rest] = (), inner: int = 1) -> Step | None:
        """What moves in a conversion; None for a slice.

        Args:
            rest: dimensions that `sets` leaves out.
            inner: elements for each element of `sets`.
        """
        return None if c.kind == "slice" else self._counted(involved(sets, c.src, c.dst), c, rest, inner)

    def _chain(self, sets: IndexSets, src: Layout, dst: Layout, what: What) -> tuple[Step, ...]:
        *moves, left, _ = what
        if (known := self._alone.get(key := tuple(moves))) is not None:
            return _collective(self.grid, *known, left)
        part = involved(sets, src, dst)
        chain = small_chain(part.sets, part.src, part.dst)
        if len(chain) != 1:
            steps = [self.step(part.sets, c, part.rest, part.inner) for c in chain]
            return tuple([step for step in steps if step is not None])
        (c,) = chain
        if c.kind == "exchange":
            return (self._exchange(part, c, part.rest, left, part.inner),)
        most = (0, 0) if c.kind == "slice" else busiest(part.sets, c.kind, c.over, part.src, part.dst)
        self._alone[key] = c, most
        return _collective(self.grid, c, most, left)

    def _what(self, sets: IndexSets, src: Layout, dst: Layout) -> What:
        """All that a price depends on: dimensions that change, how many elements there are for each element of these,
        and the other dimensions of which ranks have unequal parts. Thousands of conversions have it in common."""
        if (sides := self._sides.get((sets, src.tensor))) is None:
            own = sides_of(sets, src.tensor)
            sides = tuple([(self._numbers.setdefault(s, len(self._numbers)), s) for s in own])
            self._sides[sets, src.tensor] = sides
        left = sets.weight(src.tensor)
        changed: list[object] = []
        uneven: list[object] = []
        for (number, side), axes, other, window, to in zip(
            sides, src.axes, dst.axes, src.windows, dst.windows, strict=True
        ):
            if axes != other or window != to:
                changed.append((number, axes, other, window, to))
                continue
            block = number, axes, window
            if (found := self._blocks.get(block)) is None:
                found = self._blocks[block] = self._rest(Rest(side, axes, window))
            left *= found[0]
            if not found[1]:
                uneven.append(block)
        return tuple(changed), src.partial, dst.partial, left, tuple(uneven)

    def _rest(self, rest: Rest) -> tuple[int, bool]:
        """The most elements that a rank has of a dimension; and whether all ranks have as many."""
        if (found := self._rests.get(rest)) is None:
            dim = rest.side.dim
            even = rest.window is None and dim.groups == 1 and dim.extent % self.grid.over(rest.axes) == 0
            even = even and not any(isinstance(self.grid.sizes[a], Uneven) for a in rest.axes)
            found = self._rests[rest] = largest(self.grid.axes, rest), even
        return found

    def _counted(self, part: Involved, c: Conversion, rest: Sequence[Rest], inner: int) -> Step:
        others = (*rest, *part.rest)
        left = prod([self._rest(r)[0] for r in others]) * inner * part.inner
        if c.kind == "exchange":
            return self._exchange(part, c, others, left, inner * part.inner)
        (found,) = _collective(self.grid, c, busiest(part.sets, c.kind, c.over, part.src, part.dst), left)
        return found

    def _exchange(self, part: Involved, c: Conversion, rest: Sequence[Rest], left: int, inner: int) -> Exchange:
        adds, small = c.reduction is not None, part.sets.grid
        if self.plain or self.grid.ranks * small.ranks > MOST_PAIRS:
            sent, busy, peers = most_traffic(part.sets, part.src, part.dst, adds=adds)
            return Exchange(c.over, sent * left, busy * left, peers)
        found = messages(part.sets, part.src, part.dst, adds=adds)
        sent = int(np.bincount(found[1], weights=found[0]).max()) if len(found[0]) else 0
        if all(self._rest(r)[1] for r in rest):  # all messages grow by the same factor
            return Exchange(c.over, sent * left, 0, 0, self._of_messages(small, found, (), 1), left)
        return Exchange(c.over, sent * left, 0, 0, self._of_messages(small, found, rest, inner))

    def _of_messages(
        self, small: Grid, found: tuple[Counts, Counts, Counts], rest: Sequence[Rest], inner: int
    ) -> Loads:
        """What messages of a small grid, each of which many pairs of ranks send, put on the links."""
        counts, sender, receiver = found
        base, place, crossed = self._between(small)
        size = np.full(len(base), inner, dtype=np.int64)
        for r in rest:
            size = size * self._widths(r, base)
        key = small.names, counts.tobytes(), sender.tobytes(), receiver.tobytes(), size.tobytes()
        if (known := self._loads.get(key)) is None:
            some = size > 0
            src, dst = (np.add.outer(base[some], place[end]).ravel() for end in (sender, receiver))
            sizes = np.multiply.outer(size[some], counts).ravel()
            over = crossed[some][:, sender, receiver].ravel()
            known = self._loads[key] = self.links.loads(src, dst, sizes, over)
        return known

    def _between(self, small: Grid) -> tuple[Counts, Counts, Counts]:
        """For a small grid: the first rank at each place along the other axes; the small grid's ranks, counted from
        that one; and the level that a message crosses, [first rank, from, to]."""
        if (known := self._crossed.get(small.names)) is None:
            grid = self.grid
            base, place = grid.firsts(a for a in grid.names if a not in small.names), grid.firsts(small.names)
            ranks = np.add.outer(base, place)
            known = base, place, self.links.level(*np.broadcast_arrays(ranks[:, :, None], ranks[:, None, :]))
            self._crossed[small.names] = known
        return known

    def _widths(self, rest: Rest, ranks: Counts) -> Counts:
        """How many elements these ranks have of a dimension."""
        axes = tuple([(a, n) for a, n in self.grid.axes if a in rest.axes])
        return widths(axes, rest)[self.grid.places(a for a, _ in axes)[ranks]]


def _collective(grid: Grid, c: Conversion, most: tuple[int, int], left: int) -> tuple[Collective, ...]:
    """A collective on its own; nothing for a slice.

    Args:
        most: elements that the busiest rank sends, and that it sends or receives, for each of `left`.
    """
    if c.kind == "slice":
        return ()
    sent, busy = (travelling(n * left, c) for n in most)
    if c.kind == "all_reduce":
        p = grid.over(c.over)
        sent = busy = busy + (p - 2) * -(-busy // p)
    return (Collective(c.kind, c.over, sent, busy),)


@lru_cache(maxsize=32)
def _routes_on(grid: Grid, levels: tuple[Level, ...]) -> Routes:
    return Routes(grid, levels)


def routes_on(grid: Grid, levels: tuple[Level, ...]) -> Routes:
    """The routes that all machines share whose levels hold as many ranks, and share links alike."""
    alike = [replace(one, name="", latency_s=1.0, bytes_per_s=1.0) for one in levels]
    return _routes_on(
        grid, tuple([one if one.shared_bytes_per_s is None else replace(one, shared_bytes_per_s=1.0) for one in alike])
    )


def forget_routes() -> None:
    """Forget the routes of all grids."""
    _routes_on.cache_clear()
