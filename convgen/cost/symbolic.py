"""Costs as formulas: sympy expressions in N, C, F, H, Ho, ... and the sizes of the grid's axes.

Every expression is derived from a step's types, none is written for an algorithm. It holds for an interior
rank (one whose halos no edge of the tensor cuts) where extents divide: each dimension by its axes, and, where
a spatial dimension is split, H = S Ho (Ho = S H where it is transposed). An exchange that reorders axes has no
such form, as its ranks differ, and gets none; the index sets of traffic.py are exact for every rank and every
extent.

| symbol | is |
|---|---|
| N C F G | samples, channels, filters, groups |
| D H W, Do Ho Wo | input and output rows |
| \\|axis\\| | ranks of an axis of the grid |
| K | kernel rows, where they are kept as a symbol; padding, stride and dilation are numbers |
| alpha beta gamma | s per message, s per byte sent, s per byte added, over links of one kind |
| peak memory launch | flop/s that convolutions reach, bytes/s, s per local operation |

Explaining uses this; compiling does not, and does not import sympy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.layout import Layout
from convgen.algebra.relations import ReadBy, Taps
from convgen.algebra.windows import output_frame
from convgen.cost.collectives import RINGS, Collectives, seconds
from convgen.program.nodes import Compute, Convert, Schedule, Step

Expr = Any  # sympy.Expr

_SAMPLE = 10**6  # rows of a block, and rows between it and the edge: far from either edge of the tensor


@cache
def sympy() -> Any:
    return import_module("sympy")


@cache
def symbol(name: str) -> Expr:
    """The symbol of that name, as all formulas here use it."""
    return sympy().Symbol(name, positive=True)


def axis_size(axis: str) -> Expr:
    """Ranks of an axis: |axis|."""
    return symbol(f"|{axis}|")


@dataclass(frozen=True, slots=True)
class Formula:
    """What one step costs an interior rank.

    Attributes:
        elements: those sent to others; None where there is no closed form.
        flops: what a local operation computes.
        moved_bytes: bytes that a local operation reads and writes.
        seconds: in alpha, beta, gamma, peak, memory and launch; None where `elements` is None.
    """

    elements: Expr | None
    flops: Expr
    moved_bytes: Expr
    seconds: Expr | None

    def __str__(self) -> str:
        """The elements that a conversion sends, or the flops of a local operation."""
        if self.flops != 0:
            return f"{self.flops} flops"
        return "by index sets" if self.elements is None else str(self.elements)


def formulas(
    schedule: Schedule,
    conv: Conv,
    element_bytes: Expr,
    *,
    kernel: bool = False,
    virtual_padding: bool = False,
    collectives: Collectives = RINGS,
) -> dict[str, Formula]:
    """For every step's result, what the step costs.

    Args:
        element_bytes: bytes of an element, a number or a symbol.
        kernel: keep the kernel as a symbol: K, or K_H and so on where its dimensions differ.
        virtual_padding: as the schedule's space has it.
        collectives: the algorithms, by name (`best` depends on numbers); a logarithm is rounded up.
    """
    types, sizes = schedule.types(), Sizes(conv, kernel=kernel, virtual_padding=virtual_padding)
    return {step.result: formula(step, types, sizes, element_bytes, collectives) for _, step in schedule.steps()}


def formula(
    step: Step,
    types: Mapping[str, Layout],
    sizes: Sizes,
    element_bytes: Expr,
    collectives: Collectives = RINGS,
) -> Formula:
    """What one step costs; `types` has the layout of every value it reads."""
    match step:
        case Compute(operation="add_bias"):
            y = sizes.frame(step.type)
            return _local(y, 2 * y * element_bytes)
        case Compute(operation="sum_bias"):
            y = sizes.frame(types[step.inputs[0]])
            return _local(y, y * element_bytes)
        case Compute():
            operands = (types[step.inputs[0]], types[step.inputs[1]], step.type)
            return _local(sizes.flops(operands), sum(sizes.frame(t) for t in operands) * element_bytes)
        case Convert():
            return _conversion(step, types[step.source], sizes, element_bytes, collectives.of(step.kind))


def _local(flops: Expr, moved_bytes: Expr) -> Formula:
    busy = sympy().Max(flops / symbol("peak"), moved_bytes / symbol("memory"))
    return Formula(sympy().Integer(0), flops, moved_bytes, busy + symbol("launch"))


def _conversion(step: Convert, src: Layout, sizes: Sizes, element_bytes: Expr, algorithm: str) -> Formula:
    zero = sympy().Integer(0)
    elements = sent_by(step.kind, step.over, src, step.type, sizes)
    if elements is None:
        return Formula(None, zero, zero, None)
    peers = sizes.neighbours(src, step.type) if step.kind == "exchange" else sizes.ranks(step.over) - 1
    links = symbol("alpha"), symbol("beta"), symbol("gamma")
    time = seconds(step.kind, peers, elements * element_bytes, *links, algorithm)
    return Formula(elements, zero, zero, time)


def sent_by(kind: str, over: Iterable[str], src: Layout, dst: Layout, sizes: Sizes) -> Expr | None:
    """Elements that an interior rank sends for a conversion; None where there is no closed form."""
    g = sizes.ranks(over)
    match kind:
        case "slice":
            return sympy().Integer(0)
        case "all_gather":
            return (g - 1) * sizes.own(src)
        case "reduce_scatter":
            return (g - 1) / g * sizes.own(src)
        case "all_reduce":
            return 2 * (g - 1) / g * sizes.own(src)
        case "all_to_all":
            return (g - 1) / g * sizes.own(src) if _moves_cleanly(src, dst) else None
        case _:
            return sizes.halo(src, dst) if src.axes == dst.axes else None


def _moves_cleanly(src: Layout, dst: Layout) -> bool:
    """Whether no dimension both loses and gains axes, so that every rank keeps as large a part as any other."""
    return all(
        before[: len(after)] == after or after[: len(before)] == before
        for before, after in zip(src.axes, dst.axes, strict=True)
    )


class Sizes:
    """Extents of layouts of one convolution's tensors, for an interior rank where extents divide."""

    def __init__(self, conv: Conv, *, kernel: bool = False, virtual_padding: bool = False) -> None:
        self.conv, self.kernel, self.virtual_padding = conv, kernel, virtual_padding

    def ranks(self, axes: Iterable[str]) -> Expr:
        return prod((axis_size(a) for a in axes), start=sympy().Integer(1))

    def taps(self) -> Expr:
        """Kernel elements per filter and channel."""
        rows = [s.kernel for s in self.conv.spatial]
        if not self.kernel:
            return sympy().Integer(prod(rows))
        if len(set(rows)) == 1:
            return symbol("K") ** len(rows)
        return prod(symbol(f"K_{s.name}") for s in self.conv.spatial)

    def inner(self, tensor: str) -> Expr:
        """Elements at each position of the tensor's dimensions: taps of w, else 1."""
        return self.taps() if tensor == "w" else sympy().Integer(1)

    def extent(self, tensor: str, dim: int) -> Expr:
        """The extent of the whole dimension."""
        d = self.conv.dims(tensor)[dim]
        if self.conv.has_rows(tensor, dim):
            return symbol(d.name + ("o" if tensor == "y" else ""))
        if (tensor, dim) == ("w", 1) and self.conv.groups > 1:
            return symbol(d.name) / symbol("G")
        return symbol(d.name)

    def block(self, layout: Layout, dim: int) -> Expr:
        return self.extent(layout.tensor, dim) / self.ranks(layout.axes[dim])

    def own(self, layout: Layout, *, frame: bool = False) -> Expr:
        """Elements that the rank holds; with `frame` the zero rows of its window too."""
        rows = (self.rows(layout, i, frame=frame) for i in range(len(layout.axes)))
        return prod(rows, start=sympy().Integer(1)) * self.inner(layout.tensor)

    def frame(self, layout: Layout) -> Expr:
        """Elements of the rank's block with its window, zero rows included unless padding is virtual."""
        return self.own(layout, frame=not self.virtual_padding)

    def rows(self, layout: Layout, dim: int, *, frame: bool = False) -> Expr:
        """Extent of one dimension, window included."""
        below, above = self.window(layout, dim, frame=frame)
        return self.block(layout, dim) + below + above

    def window(self, layout: Layout, dim: int, *, frame: bool = False) -> tuple[Expr, Expr]:
        """Rows wanted below and above an interior block, by the window rule; negative trims."""
        if layout.windows[dim] is None:
            return 0, 0
        s = self.conv.spatial[dim - len(self.conv.dims(layout.tensor)) + len(self.conv.spatial)]
        tensor = self.conv.direct_tensor(layout.tensor)
        if not layout.axes[dim]:
            return self._whole(s, tensor, frame)
        return interior_window(s, tensor, frame=frame)

    def _whole(self, s: Spatial, tensor: str, frame: bool) -> tuple[Expr, Expr]:
        """The window of an unsplit dimension: the rows that are read; in the frame with the padding on both sides.

        `tensor` as for interior_window.
        """
        if tensor == "y":
            lo, hi = output_frame(s.taps, 0, s.extent) if frame else ReadBy(s.taps).window(0, s.extent)
            return (-lo, hi - s.out) if frame else (min(-lo, 0), min(hi - s.out, 0))
        above = (s.out - 1) * s.stride - s.pad_lo + s.reach + 1 - s.extent
        if not frame and above >= 0:
            return 0, 0
        fine, coarse = (symbol(s.name + "o" * (t == "y")) for t in (self.conv.fine, self.conv.coarse))
        rows = (coarse - 1) * s.stride - s.pad_lo + s.reach + 1 - fine
        return (s.pad_lo if frame else 0), rows

    def halo(self, src: Layout, dst: Layout) -> Expr:
        """What an interior rank receives, and so sends, for a window around its own block."""
        needed = had = sympy().Integer(1)
        for i in range(len(src.axes)):
            below, above = self.window(dst, i)
            before_below, before_above = self.window(src, i)
            own = self.block(src, i)
            needed *= own + below + above
            if dst.axes[i]:
                below, above = min(below, before_below), min(above, before_above)
            had *= own + below + above
        return (needed - had) * self.inner(src.tensor)

    def neighbours(self, src: Layout, dst: Layout) -> Expr:
        """Ranks that an interior rank receives from, where no halo is wider than a block."""
        sides = 1
        for i in range(len(src.axes)):
            if src.windows[i] is None and dst.axes[i]:
                below, above = self.window(dst, i)
                sides *= 1 + bool(below > 0) + bool(above > 0)
        return sympy().Integer(sides - 1)

    def flops(self, operands: tuple[Layout, Layout, Layout]) -> Expr:
        """A local convolution's flops, as local.py counts them."""
        of = {layout.tensor: layout for layout in operands}
        return 2 * self.frame(of[self.conv.coarse]) * self.block(of["w"], 1) * self.taps()


def interior_window(s: Spatial, tensor: str, *, frame: bool = False) -> tuple[int, int]:
    """Rows below and above a block of x (or of dy) far from the edges, where x's block is S times y's.

    x and y are the fine and the coarse activation, as a convolution names them.

    Example:
        >>> interior_window(Spatial("H", 56, kernel=3, pad_lo=1, pad_hi=1), "x")
        (1, 1)
    """
    if tensor == "y" and frame:
        lo, hi = output_frame(s.taps, _SAMPLE * s.stride, 2 * _SAMPLE * s.stride)
        return _SAMPLE - lo, hi - 2 * _SAMPLE
    return interior_rows(s.taps if tensor == "x" else ReadBy(s.taps))


def interior_rows(relation: Taps | ReadBy) -> tuple[int, int]:
    """Rows below and above a block far from the edges, of the activation that is read by this relation."""
    taps = relation.taps if isinstance(relation, ReadBy) else relation
    fine, coarse = _SAMPLE * taps.stride, _SAMPLE
    by, read = (fine, coarse) if isinstance(relation, ReadBy) else (coarse, fine)
    lo, hi = relation.window(by, 2 * by)
    return read - lo, hi - 2 * read
