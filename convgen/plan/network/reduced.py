"""Modelled steps on thousands of ranks, each priced on the few ranks that matter to it.

A conversion is priced on the axes that it involves (cost/moving.py). Likewise a local convolution depends on axes that
split samples, or channels that are one group, by their largest block alone. So it is costed on a grid of its own axes,
once for all like it, by the same `Model` that prices schedules; `pytest tests/test_plan_reduced.py` compares the two.

This is the planner's seam to the cost model: what `Terms` asks of a Model, a ReducedModel answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from convgen.algebra.blocks import groups_left
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.model import Measured, Model, StepCost

_ONE = (("a0", 1),)


class ReducedSpace(Space):
    """A space whose windows are found on the axes that make them."""

    def window(self, tensor: str, dim: int, axes: Axes) -> Window | None:
        sizes = tuple(self.grid.sizes[a] for a in axes)
        return _window(self.conv.spatial[dim - 2], self.conv.direct_tensor(tensor), sizes, self.virtual_padding)

    def largest_block(self, tensor: str, dim: int, axes: Axes) -> int:
        """The most elements of a dimension that a rank has where these axes split it."""
        d = self.conv.dims(tensor)[dim]
        return largest(d.extent, d.groups, tuple(self.grid.sizes[a] for a in axes))


class ReducedModel(Model):
    """`Model` for a ReducedSpace."""

    def __init__(self, space: ReducedSpace, machine: Machine, dtype: str, measured: Measured | None = None) -> None:
        super().__init__(space, machine, dtype, measured=measured)
        self.reduced = space
        self._local_found: dict[tuple[Layout, Layout, Layout], StepCost] = {}

    def convolution(self, operands: tuple[Layout, Layout, Layout]) -> StepCost:
        if (found := self._local_found.get(operands)) is None:
            found = self._local_found[operands] = self._convolution(operands)
        return found

    def _convolution(self, operands: tuple[Layout, Layout, Layout]) -> StepCost:
        space, of = self.reduced, {layout.tensor: layout for layout in operands}
        conv, x, w, y = space.conv, of["x"], of["w"], of["y"]
        dropped: dict[str, set[int]] = {"x": set(), "w": set(), "y": set()}
        if x.axes[0] == y.axes[0]:
            conv = replace(conv, batch=space.largest_block("x", 0, x.axes[0]))
            dropped["x"].add(0)
            dropped["y"].add(0)
        of_w = dict(zip((d.name for d in conv.dims("w")), w.axes, strict=True))
        if conv.groups == 1 and x.axes[1] == of_w["C"] and y.axes[1] == of_w["F"]:
            channels, filters = space.largest_block("x", 1, x.axes[1]), space.largest_block("y", 1, y.axes[1])
            conv = replace(conv, channels=channels, filters=filters)
            for tensor in dropped:
                dropped[tensor] |= {0, 1} if tensor == "w" else {1}
        elif conv.groups > 1 and x.axes[1] == w.axes[0] == y.axes[1] and not w.axes[1]:
            sizes = tuple(space.grid.sizes[a] for a in x.axes[1])
            if prod(sizes) <= conv.groups:
                left = groups_left(conv.groups, sizes)
                per = conv.channels // conv.groups, conv.filters // conv.groups
                conv = replace(conv, groups=left, channels=left * per[0], filters=left * per[1])
                dropped = {"x": dropped["x"] | {1}, "w": {0, 1}, "y": dropped["y"] | {1}}
        kept = {a for o in operands for d, axes in enumerate(o.axes) if d not in dropped[o.tensor] for a in axes}
        axes = space.grid.ordered(kept)
        name = {a: f"a{i}" for i, a in enumerate(axes)}
        grid = Grid(tuple((name[a], space.grid.sizes[a]) for a in axes) or _ONE)
        first, second, third = (
            _renamed(replace(o, partial=()), [d not in dropped[o.tensor] for d in range(len(o.axes))], name)
            for o in operands
        )
        conv = replace(conv, bias=False)
        model = _small_model(conv, grid, self.machine, self.dtype, space.virtual_padding, self.measured)
        return model.convolution((first, second, third))

    def add_bias(self, y: Layout) -> StepCost:
        return self._on_one_rank(y).add_bias(Layout("y", ((),) * len(y.axes)))

    def sum_bias(self, y: Layout) -> StepCost:
        return self._on_one_rank(y).sum_bias(Layout("y", ((),) * len(y.axes)))

    def _on_one_rank(self, y: Layout) -> Model:
        batch, filters, *rows = (self.reduced.largest_block("y", d, axes) for d, axes in enumerate(y.axes))
        spatial = tuple(Spatial(s.name, n, kernel=1) for s, n in zip(self.reduced.conv.spatial, rows, strict=True))
        return Model(Space(Conv(batch, 1, filters, spatial), Grid(_ONE)), self.machine, self.dtype)


@lru_cache(maxsize=1 << 10)
def reduced_model(
    conv: Conv, grid: Grid, machine: Machine, dtype: str, *, virtual_padding: bool, measured: Measured | None = None
) -> ReducedModel:
    """The model of a convolution on a grid: one for all layers alike, and for all searches of a grid."""
    return ReducedModel(ReducedSpace(conv, grid, virtual_padding=virtual_padding), machine, dtype, measured)


def largest(extent: int, groups: int, sizes: tuple[int, ...]) -> int:
    """The largest block of a dimension over axes of these sizes, by the block rule.

    Example:
        >>> largest(7, 1, (2, 2)), largest(12, 3, (2, 2))
        (2, 4)
    """
    unit = extent // groups
    for size in sizes:
        if groups > 1:
            groups = -(-groups // size)
        else:
            unit = -(-unit // size)
    return groups * unit


def _renamed(layout: Layout, kept: Sequence[bool], name: dict[str, str]) -> Layout:
    """A layout with other names for axes, none where a dimension isn't kept."""
    axes = tuple(tuple([name[a] for a in axes]) if keep else () for axes, keep in zip(layout.axes, kept, strict=True))
    return Layout(layout.tensor, axes, layout.windows, tuple([name[a] for a in layout.partial]))


@lru_cache(maxsize=1 << 16)
def _window(spatial: Spatial, tensor: str, sizes: tuple[int, ...], virtual: bool) -> Window | None:
    """Of a convolution's x or y."""
    grid = Grid(tuple((f"a{i}", size) for i, size in enumerate(sizes)) or _ONE)
    space = Space(Conv(1, 1, 1, (spatial,)), grid, virtual_padding=virtual)
    return space.window(tensor, 2, grid.names if sizes else ())


@lru_cache(maxsize=1 << 6)
def _small_space(conv: Conv, grid: Grid, virtual: bool) -> Space:
    return Space(conv, grid, virtual_padding=virtual)


@lru_cache(maxsize=1 << 10)
def _small_model(
    conv: Conv, grid: Grid, machine: Machine, dtype: str, virtual: bool, measured: Measured | None
) -> Model:
    return Model(_small_space(conv, grid, virtual), machine, dtype, measured=measured)
