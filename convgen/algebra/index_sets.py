"""Index sets, exact for every rank: the box of elements that a rank holds of a value, as arrays over ranks.

A box has an interval per dimension. A value with windows has two boxes: the elements of the tensor that it needs,
and the frame in which they sit, whose other rows are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import enough, span
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.tensors import Dim, Rows, Tensor
from convgen.algebra.windows import fits_one_padding, frame, padding_of
from convgen.free_memory import check_memory

SURE = 1 << 30  # bytes; up to so many are taken without asking whether they are free

Box = NDArray[np.int64]  # [ranks, dimensions, 2]
Spans = tuple[NDArray[np.int64], NDArray[np.int64]]


class IndexSets:
    """What every rank of one grid holds, needs and sends of some tensors. Answers are cached."""

    def __init__(
        self,
        grid: Grid,
        tensors: Mapping[str, Tensor],
        rows: Mapping[tuple[str, int], Rows],
        *,
        virtual_padding: bool = False,
    ) -> None:
        """
        Args:
            tensors: by name.
            rows: by tensor and dimension, the rows that a reader's blocks need.
            virtual_padding: local convolutions take any zero padding by themselves: no rank holds rows of zeros, and
                rows that are not split need no window. Otherwise they pad both sides alike, as ATen's do.
        """
        self.grid, self.tensors, self.rows, self.virtual_padding = grid, tensors, rows, virtual_padding
        self._spans: dict[tuple[Dim, Axes], Spans] = {}
        self._blocks: dict[tuple[str, int, Axes], Spans] = {}  # the same by the tensor's name, a faster key
        self._owned: dict[Layout, Box] = {}
        self._frames: dict[Layout, Box] = {}
        self._flows: dict[tuple[Layout, Layout], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._windows: dict[tuple[str, int, Axes], Window | None] = {}

    def forget(self) -> None:
        """Empty the caches that have an entry for every rank."""
        for known in (self._spans, self._blocks, self._owned, self._frames, self._flows):
            known.clear()

    def dims(self, tensor: str) -> tuple[Dim, ...]:
        return self.tensors[tensor].dims

    def split(self, dim: Dim, axes: Axes) -> Spans:
        """Interval of a dimension that each rank's block over `axes` covers."""
        if (found := self._spans.get((dim, axes))) is None:
            zero = np.zeros(self.grid.ranks, dtype=np.int64)
            coordinates = tuple(self.grid.coordinates[a] for a in axes)
            sizes = tuple(self.grid.sizes[a] for a in axes)
            found = self._spans[dim, axes] = span(dim.extent, dim.groups, sizes, coordinates, zero)
        return found

    def block(self, tensor: str, dim: int, axes: Axes) -> Spans:
        """Interval of one dimension of a tensor that each rank's block covers."""
        key = (tensor, dim, axes)
        if (found := self._blocks.get(key)) is None:
            found = self._blocks[key] = self.split(self.tensors[tensor].dims[dim], axes)
        return found

    def needed(self, tensor: str, dim: int, axes: Axes) -> Spans:
        """Rows of the tensor that a block over `axes` of its reader's index needs, padding included."""
        rows = self.rows[tensor, dim]
        return rows.relation.window(*self.split(rows.index, axes))

    def frame(self, layout: Layout) -> Box:
        """The box in which each rank's part sits: with rows of padding, unless `virtual_padding`."""
        if self.virtual_padding:
            return self.held(layout)
        return self._frame(layout)

    def _frame(self, layout: Layout) -> Box:
        if layout not in self._frames:
            spans: list[Spans] = []
            for i, axes in enumerate(layout.axes):
                if layout.windows[i] is None:
                    spans.append(self.block(layout.tensor, i, axes))
                else:
                    rows = self.rows[layout.tensor, i]
                    spans.append(frame(rows.relation, *self.split(rows.index, axes)))
            none = np.zeros((self.grid.ranks, 0, 2), dtype=np.int64)  # a scalar
            self._frames[layout] = np.stack([np.stack(s, -1) for s in spans], axis=1) if spans else none
        return self._frames[layout]

    def held(self, layout: Layout) -> Box:
        """Which elements of the tensor each rank holds (or needs): the frame without its zero rows."""
        if layout not in self._owned:
            box = self._frame(layout).copy()
            for i, axes in enumerate(layout.axes):
                if layout.windows[i] is not None:
                    box[:, i, 0], box[:, i, 1] = self._there(layout.tensor, i, self.needed(layout.tensor, i, axes))
            self._owned[layout] = box
        return self._owned[layout]

    def by_place(self, layout: Layout, d: int) -> Spans:
        """The interval of dimension d in `held`, for each place along the axes that split it, the last axis fastest."""
        sizes = tuple([self.grid.sizes[a] for a in layout.axes[d]])
        rows = None if layout.windows[d] is None else self.rows[layout.tensor, d]
        return _by_place(self.dims(layout.tensor)[d], rows, sizes)

    def _coordinates(self, axes: Axes) -> NDArray[np.int64]:
        """The coordinates of each place along these axes: [axes, places]."""
        return _places(tuple([self.grid.sizes[a] for a in axes]))

    def _there(self, tensor: str, dim: int, needed: Spans) -> tuple[Any, Any]:
        """The interval of those rows of a window that the tensor has."""
        return self.rows[tensor, dim].relation.hull(*needed, self.dims(tensor)[dim].extent)

    def elements(self, layout: Layout) -> NDArray[np.int64]:
        """Elements of each rank's frame, kernel taps included."""
        return volume(self.frame(layout)) * self.weight(layout.tensor)

    def weight(self, tensor: str) -> int:
        """Elements per index: the kernel's taps for w, else 1."""
        return self.tensors[tensor].inner

    def window(self, tensor: str, dim: int, axes: Axes) -> Window | None:
        """The window that role axes `axes` want on a spatial dimension; None where the block serves as it is.

        An unsplit dimension needs one only where equal padding on both sides doesn't do.
        """
        key = (tensor, dim, axes)
        if key not in self._windows:
            self._windows[key] = self._find_window(tensor, dim, axes)
        return self._windows[key]

    def _find_window(self, tensor: str, dim: int, axes: Axes) -> Window | None:
        own, index, needed = self._reading(tensor, dim, axes)
        if self._serves(tensor, dim, axes, own, index, needed):
            return None
        return self.widest(tensor, dim, axes)

    def _reading(self, tensor: str, dim: int, axes: Axes) -> tuple[Spans, Spans, Spans]:
        """By place along these axes: the dimension's block, the reader's block, and the rows that the latter needs."""
        rows, sizes = self.rows[tensor, dim], tuple([self.grid.sizes[a] for a in axes])
        own, index = (_by_place(d, None, sizes) for d in (self.dims(tensor)[dim], rows.index))
        return own, index, rows.relation.window(*index)

    def widest(self, tensor: str, dim: int, axes: Axes) -> Window:
        """How many rows below and above a rank's own block its reader's block needs, the most over all ranks."""
        (own_lo, own_hi), _, (lo, hi) = self._reading(tensor, dim, axes)
        some = hi > lo
        if not some.any():
            return Window(0, 0)
        return Window(int((own_lo - lo)[some].max()), int((hi - own_hi)[some].max()))

    def _serves(self, tensor: str, dim: int, axes: Axes, own: Spans, index: Spans, needed: Spans) -> bool:
        """Whether every rank's block, as it is, holds the rows that its reader needs and takes no rows of padding.

        A whole dimension may be padded, as long as both sides are alike.
        """
        rows = self.rows[tensor, dim]
        if rows.is_open and axes:
            return rows.relation.is_identity and rows.index.extent == self.dims(tensor)[dim].extent
        lo, hi = self._there(tensor, dim, needed)
        inside = (hi <= lo) | ((own[0] <= lo) & (hi <= own[1]))
        if not np.all(inside):
            return False
        padding = padding_of(self.rows[tensor, dim].relation, own, index)
        if self.virtual_padding or padding is None:
            return True
        taps, below, above = padding
        fits = fits_one_padding(taps, below, above)
        if not axes:
            return bool(np.all(fits))
        some = (own[1] > own[0]) & (index[1] > index[0])
        return bool(np.all(~some | ((below == 0) & fits)))

    def _is_open(self, tensor: str, dim: int) -> bool:
        rows = self.rows.get((tensor, dim))
        return rows is not None and rows.is_open

    def moves(self, src: Layout, dst: Layout) -> NDArray[np.int64]:
        """Elements that rank i has to send rank j for a conversion: needed minus owned, [ranks, ranks]."""
        members, flows = self.flows(src, dst)
        dense = np.zeros((self.grid.ranks, self.grid.ranks), dtype=np.int64)
        dense[members[:, :, None], members[:, None, :]] = flows
        return dense

    def flows(self, src: Layout, dst: Layout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`moves` by groups: ranks that may exchange, [groups, members], and elements that member i sends member j.

        Each element has one fixed owner: of the ranks that hold copies of it, the one that has the
        receiver's own coordinates on the axes of the copies.
        """
        key = (src, dst)
        if key not in self._flows:
            members, elements = self._overlaps(src, dst, any_batch=False)
            elements *= self.weight(src.tensor)
            self._flows[key] = members, elements
        return self._flows[key]

    def _overlaps(self, src: Layout, dst: Layout, any_batch: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Groups of ranks whose blocks differ where the layouts differ, and indices that member i owns and j needs.

        With `any_batch` the dimension N counts as 1 where it can overlap for some number of samples.
        """
        dims = range(len(src.axes))
        changed = [d for d in dims if (src.axes[d], src.windows[d]) != (dst.axes[d], dst.windows[d])]
        # Only axes that split blocks of `src` count: of a window in `src` each rank has its rows.
        moving = {a for d in changed if src.windows[d] is None for a in src.axes[d]}
        members = self.grid.groups(moving)
        own, need = self.held(src), self.held(dst)
        common = own[members[:, 0]]
        elements = np.ones((*members.shape, members.shape[1]), dtype=np.int64)
        for d in dims:
            if d not in changed:
                elements *= np.maximum(common[:, d, 1] - common[:, d, 0], 0)[:, None, None]
            elif d == 0 and any_batch:
                outer = self.grid.group_ids(a for a in self.grid.names if a not in _shared_axes(self.grid, src, dst))
                elements *= outer[members][:, :, None] == outer[members][:, None, :]
            else:
                lo = np.maximum(own[members, d, 0][:, :, None], need[members, d, 0][:, None, :])
                hi = np.minimum(own[members, d, 1][:, :, None], need[members, d, 1][:, None, :])
                elements *= np.maximum(hi - lo, 0)
        diagonal = list(range(members.shape[1]))
        elements[:, diagonal, diagonal] = 0
        return members, elements

    def moved_axes(self, src: Layout, dst: Layout) -> Axes:
        """The fewest axes that cover every move from `src` to `dst`; none when each rank has all it needs.

        The axes hold for any number of samples, which may differ at run time: a block that is empty only because
        there are few samples still counts.
        """
        old, new = (tuple(a for a in t.axes[0] if self.grid.sizes[a] > 1) for t in (src, dst))
        any_batch = self.dims(src.tensor)[0].name == "N" and old != new
        dims = [d for d in range(len(src.axes)) if (src.axes[d], src.windows[d]) != (dst.axes[d], dst.windows[d])]
        moving = frozenset(a for d in dims if src.windows[d] is None for a in src.axes[d])
        return self.reached(src, dst, moving, dims, any_batch=any_batch)

    def reached(
        self, src: Layout, dst: Layout, moving: frozenset[str], dims: Sequence[int], *, any_batch: bool = False
    ) -> Axes:
        """Axes along which a rank has elements of `src` that another has of `dst`.

        An axis splits at most one dimension of each layout, so two ranks meet where their blocks do in each dimension.

        Args:
            moving: axes along which the two ranks may differ.
            dims: the dimensions that count.
            any_batch: blocks of the first dimension meet where they do so at some extent.
        """
        grid = self.grid
        from_, to = ({a: set(range(grid.sizes[a])) for a in moving} for _ in range(2))
        apart = {a for a in moving if grid.sizes[a] > 1}  # less those, below, on which blocks meet only alike
        for d in dims:
            own, need = self.by_place(src, d), self.by_place(dst, d)
            one, other = (dict(zip(t.axes[d], self._coordinates(t.axes[d]), strict=True)) for t in (src, dst))
            both = one.keys() & other.keys()
            equal = both - moving
            if d == 0 and any_batch:
                if src.windows[0] is None and dst.windows[0] is None:  # a window has other blocks' rows
                    equal |= _shared_axes(grid, src, dst)
                meets = np.logical_and.outer(self._ever(src), self._ever(dst))
            elif self._is_open(src.tensor, d) and src.windows[d] != dst.windows[d]:
                meets = np.ones((len(own[0]), len(need[0])), dtype=bool)
            else:  # of thousands of places perhaps only a few have rows
                some, others = own[1] > own[0], need[1] > need[0]
                one, other = ({a: at[k] for a, at in of.items()} for of, k in ((one, some), (other, others)))
                meets = np.minimum.outer(own[1][some], need[1][others]) > np.maximum.outer(
                    own[0][some], need[0][others]
                )
            for a in equal:
                meets &= np.equal.outer(one[a], other[a])
            senders, receivers = meets.any(axis=1), meets.any(axis=0)
            if not senders.any():
                return ()
            for a in moving & one.keys():
                from_[a] = {*one[a][senders].tolist()}
            for a in moving & other.keys():
                to[a] = {*other[a][receivers].tolist()}
            for a in both:
                if a in equal or not np.any(meets & np.not_equal.outer(one[a], other[a])):
                    apart.discard(a)
        return grid.ordered(a for a in apart if len(from_[a] | to[a]) > 1)

    def _ever(self, layout: Layout) -> NDArray[np.bool_]:
        """By place along the axes of the first dimension, whether it has rows at some extent: a place with a share of 0
        has none, unless a window gives it other ranks' rows."""
        sizes = tuple([self.grid.sizes[a] for a in layout.axes[0]])
        lo, hi = _by_place(Dim("N", min(prod(map(enough, sizes)), 2**31 - 1)), None, sizes)
        return (hi > lo) | (layout.windows[0] is not None)

    def empty_ranks(self, layout: Layout) -> int:
        """How many ranks hold no element of a value."""
        return int((volume(self.held(layout)) == 0).sum())


@lru_cache(maxsize=1 << 12)
def _places(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    return np.indices(sizes).reshape(len(sizes), prod(sizes))


@lru_cache(maxsize=1 << 14)
def _by_place(dim: Dim, rows: Rows | None, sizes: tuple[int, ...]) -> Spans:
    of, places = dim if rows is None else rows.index, _places(sizes)
    block = span(of.extent, of.groups, sizes, tuple(places), np.zeros(prod(sizes), dtype=np.int64))
    return block if rows is None else rows.relation.hull(*rows.relation.window(*block), dim.extent)


def overlaps(held: Box, need: Box) -> NDArray[np.int64]:
    """How many indices rank i holds and rank j needs: [ranks, ranks]."""
    if (needed := 3 * held.itemsize * len(held) * len(need) * held.shape[1]) > SURE:
        check_memory(needed, f"what {len(held)} ranks hold of what {len(need)} need", "a smaller grid")
    lo = np.maximum(held[:, None, :, 0], need[None, :, :, 0])
    hi = np.minimum(held[:, None, :, 1], need[None, :, :, 1])
    return np.maximum(hi - lo, 0).prod(axis=-1)


def volume(box: Box) -> NDArray[np.int64]:
    """How many indices each rank's box has: [ranks]."""
    return np.maximum(box[:, :, 1] - box[:, :, 0], 0).prod(axis=1)


def _shared_axes(grid: Grid, src: Layout, dst: Layout) -> set[str]:
    """The outermost axes that split N in both layouts, in the same order."""
    old, new = (tuple(a for a in t.axes[0] if grid.sizes[a] > 1) for t in (src, dst))
    both = takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
    return {a for a, _ in both}
