"""A conversion on the axes that it involves.

A conversion involves an axis that splits a dimension which the conversion changes, or that holds addends which it adds.
The involved axes make a small grid. For every block of the dimensions that are left alone, the ranks of the whole grid
do what those of the small grid do. So a few ranks are counted instead of thousands, and the busiest rank of all is the
busiest of the few, with the largest block of the other dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import most_of
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, overlaps
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.tensors import Dim, Rows, Tensor

NAME = "t"
PLAIN = tuple(ascii_lowercase)


@dataclass(frozen=True)
class Side:
    """One dimension of a tensor, and the rows that are read of it."""

    dim: Dim
    rows: Rows | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, self.rows))

    def __hash__(self) -> int:  # sides are keys of every cache
        return self._hash


class Rest(NamedTuple):
    """A dimension that a conversion leaves alone, and its layout."""

    side: Side
    axes: Axes
    window: Window | None

    @property
    def layout(self) -> Layout:
        return Layout(NAME, (self.axes,), (self.window,))


class Involved(NamedTuple):
    """A conversion's part of the grid and of the tensor.

    Attributes:
        sets: the dimensions that it changes, on the axes that it involves.
        changed: the numbers of these dimensions in the tensor.
        inner: elements per index of the tensor (a kernel's taps for w, else 1).
    """

    sets: IndexSets
    src: Layout
    dst: Layout
    rest: tuple[Rest, ...]
    changed: tuple[int, ...]
    inner: int


@lru_cache(maxsize=1 << 16)
def one_tensor(
    axes: tuple[tuple[str, int], ...], sides: tuple[Side, ...], *, virtual_padding: bool = True
) -> IndexSets:
    """A tensor alone on a grid of these axes, named `NAME`."""
    rows = {(NAME, d): side.rows for d, side in enumerate(sides) if side.rows is not None}
    tensor = Tensor(NAME, tuple([side.dim for side in sides]))
    return IndexSets(_grid(axes), {NAME: tensor}, rows, virtual_padding=virtual_padding)


@lru_cache(maxsize=1 << 12)
def _grid(axes: tuple[tuple[str, int], ...]) -> Grid:
    """One grid for all tensors, so that its ranks' coordinates are computed once."""
    return Grid(axes)


@lru_cache(maxsize=1 << 14)
def sides_of(sets: IndexSets, tensor: str) -> tuple[Side, ...]:
    return tuple([Side(dim, sets.rows.get((tensor, d))) for d, dim in enumerate(sets.dims(tensor))])


def involved(sets: IndexSets, src: Layout, dst: Layout) -> Involved:
    """The part of the grid and of the tensor in which two layouts differ."""
    sides, grid = sides_of(sets, src.tensor), sets.grid
    changed, left, axes, first, second = _differing(src, dst)
    small = one_tensor(
        tuple([(a, n) for a, n in grid.axes if a in axes]),
        tuple([sides[d] for d in changed]),
        virtual_padding=sets.virtual_padding,
    )
    rest = tuple([Rest(sides[d], src.axes[d], src.windows[d]) for d in left])
    return Involved(small, first, second, rest, changed, sets.weight(src.tensor))


@lru_cache(maxsize=1 << 15)
def _differing(src: Layout, dst: Layout) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[str], Layout, Layout]:
    """(dimensions that change, other dimensions, axes involved, `src` and `dst` of the changing dimensions alone)."""
    dims = range(len(src.axes))
    changed = tuple([d for d in dims if src.axes[d] != dst.axes[d] or src.windows[d] != dst.windows[d]])
    added = tuple([a for a in src.partial if a not in dst.partial])
    axes = {*added}
    for d in changed:
        axes.update(src.axes[d], dst.axes[d])
    first, second = (
        Layout(NAME, tuple([t.axes[d] for d in changed]), tuple([t.windows[d] for d in changed]), partial)
        for t, partial in ((src, added), (dst, ()))
    )
    return changed, tuple([d for d in dims if d not in changed]), frozenset(axes), first, second


def converted(sets: IndexSets, src: Layout, dst: Layout) -> tuple[Conversion, ...]:
    """The conversions of `redistribute`, found on the axes that they involve."""
    part = involved(sets, src, dst)
    found: list[Conversion] = []
    here = src
    for step in small_chain(part.sets, part.src, part.dst):
        to = _whole(here, step.dst, part.changed, sets.grid, dst.partial)
        found.append(replace(step, src=here, dst=to))
        here = to
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def small_chain(sets: IndexSets, src: Layout, dst: Layout) -> tuple[Conversion, ...]:
    if (plain := plainly(sets, src, dst)) is None:
        return redistribute(sets, src, dst)
    names = sets.grid.names
    return tuple(
        [
            replace(c, over=_renamed(c.over, names), src=_with_names(c.src, names), dst=_with_names(c.dst, names))
            for c in small_chain(*plain)
        ]
    )


def plainly(sets: IndexSets, src: Layout, dst: Layout) -> tuple[IndexSets, Layout, Layout] | None:
    """The same conversion on axes that are named a, b, ... by their places, so that caches know it whatever the grid's
    axes are named; None where they are named so."""
    grid = sets.grid
    if grid.names == PLAIN[: len(grid.names)]:
        return None
    small = one_tensor(
        tuple(zip(PLAIN, grid.sizes.values(), strict=False)),
        sides_of(sets, NAME),
        virtual_padding=sets.virtual_padding,
    )
    return small, _with_names(src, grid.names, back=False), _with_names(dst, grid.names, back=False)


def plain_axes(axes: Axes, grid: Grid) -> Axes:
    """Axes of a grid, named a, b, ... by their places."""
    return tuple([PLAIN[grid.names.index(a)] for a in axes])


def _renamed(axes: Axes, names: Axes) -> Axes:
    return tuple([names[PLAIN.index(a)] for a in axes])


@lru_cache(maxsize=1 << 15)
def _with_names(layout: Layout, names: Axes, *, back: bool = True) -> Layout:
    """A layout whose axes, named by their places, get these names; without `back`, the reverse."""
    to = dict(zip(PLAIN, names, strict=False)) if back else dict(zip(names, PLAIN, strict=False))
    axes = tuple([tuple([to[a] for a in some]) for some in layout.axes])
    return Layout(layout.tensor, axes, layout.windows, tuple([to[a] for a in layout.partial]))


def _whole(like: Layout, small: Layout, changed: Sequence[int], grid: Grid, partial: Axes) -> Layout:
    axes, windows = list(like.axes), list(like.windows)
    for d, own, window in zip(changed, small.axes, small.windows, strict=True):
        axes[d], windows[d] = own, window
    return Layout(like.tensor, tuple(axes), tuple(windows), grid.ordered({*small.partial, *partial}))


def collected(sets: IndexSets, found: Layout, stored: Layout) -> tuple[Conversion, ...]:
    """Conversions of a gradient, as a row found it, to its operand's stored layout; parts that overlap are added."""
    if not found.has_window:
        return converted(sets, found, stored)
    part = involved(sets, found, stored)
    over = {*collected_over(part.sets, part.src, part.dst), *found.partial}
    return (Conversion("exchange", sets.grid.ordered(over), found, stored, "sum"),)


@lru_cache(maxsize=1 << 16)
def collected_over(sets: IndexSets, found: Layout, stored: Layout) -> Axes:
    """Axes along which parts of a gradient move."""
    if (plain := plainly(sets, found, stored)) is not None:
        return _renamed(collected_over(*plain), sets.grid.names)
    return sets.reached(found, stored, frozenset({*found.used, *found.partial}), range(len(found.axes)))


def overlapping(sets: IndexSets, found: Layout, stored: Layout) -> NDArray[np.int64]:
    """How many indices of rank j's stored block rank i has an addend for: [ranks, ranks]."""
    grid = sets.grid
    apart = grid.group_ids(grid.ordered({*found.used, *found.partial}))
    return overlaps(sets.held(found), sets.held(stored)) * (apart[:, None] == apart[None, :])


@lru_cache(maxsize=1 << 16)
def widths(axes: tuple[tuple[str, int], ...], rest: Rest) -> NDArray[np.int64]:
    """Elements of a dimension that each rank of a grid has."""
    sets = one_tensor(axes, (rest.side,))
    box = sets.held(rest.layout)
    return np.maximum(box[:, 0, 1] - box[:, 0, 0], 0)


@lru_cache(maxsize=1 << 16)
def largest(axes: tuple[tuple[str, int], ...], rest: Rest) -> int:
    """The most elements of a dimension that a rank of a grid has."""
    if rest.window is None and rest.side.dim.groups == 1:
        unit = rest.side.dim.extent
        sizes = dict(axes)
        return most_of(unit, [sizes[a] for a in rest.axes])
    return int(widths(tuple([(a, n) for a, n in axes if a in rest.axes]), rest).max())


def most_elements(sets: IndexSets, layout: Layout) -> int:
    """Elements that the fullest rank has of a tensor, kernel taps included."""
    pieces = zip(sides_of(sets, layout.tensor), layout.axes, layout.windows, strict=True)
    blocks = [largest(sets.grid.axes, Rest(side, axes, window)) for side, axes, window in pieces]
    return prod(blocks) * sets.weight(layout.tensor)
