"""What conversions cost on a machine: the time of the busiest rank, for any tensors.

Each is counted on the axes that it involves (algebra/involved). On a machine of several levels, or whose links are
shared, an exchange is priced message by message; where these are more than MOST_PAIRS, as if all of them crossed the
outermost level that they reach: a bound from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import Uneven
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import (
    Involved,
    Rest,
    Side,
    collected,
    involved,
    largest,
    overlapping,
    sides_of,
    small_chain,
    widths,
)
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import Conversion, Kind
from convgen.cost.collectives import Collectives
from convgen.cost.exchanges import exchange_traffic
from convgen.cost.links import MOST_PAIRS, Links, collective_seconds, direct_all_to_all, outermost, slowest
from convgen.cost.machine import Machine
from convgen.cost.measured_steps import Travel
from convgen.cost.traffic import elements_received, elements_sent

PICOSECONDS = 10**12
MANY, LAST = 256, 64  # ranks; tensors
Counts = NDArray[np.int64]


def sent_elements(sets: IndexSets, c: Conversion) -> Counts:
    """Elements that leave each rank."""
    if c.kind == "exchange" and c.reduction is not None:
        return _flows(sets, c.src, c.dst, adds=True)[0][0].sum(axis=1)
    return travelling(elements_sent(sets, c.kind, c.over, c.src, c.dst), c)


Elements = TypeVar("Elements", int, Counts)


def travelling(elements: Elements, c: Conversion) -> Elements:
    """Of (count, mean, M2) of moments ranks know the counts."""
    return elements // 3 * 2 if c.reduction == "merge" else elements


class Priced(NamedTuple):
    """A conversion: the most elements that a rank sends, and picoseconds."""

    sent: int
    ps: int


NOTHING = Priced(0, 0)


class Moves:
    """Conversions on a grid of a machine's ranks.

    Args:
        element_bytes: of what is moved.
        collectives: the algorithms, instead of the machine's.
    """

    def __init__(
        self, grid: Grid, machine: Machine, element_bytes: int, collectives: Collectives | None = None
    ) -> None:
        self.grid, self.machine, self.element_bytes = grid, machine, element_bytes
        self.collectives = collectives or machine.collectives
        self.links = Links(grid, machine.levels)
        self.plain = len(machine.levels) == 1 and machine.levels[0].shared_bytes_per_s is None
        self._known: dict[object, int] = {}
        self._sides: dict[tuple[IndexSets, str], tuple[tuple[int, Side], ...]] = {}
        self._numbers: dict[Side, int] = {}
        self._rests: dict[Rest, tuple[int, bool]] = {}
        self._lines: dict[tuple[IndexSets, Layout, Layout, bool], tuple[float, float]] = {}
        self._blocks: dict[tuple[int, Axes, Window | None], tuple[int, bool]] = {}

    def conversion(self, sets: IndexSets, c: Conversion) -> int:
        """Picoseconds of a conversion; a slice takes none."""
        return self.moved(sets, c).ps

    def moved(self, sets: IndexSets, c: Conversion, rest: Sequence[Rest] = (), inner: int = 1) -> Priced:
        """A conversion.

        Args:
            rest: dimensions that `sets` leaves out.
            inner: elements for each that `sets` has.
        """
        return NOTHING if c.kind == "slice" else self._priced(involved(sets, c.src, c.dst), c, rest, inner)

    def chain(self, sets: IndexSets, src: Layout, dst: Layout) -> int:
        """Picoseconds from one layout to another."""
        if src == dst:
            return 0
        what = self._what(sets, src, dst)
        if (found := self._known.get(what)) is None:
            found = self._known[what] = self._chain(sets, src, dst)
        return found

    def _chain(self, sets: IndexSets, src: Layout, dst: Layout) -> int:
        part = involved(sets, src, dst)
        chain = small_chain(part.sets, part.src, part.dst)
        if len(chain) == 1:
            return 0 if chain[0].kind == "slice" else self._priced(part, chain[0], (), 1).ps
        return sum(self.moved(part.sets, c, part.rest, part.inner).ps for c in chain)

    def collected(self, sets: IndexSets, found: Layout, stored: Layout) -> int:
        """Picoseconds from a gradient as a row found it to where the operand is stored."""
        if not found.has_window:
            return self.chain(sets, found, stored)
        what = ("collected", self._what(sets, found, stored))
        if (known := self._known.get(what)) is None:
            known = self._known[what] = sum(self.conversion(sets, c) for c in collected(sets, found, stored))
        return known

    def _what(self, sets: IndexSets, src: Layout, dst: Layout) -> object:
        """All that the price depends on: dimensions that change, elements for each of theirs, and those dimensions of
        which ranks have unlike many. Thousands of conversions are alike in it."""
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
        """The most elements of a dimension that a rank has; whether all have as many."""
        if (found := self._rests.get(rest)) is None:
            dim = rest.side.dim
            even = rest.window is None and dim.groups == 1 and dim.extent % self.grid.over(rest.axes) == 0
            even = even and not any(isinstance(self.grid.sizes[a], Uneven) for a in rest.axes)
            found = self._rests[rest] = largest(self.grid.axes, rest), even
        return found

    def _priced(self, part: Involved, c: Conversion, rest: Sequence[Rest], inner: int) -> Priced:
        others = (*rest, *part.rest)
        left = prod([self._rest(r)[0] for r in others]) * inner * part.inner
        if c.kind == "exchange":
            sent, seconds = self._exchange(part, c, others, left, inner * part.inner)
            return self._measured(c, sent, seconds)
        sent, busy = (travelling(n * left, c) for n in busiest(part.sets, c.kind, c.over, part.src, part.dst))
        if c.kind == "all_reduce":
            p = self.grid.over(c.over)
            sent = busy = busy + (p - 2) * -(-busy // p)
        return self._measured(c, sent, self._collective(c.kind, c.over, busy * self.element_bytes))

    def _measured(self, c: Conversion, sent: int, modelled_s: float) -> Priced:
        """As it was measured; or as the machine was measured to be off, where it was."""
        if (known := self.measured(c.kind, c.over, sent)) is not None:
            return Priced(sent, round(known * PICOSECONDS))
        over = self.machine.over_model(c.kind, self.grid.over(c.over), sent * self.element_bytes)
        return Priced(sent, round(modelled_s * over * PICOSECONDS))

    def travel(self, kind: Kind, over: Axes, sent: int) -> Travel:
        """What a collective is that sends so many elements."""
        level = self.machine.levels[outermost(self.grid, self.machine.levels, over)]
        return Travel(kind, self.grid.over(over), level.name, sent * self.element_bytes)

    def measured(self, kind: Kind, over: Axes, sent: int) -> float | None:
        """Seconds of a collective that sends so many elements, where it was measured."""
        steps = self.machine.steps
        return steps.seconds(self.travel(kind, over, sent)) if steps else None

    def _collective(self, kind: Kind, over: Axes, sent_bytes: int) -> float:
        machine = self.machine
        algorithm = self.collectives.of(kind)
        if kind == "all_to_all" and algorithm == "direct":
            start, each = direct_all_to_all(self.grid, machine.levels, over)  # linear in the bytes
            return start + sent_bytes * each
        what = (self.grid, machine.levels, kind, over, sent_bytes, machine.add_s_per_byte, algorithm)
        return collective_seconds(*what)[0]

    def _exchange(
        self, part: Involved, c: Conversion, rest: Sequence[Rest], left: int, inner: int
    ) -> tuple[int, float]:
        """(the most elements that a rank sends, seconds)."""
        levels, adds, small = self.machine.levels, c.reduction is not None, part.sets.grid
        sent, busy, peers = most_traffic(part.sets, part.src, part.dst, adds=adds)
        if not self.plain and self.grid.ranks * small.ranks <= MOST_PAIRS:
            if all(self._rest(r)[1] for r in rest):  # all messages are longer alike
                start, each = self._line(part, adds)
                return sent * left, start + left * each
            found = messages(part.sets, part.src, part.dst, adds=adds)
            return sent * left, sum(self._message_by_message(small, found, rest, inner))
        count = busy * left * self.element_bytes
        if self.plain:
            return sent * left, peers * levels[0].latency_s + count / levels[0].bytes_per_s
        return sent * left, peers * max(one.latency_s for one in levels) + count * slowest(self.grid, levels, c.over)

    def _line(self, part: Involved, adds: bool) -> tuple[float, float]:
        """Seconds that an exchange takes to start, and for each element that stands for one of its own."""
        key = part.sets, part.src, part.dst, adds
        if (found := self._lines.get(key)) is None:
            all_of_it = messages(*key[:3], adds=adds)
            found = self._lines[key] = self._message_by_message(part.sets.grid, all_of_it, (), 1)
        return found

    def _message_by_message(
        self, small: Grid, found: tuple[Counts, Counts, Counts], rest: Sequence[Rest], inner: int
    ) -> tuple[float, float]:
        """Seconds that it takes to start, and those of its bytes."""
        grid, (counts, sender, receiver) = self.grid, found
        if not len(counts):
            return 0.0, 0.0
        base, place = grid.firsts(a for a in grid.names if a not in small.names), grid.firsts(small.names)
        size = np.full(len(base), self.element_bytes * inner, dtype=np.int64)
        for r in rest:
            size = size * self._widths(r, base)
        base, size = base[size > 0], size[size > 0]
        src, dst = (np.add.outer(base, place[end]).ravel() for end in (sender, receiver))
        return self.links.exchange_line(src, dst, np.multiply.outer(size, counts).ravel())

    def _widths(self, rest: Rest, ranks: Counts) -> Counts:
        """Elements that these ranks have of a dimension."""
        axes = tuple([(a, n) for a, n in self.grid.axes if a in rest.axes])
        return widths(axes, rest)[self.grid.places(a for a, _ in axes)[ranks]]


@lru_cache(maxsize=1 << 16)
def busiest(sets: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> tuple[int, int]:
    """The most elements that a rank sends in a collective, and sends or receives; of an all-reduce those it holds."""
    held = _even(sets, src)
    if kind == "all_reduce":
        whole = int(sets.elements(src).max()) if held is None else held
        return whole, whole
    if kind in ("all_gather", "reduce_scatter") and held is not None and (there := _even(sets, dst)) is not None:
        several = (sets.grid.over(over) - 1) * min(held, there)
        return several, several
    what = (sets, kind, over, src, dst)
    sent = elements_sent(*what)
    found = int(sent.max()), int(np.maximum(sent, elements_received(*what)).max())
    _let_go(sets)
    return found


def _even(sets: IndexSets, layout: Layout) -> int | None:
    """Elements that each rank has, where all have as many by the block rule; else None."""
    if layout.has_window:
        return None
    count = sets.weight(layout.tensor)
    for dim, axes in zip(sets.dims(layout.tensor), layout.axes, strict=True):
        parts = sets.grid.over(axes)
        if dim.groups > 1 or dim.extent % parts:
            return None
        count *= dim.extent // parts
    return count


@lru_cache(maxsize=1 << 16)
def most_traffic(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[int, int, int]:
    """`exchange_traffic`, remembered."""
    found = exchange_traffic(sets, src, dst, adds=adds)
    _let_go(sets)
    return found


def _let_go(sets: IndexSets) -> None:
    """Of what is on many ranks only the last few are kept: thousands of conversions would fill the memory."""
    if sets.grid.ranks > MANY:
        _last.pop(sets, None)
        _last[sets] = None
        if len(_last) > LAST:
            next(iter(_last)).forget()
            del _last[next(iter(_last))]


_last: dict[IndexSets, None] = {}


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
