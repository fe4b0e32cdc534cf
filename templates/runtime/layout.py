"""Which part of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .layer import Layer

Box = tuple[tuple[int, int], ...]  # half-open intervals, one a dimension; kernel dimensions are never split


class SpatialRows(NamedTuple):
    """One spatial dimension: rows of x and y, and how a row of the coarse one reads rows of the fine one.

    Of a convolution x is the fine activation and y the coarse one, of a transposed convolution it is y and x.
    """

    x: int
    y: int
    kernel: int
    stride: int
    padding: int  # below; what is above follows from the coarse rows
    dilation: int


AxisSize = int | Sequence[int]  # an axis's number of ranks, or a share for each rank


def ith_part(lo: int, hi: int, parts: AxisSize, i: int) -> tuple[int, int]:
    """Part i of [lo, hi): the first (hi - lo) % parts parts get one element more.

    Ranks with shares get their shares of the extent rounded down, and those that lose most by it get one element more.
    """
    if not isinstance(parts, int):
        total, shares = sum(parts), [(hi - lo) * w for w in parts]
        sizes, lost = [s // total for s in shares], [s % total for s in shares]
        for k in sorted(range(len(parts)), key=lambda k: -lost[k])[: sum(lost) // total]:
            sizes[k] += 1
        return (start := lo + sum(sizes[:i])), start + sizes[i]
    size, extra = divmod(hi - lo, parts)
    start = lo + i * size + min(i, extra)
    return start, start + size + (i < extra)


def ranks_of(sizes: dict[str, AxisSize]) -> dict[str, int]:
    """The number of ranks along each axis."""
    return {axis: n if isinstance(n, int) else len(n) for axis, n in sizes.items()}


def largest(extent: int, parts: AxisSize) -> int:
    """Elements of the largest part."""
    if isinstance(parts, int):
        return -(-extent // parts)
    lo, hi = ith_part(0, extent, parts, [*parts].index(max(parts)))
    return hi - lo


def interval(
    extent: int, groups: int, axes: tuple[str, ...], sizes: dict[str, AxisSize], at: dict[str, int]
) -> tuple[int, int]:
    """Elements of a dimension that the rank at these coordinates holds: each axis splits the block of the one
    before it, by whole groups as long as some rank has more than one, then inside the group."""
    group, inside, most = (0, groups), (0, extent // groups), groups
    for axis in axes:
        if most > 1:
            group, most = ith_part(*group, sizes[axis], at[axis]), largest(most, sizes[axis])
        else:
            inside = ith_part(*inside, sizes[axis], at[axis])
    count, unit = group[1] - group[0], extent // groups
    lo = group[0] * unit + inside[0]
    return lo, lo + max(count - 1, 0) * unit + (inside[1] - inside[0]) * (count > 0)


def input_rows(s: SpatialRows, lo: int, hi: int) -> tuple[int, int]:
    """Fine rows that coarse rows [lo, hi) read. Rows outside the tensor are zero padding."""
    start = lo * s.stride - s.padding
    return start, (hi - 1) * s.stride - s.padding + s.dilation * (s.kernel - 1) + 1 if hi > lo else start


def output_rows(s: SpatialRows, lo: int, hi: int) -> tuple[int, int]:
    """Coarse rows that read some of fine rows [lo, hi); possibly none."""
    start = -((s.dilation * (s.kernel - 1) - lo - s.padding) // s.stride)
    return start, (hi - 1 + s.padding) // s.stride + 1 if hi > lo else start


def padding_below(s: SpatialRows, fine_lo: int, coarse_lo: int) -> int:
    """Zero rows below fine_lo when the first coarse row is coarse_lo."""
    return fine_lo - (coarse_lo * s.stride - s.padding)


def output_frame(s: SpatialRows, lo: int, hi: int) -> tuple[int, int]:
    """output_rows and the fewest zero rows around them that let the convolution pad both its sides alike."""
    start, end = output_rows(s, lo, hi)
    if hi <= lo:
        return start, start
    below = padding_below(s, lo, start)
    above = (end - 1) * s.stride - s.padding + s.dilation * (s.kernel - 1) + 1 - hi
    more = max(0, -((below - max(above, 0)) // s.stride))
    return start - more, end + max(0, (below + more * s.stride - above) // s.stride)


CHANNEL_DIM = {"x": 1, "w": 0, "y": 1, "bias": 0}  # where a dimension is made of groups


class Layout(NamedTuple):
    """How a tensor is split: the grid axes on each dimension, outermost first; a rank holds a block."""

    tensor: str
    axes: tuple[tuple[str, ...], ...]
    rows: tuple[bool, ...] = ()  # for a Window, which dimensions are windows

    def frame(self, layer: Layer, at: dict[str, int], batch: int) -> Box:
        """Where the piece of the rank at these coordinates sits."""
        channels = CHANNEL_DIM[self.tensor]
        return tuple(
            interval(extent, layer.groups if d == channels else 1, axes, layer.sizes, at)
            for d, (extent, axes) in enumerate(zip(layer.extents(self.tensor, batch), self.axes, strict=True))
        )

    def held(self, layer: Layer, at: dict[str, int], batch: int) -> Box:
        """The elements of the tensor in that piece."""
        return self.frame(layer, at, batch)


class Window(Layout):
    """A layout that has, along dimensions with `rows` set, the rows that a block of the other activation reads instead
    of a block of its own; rows of zero padding are no part of it."""

    __slots__ = ()

    def frame(self, layer: Layer, at: dict[str, int], batch: int) -> Box:
        return self.held(layer, at, batch)

    def held(self, layer: Layer, at: dict[str, int], batch: int) -> Box:
        box = list(super().frame(layer, at, batch))
        for d, extent in enumerate(layer.extents(self.tensor, batch)):
            if self.rows[d]:
                s, other = layer.spatial[d - 2], layer.extents(layer.other(self.tensor), batch)[d]
                read = input_rows if self.tensor == layer.fine else output_rows
                lo, hi = read(s, *interval(other, 1, self.axes[d], layer.sizes, at))
                box[d] = min(max(lo, 0), extent), min(max(hi, 0), extent)
        return tuple(box)


class PaddedWindow(Window):
    """A Window whose frame includes the rows of zero padding."""

    __slots__ = ()

    def frame(self, layer: Layer, at: dict[str, int], batch: int) -> Box:
        box = list(Layout.frame(self, layer, at, batch))
        for d, padded in enumerate(self.rows):
            if padded:
                s, other = layer.spatial[d - 2], layer.extents(layer.other(self.tensor), batch)[d]
                read = input_rows if self.tensor == layer.fine else output_frame
                box[d] = read(s, *interval(other, 1, self.axes[d], layer.sizes, at))
        return tuple(box)


def common(a: Box, b: Box) -> Box:
    """The elements in both boxes."""
    pairs = zip(a, b, strict=True)
    return tuple((lo := max(p[0], q[0]), max(min(p[1], q[1]), lo)) for p, q in pairs)
