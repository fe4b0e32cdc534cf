"""Modelled steps on thousands of ranks, each priced on the few ranks that matter to it.

A conversion depends on a grid axis only where that axis splits a dimension that the conversion changes, or holds
addends. Every other dimension contributes its largest block, since its axes move independently: the busiest rank of
the small problem does exactly what the busiest rank of the large one does. Likewise a local convolution depends on
axes that split samples, or channels that are one group, by their largest block alone. So a step is costed on a grid
of its own axes, once for all steps like it, by the same `Model` that prices schedules;
`pytest tests/test_plan_reduced.py` compares the two.

This is the planner's seam to the cost model: what `Terms` asks of a Model, a ReducedModel answers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from convgen.algebra.blocks import groups_left
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.model import Chain, Model, StepCost

_ONE = (("a0", 1),)


class ReducedSpace(Space):
    """A space whose windows are found on the axes that make them."""

    def window(self, tensor: str, dim: int, axes: Axes) -> Window | None:
        sizes = tuple(self.grid.sizes[a] for a in axes)
        return _window(self.conv.spatial[dim - 2], tensor, sizes, self.virtual_padding)

    def largest_block(self, tensor: str, dim: int, axes: Axes) -> int:
        """The most elements of a dimension that a rank has where these axes split it."""
        d = self.conv.dims(tensor)[dim]
        return largest(d.extent, d.groups, tuple(self.grid.sizes[a] for a in axes))

    def largest_elements(self, layout: Layout) -> int:
        """The most elements that a rank has of a layout without windows, kernel taps included."""
        blocks = (self.largest_block(layout.tensor, i, axes) for i, axes in enumerate(layout.axes))
        return prod(blocks) * self.weight(layout.tensor)


class ReducedModel(Model):
    """`Model` for a ReducedSpace."""

    def __init__(self, space: ReducedSpace, machine: Machine, dtype: str) -> None:
        super().__init__(space, machine, dtype)
        self.reduced = space
        self._found: dict[tuple[Layout, Layout], Chain] = {}
        self._local_found: dict[tuple[Layout, Layout, Layout], StepCost] = {}

    def chain(self, src: Layout, dst: Layout) -> Chain:
        key = (src, dst)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._chain(src, dst)
        return found

    def _chain(self, src: Layout, dst: Layout) -> Chain:
        if src == dst:
            return ()
        space, tensor = self.reduced, src.tensor
        changed = [
            a != b or v != w for a, b, v, w in zip(src.axes, dst.axes, src.windows, dst.windows, strict=True)
        ]
        involved = set(src.partial)
        for d, moves in enumerate(changed):
            if moves:
                involved.update(src.axes[d], dst.axes[d])
        axes = space.grid.ordered(involved)
        name = {a: f"a{i}" for i, a in enumerate(axes)}
        grid = Grid(tuple((name[a], space.grid.sizes[a]) for a in axes) or _ONE)
        conv = _tensor_conv(space, src, changed)
        small = _renamed(src, changed, name), _renamed(dst, changed, name)
        steps = _small_chain(conv, grid, small, self.machine, self.dtype, space.virtual_padding)
        back = {short: axis for axis, short in name.items()}

        def restored(layout: Layout) -> Layout:
            kept = zip(layout.axes, src.axes, changed, strict=True)
            split = tuple(tuple(back[a] for a in axes) if moves else old for axes, old, moves in kept)
            return Layout(tensor, split, layout.windows, tuple(back[a] for a in layout.partial))

        return tuple(
            (Conversion(s.kind, tuple(back[a] for a in s.over), restored(s.src), restored(s.dst)), cost)
            for s, cost in steps
        )

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
        if conv.groups == 1 and x.axes[1] == w.axes[1] and w.axes[0] == y.axes[1]:
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
        return _small_convolution(
            conv, grid, (first, second, third), self.machine, self.dtype, space.virtual_padding
        )

    def add_bias(self, y: Layout) -> StepCost:
        return self._on_one_rank(y).add_bias(Layout("y", ((),) * len(y.axes)))

    def sum_bias(self, y: Layout) -> StepCost:
        return self._on_one_rank(y).sum_bias(Layout("y", ((),) * len(y.axes)))

    def _on_one_rank(self, y: Layout) -> Model:
        conv = _tensor_conv(self.reduced, y, [False] * len(y.axes))
        return Model(Space(conv, Grid(_ONE)), self.machine, self.dtype)


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


def _tensor_conv(space: ReducedSpace, layout: Layout, changed: list[bool]) -> Conv:
    """A convolution whose tensor of this name has its full extent where a conversion changes it, else a block's."""
    conv, tensor = space.conv, layout.tensor
    extent = [
        d.extent if moves else space.largest_block(tensor, i, layout.axes[i])
        for i, (d, moves) in enumerate(zip(conv.dims(tensor), changed, strict=True))
    ]
    if tensor == "bias":
        groups = conv.groups if changed[0] else 1
        return Conv(1, groups, extent[0], conv.spatial, groups)
    if tensor == "w":
        groups = conv.groups if changed[0] else 1
        return Conv(1, extent[1] * groups, extent[0], conv.spatial, groups)
    spatial = tuple(
        s if moves else Spatial(s.name, n, kernel=1)
        for s, n, moves in zip(conv.spatial, extent[2:], changed[2:], strict=True)
    )
    groups = conv.groups if changed[1] else 1
    channels, filters = (extent[1], groups) if tensor == "x" else (groups, extent[1])
    return Conv(extent[0], channels, filters, spatial, groups)


def _renamed(layout: Layout, kept: list[bool], name: dict[str, str]) -> Layout:
    axes = tuple(tuple(name[a] for a in axes) if keep else () for axes, keep in zip(layout.axes, kept, strict=True))
    return Layout(layout.tensor, axes, layout.windows, tuple(name[a] for a in layout.partial))


@lru_cache(maxsize=1 << 16)
def _window(spatial: Spatial, tensor: str, sizes: tuple[int, ...], virtual: bool) -> Window | None:
    grid = Grid(tuple((f"a{i}", size) for i, size in enumerate(sizes)) or _ONE)
    space = Space(Conv(1, 1, 1, (spatial,)), grid, virtual_padding=virtual)
    return space.window(tensor, 2, grid.names if sizes else ())


@lru_cache(maxsize=1 << 18)
def _small_chain(
    conv: Conv, grid: Grid, layouts: tuple[Layout, Layout], machine: Machine, dtype: str, virtual: bool
) -> Chain:
    model = _small_model(conv, grid, machine, dtype, virtual)
    return tuple((step, model.conversion(step)) for step in redistribute(model.space, *layouts))


@lru_cache(maxsize=1 << 18)
def _small_convolution(
    conv: Conv, grid: Grid, operands: tuple[Layout, Layout, Layout], machine: Machine, dtype: str, virtual: bool
) -> StepCost:
    return _small_model(conv, grid, machine, dtype, virtual).convolution(operands)


@lru_cache(maxsize=1 << 12)
def _small_model(conv: Conv, grid: Grid, machine: Machine, dtype: str, virtual: bool) -> Model:
    return Model(Space(conv, grid, virtual_padding=virtual), machine, dtype)
