"""What a conversion's name says, in layers and networks alike: how the type changes, over which ranks, and what each
of these ranks has and takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, overlaps, volume
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, Kind
from convgen.algebra.relations import Relation

Counts = NDArray[np.int64]  # [ranks] or [ranks, ranks]


def same_group(grid: Grid, axes: Axes) -> NDArray[np.bool_]:
    """Whether ranks i and j differ only along `axes`."""
    ids = grid.group_ids(axes)
    return ids[:, None] == ids[None, :]


def unread_rows(
    relation: Relation,
    block: tuple[Counts, Counts],
    held: Counts,
    extent: int,
    of: str,
    busy: NDArray[np.bool_] | bool = True,
) -> Iterator[str]:
    """The first rank that lacks rows that its block reads through a relation."""
    lo, hi = relation.hull(*relation.window(*block), extent)
    for rank in np.flatnonzero(busy & (hi > lo) & ((lo < held[:, 0]) | (hi > held[:, 1])))[:1]:
        yield f"rank {rank} needs rows [{lo[rank]}, {hi[rank]}) {of}, it has [{held[rank, 0]}, {held[rank, 1]})"


class Travel:
    """A conversion, rank by rank.

    Attributes:
        both: [i, j], how many of the elements that rank j has afterwards rank i has before.
    """

    def __init__(self, c: Conversion, sets: IndexSets) -> None:
        self.c, self.grid = c, sets.grid
        held, need = sets.held(c.src), sets.held(c.dst)
        weight = sets.weight(c.src.tensor)
        self.before, self.need, self.both = volume(held) * weight, volume(need) * weight, overlaps(held, need) * weight

    @cached_property
    def owned(self) -> Counts:
        """What rank j has from its one owner i, itself included: an owner differs from it in block axes only. Every
        rank that sums addends has its own: the block is what has to arrive, from any of them alike."""
        src = self.c.src
        axes = (a for axes, window in zip(src.axes, src.windows, strict=True) if window is None for a in axes)
        return self.both * same_group(self.grid, tuple(axes))

    @cached_property
    def ranks(self) -> Axes:
        """The axes along which its ranks differ."""
        if self.c.kind != "exchange":
            return collective_over(self.c.kind, self.c.src, self.c.dst, self.grid)
        i, j = np.nonzero(self.owned - np.diag(np.diag(self.owned)))
        at = self.grid.coordinates
        return tuple(a for a in self.grid.names if (at[a][i] != at[a][j]).any())

    def unserved(self) -> Iterator[str]:
        """The first rank whose need is not what it owned and what its group has sent it."""
        over = () if self.c.kind in ("slice", "reduce_scatter") else self.c.over
        supply = self.owned * same_group(self.grid, over)
        owned, had = np.diag(supply), supply.sum(axis=0)
        for r in np.flatnonzero(had != self.need)[:1]:
            yield f"rank {r} needs {self.need[r]} elements, owns {owned[r]} of them and receives {had[r] - owned[r]}"

    def unsent(self) -> Iterator[str]:
        """What a collective sends by its definition and its group does not take: all_gather and all_reduce send every
        block to everybody, all_to_all and reduce_scatter each element to one rank; an exchange sends what is needed.
        """
        taken, size = self.both * same_group(self.grid, self.c.over), self.before
        if self.c.kind in ("all_gather", "all_reduce"):
            for i, j in np.argwhere(same_group(self.grid, self.c.over) & (taken != size[:, None]))[:1]:
                yield f"rank {i} has {size[i]} elements for rank {j}, which takes {taken[i, j]}"
        elif self.c.kind in ("all_to_all", "reduce_scatter"):
            for i in np.flatnonzero(taken.sum(axis=1) != size)[:1]:
                yield f"rank {i} has {size[i]} elements to send or keep, of which the group takes {taken[i].sum()}"


def untyped(t: Travel) -> str:
    """What is wrong with a conversion of this kind between these types; "" if nothing is."""
    src, dst = t.c.src, t.c.dst
    if t.c.reduction is not None:
        return _unreduced(t.c.kind, src, dst)
    match t.c.kind:
        case "slice":
            if src.partial != dst.partial:
                return "addends stay addends"
            short = t.need - np.diag(t.both)
            return f"rank {short.argmax()} misses {short.max()} elements" if (short > 0).any() else ""
        case "all_gather":
            if src.windows != dst.windows:
                return "windows stay"
            if src.partial != dst.partial:
                return "addends stay addends"
            shorter = all(a[: len(b)] == b for a, b in zip(src.axes, dst.axes, strict=True))
            return "" if shorter and src.axes != dst.axes else "dimensions lose inner axes"
        case "reduce_scatter":
            added = _longer(src.axes, dst.axes)
            fits = src.windows == dst.windows and set(dst.partial) | added == set(src.partial) != set(dst.partial)
            return "" if fits else "axes of the sum become inner axes"
        case "all_reduce":
            fits = (src.axes, src.windows) == (dst.axes, dst.windows) and set(dst.partial) < set(src.partial)
            return "" if fits else "only the sum is made"
        case "all_to_all":
            if src.partial != dst.partial:
                return "addends stay addends"
            ends = ((set(a[n:]), set(b[n:])) for a, b, n in _common(src.axes, dst.axes))
            fits = src.windows == dst.windows and src.used == dst.used and not any(old & new for old, new in ends)
            return "" if fits and src.axes != dst.axes else "inner axes change their dimension"
        case "exchange":
            return "sums can't be exchanged" if src.partial or dst.partial else ""


def _unreduced(kind: Kind, src: Layout, dst: Layout) -> str:
    """What is wrong with a conversion that reduces, though its kind does not by nature."""
    match kind:
        case "all_gather":
            fits = (src.axes, src.windows) == (dst.axes, dst.windows) and set(dst.partial) < set(src.partial)
            return "" if fits else "only the reduction is made"
        case "exchange":
            if dst.has_window or dst.partial:
                return "its result is whole blocks"
            return "" if src.has_window else "no parts overlap"
        case _:
            return "it has no reduction of its own"


def collective_over(kind: Kind, src: Layout, dst: Layout, grid: Grid) -> Axes:
    """The axes along which the ranks of a slice, or of a collective that is no exchange, differ."""
    if kind == "slice":
        return ()
    if added := set(src.partial) - set(dst.partial):
        return grid.ordered(added)
    if kind == "all_gather":
        return grid.ordered(src.used - dst.used)
    return grid.ordered(a for old, new in zip(src.axes, dst.axes, strict=True) for a in new if a not in old)


def _common(old: tuple[Axes, ...], new: tuple[Axes, ...]) -> Iterator[tuple[Axes, Axes, int]]:
    """The axes of each dimension before and after, and how many outer axes stay the same."""
    for a, b in zip(old, new, strict=True):
        yield a, b, next((n for n, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))


def _longer(short: tuple[Axes, ...], long: tuple[Axes, ...]) -> set[str]:
    """Axes that `long` adds inside those of `short`; of a dimension where it does not continue them, all axes."""
    added: set[str] = set()
    for a, b in zip(short, long, strict=True):
        added |= set(b[len(a) :] if b[: len(a)] == a else a + b)
    return added
