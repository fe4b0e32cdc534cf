"""What a conversion moves, exactly and for every rank, from index sets (docs/design.md, Two views of a step).

| collective | a rank sends |
|---|---|
| slice | nothing |
| all_gather | its own block to each of the g-1 others |
| reduce_scatter | its input less its own part |
| all_reduce | both of these, on pieces cut from the whole by the block rule over its element count |
| all_to_all | its block less what it keeps |
| exchange | what it owns and others need |

Elements, not bytes; arrays have an entry a rank, in mesh order. What is sent in all is received in all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import block
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, volume
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Kind

Counts = NDArray[np.int64]


def elements_sent(space: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> Counts:
    """Elements that leave each rank in a conversion from `src` to `dst` over the axes `over`."""
    match kind:
        case "slice":
            return np.zeros(space.grid.ranks, dtype=np.int64)
        case "all_gather":
            return (space.grid.over(over) - 1) * _held(space, src)
        case "reduce_scatter":
            return _held(space, src) - _held(space, dst)
        case "all_reduce":
            return all_reduced(space.grid, over, _held(space, src))
        case "all_to_all":
            return _held(space, src) - _kept(space, src, dst)
        case "exchange":
            return _by_rank(space, src, dst, axis=2)


def elements_received(space: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> Counts:
    """Elements that reach each rank."""
    match kind:
        case "slice":
            return np.zeros(space.grid.ranks, dtype=np.int64)
        case "all_gather":
            return _held(space, dst) - _held(space, src)
        case "reduce_scatter":
            return (space.grid.over(over) - 1) * _held(space, dst)
        case "all_reduce":
            return all_reduced(space.grid, over, _held(space, src))
        case "all_to_all":
            return _held(space, dst) - _kept(space, src, dst)
        case "exchange":
            return _by_rank(space, src, dst, axis=1)


def elements_summed(space: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> Counts:
    """Elements of the sum that each rank adds up from one addend a rank, in a reduce-scatter or such an all-reduce.

    Where two ranks all-reduce, each sends the other everything, and both add all of it.
    """
    if kind == "reduce_scatter":
        return _held(space, dst)
    counts, ranks = _held(space, src), space.grid.over(over)
    return counts if ranks == 2 else _own_pieces(space.grid, over, counts)


def _by_rank(space: IndexSets, src: Layout, dst: Layout, axis: int) -> Counts:
    """What each rank sends (axis 2) or receives (axis 1) in an exchange."""
    members, flows = space.flows(src, dst)
    counts = np.zeros(space.grid.ranks, dtype=np.int64)
    counts[members] = flows.sum(axis=axis)
    return counts


def blocks_volume(space: IndexSets, layout: Layout) -> Counts:
    """Elements of each rank's block of a layout without windows, kernel taps included."""
    count = np.full(space.grid.ranks, space.weight(layout.tensor), dtype=np.int64)
    for i, axes in enumerate(layout.axes):
        lo, hi = space.block(layout.tensor, i, axes)
        count *= hi - lo
    return count


def _held(space: IndexSets, layout: Layout) -> Counts:
    if layout.has_window:
        return volume(space.held(layout)) * space.weight(layout.tensor)
    return blocks_volume(space, layout)


def _kept(space: IndexSets, src: Layout, dst: Layout) -> Counts:
    """What a rank has before and after an all-to-all: where its two blocks overlap."""
    count = np.full(space.grid.ranks, space.weight(src.tensor), dtype=np.int64)
    for i, (before, after) in enumerate(zip(src.axes, dst.axes, strict=True)):
        lo, hi = _rows(space, src, i)
        if before != after:
            other_lo, other_hi = _rows(space, dst, i)
            lo, hi = np.maximum(lo, other_lo), np.minimum(hi, other_hi)
        count *= np.maximum(hi - lo, 0)
    return count


def _rows(space: IndexSets, layout: Layout, dim: int) -> tuple[Counts, Counts]:
    """The interval of one dimension that each rank holds."""
    if layout.windows[dim] is None:
        return space.block(layout.tensor, dim, layout.axes[dim])
    box = space.held(layout)
    return box[:, dim, 0], box[:, dim, 1]


def all_reduced(grid: Grid, over: Axes, counts: Counts) -> Counts:
    """What each rank sends in an all-reduce of so many elements: a reduce-scatter and an all-gather of pieces by the
    block rule. It receives as much."""
    return counts + (grid.over(over) - 2) * _own_pieces(grid, over, counts)


def _own_pieces(grid: Grid, over: Axes, counts: Counts) -> Counts:
    lo, hi = block(np.zeros_like(counts), counts, grid.over(over), grid.places(grid.ordered(over)))
    return hi - lo
