"""Modelled steps on thousands of ranks, each priced on the few ranks that matter to it.

A conversion depends on a grid axis only where that axis splits a dimension that the conversion changes, or holds
addends. Every other dimension contributes its largest block, since its axes move independently: the busiest rank of
the small problem does exactly what the busiest rank of the large one does. Likewise a local convolution depends on
axes that split samples, or channels that are one group, by their largest block alone. So a step is costed on a grid
of its own axes, once for all steps like it, by the same `Model` that prices schedules;
`pytest tests/test_plan_reduced.py` compares the two. Links are those of the whole grid (cost/links.py). One thing is
a bound, not exact: an exchange on a machine of several levels where ranks times group are more than MOST_PAIRS (16
times as many for an all-to-all) counts as if all its messages crossed the outermost level that it reaches.

This is the planner's seam to the cost model: what `Terms` asks of a Model, a ReducedModel answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from convgen.algebra.blocks import groups_left
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.space import Space
from convgen.cost.exchanges import exchange_traffic
from convgen.cost.links import MOST_PAIRS, collective_seconds, direct_all_to_all, slowest
from convgen.cost.machine import Machine
from convgen.cost.model import FREE, PICOSECONDS, Chain, Measured, Model, StepCost
from convgen.cost.traffic import elements_received, elements_sent

_ONE = (("a0", 1),)
_ANY = Window(0, 0)


class ReducedSpace(Space):
    """A space whose windows are found on the axes that make them."""

    def window(self, tensor: str, dim: int, axes: Axes) -> Window | None:
        sizes = tuple(self.grid.sizes[a] for a in axes)
        return _window(self.conv.spatial[dim - 2], self.conv.direct_tensor(tensor), sizes, self.virtual_padding)

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

    def __init__(self, space: ReducedSpace, machine: Machine, dtype: str, measured: Measured | None = None) -> None:
        super().__init__(space, machine, dtype, measured=measured)
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
        grid = self.reduced.grid
        changed = tuple(
            a != b or v != w for a, b, v, w in zip(src.axes, dst.axes, src.windows, dst.windows, strict=True)
        )
        involved = set(src.partial)
        for d, moves in enumerate(changed):
            if moves:
                involved.update(src.axes[d], dst.axes[d])
        axes = grid.ordered(involved)
        name = {a: f"a{i}" for i, a in enumerate(axes)}
        steps = _plan_of(
            tuple(grid.sizes[a] for a in axes),
            _renamed(src, changed, name),
            replace(_renamed(dst, changed, name), windows=tuple(_ANY if w else None for w in dst.windows)),
        )
        found: list[tuple[Conversion, StepCost]] = []
        here = src
        for step in steps:
            split = tuple(
                tuple(axes[int(a[1:])] for a in short) if moves else old
                for short, old, moves in zip(step.dst.axes, src.axes, changed, strict=True)
            )
            windows = tuple(w if any_ else None for w, any_ in zip(dst.windows, step.dst.windows, strict=True))
            to = Layout(src.tensor, split, windows, tuple(axes[int(a[1:])] for a in step.dst.partial))
            one = Conversion(step.kind, tuple(axes[int(a[1:])] for a in step.over), here, to)
            found.append((one, self.conversion(one)))
            here = to
        return tuple(found)

    def _conversion(self, step: Conversion) -> StepCost:
        sizes, src, dst = self.reduced.grid.sizes, step.src, step.dst
        group = prod(sizes[a] for a in step.over)
        if group == 1:
            return FREE
        plain = not (src.has_window or dst.has_window) and (self.space.conv.groups == 1 or src.axes == dst.axes)
        if step.kind == "all_gather" and plain:
            sent = busiest = (group - 1) * self.reduced.largest_elements(src)
        elif step.kind == "reduce_scatter" and plain:
            sent = self.reduced.largest_elements(src) - self._least_inside(src, dst)
            busiest = max(sent, (group - 1) * self.reduced.largest_elements(dst))
        elif step.kind == "all_reduce" and plain:
            whole = self.reduced.largest_elements(src)
            sent = busiest = whole + (group - 2) * -(-whole // group)
        elif step.kind == "exchange" and self._few_pairs(step):
            members, flows = self.reduced.flows(step.src, step.dst)
            sent = int(flows.sum(axis=2).max())
            time_s = self._flowing(members, flows)
            return StepCost(sent, sent * self.element_bytes, 0, round(time_s * PICOSECONDS))
        else:
            sent, busiest, peers = self._on_its_axes(step)
            if step.kind == "exchange":
                time_s = self._exchange_s(step, peers, busiest * self.element_bytes)
                return StepCost(sent, sent * self.element_bytes, 0, round(time_s * PICOSECONDS))
        time_s = self._collective_s(step, busiest * self.element_bytes)
        return StepCost(sent, sent * self.element_bytes, 0, round(time_s * PICOSECONDS))

    def _collective_s(self, step: Conversion, n: int) -> float:
        grid, levels, algorithm = self.reduced.grid, self.machine.levels, self.collectives.of(step.kind)
        if step.kind == "all_to_all" and algorithm == "direct":
            # Linear in the bytes; pairs of thousands of ranks are many.
            start, full = direct_all_to_all(grid, levels, step.over)
            return start + n * full
        return collective_seconds(grid, levels, step.kind, step.over, n, self.machine.add_s_per_byte, algorithm)[0]

    def _few_pairs(self, step: Conversion) -> bool:
        """Whether an exchange is priced message by message: on several levels, where messages are few."""
        levels, grid = self.machine.levels, self.reduced.grid
        if len(levels) == 1 and levels[0].shared_bytes_per_s is None:
            return False
        involved = {a for t in (step.src, step.dst) for axes in t.axes for a in axes}
        return grid.ranks * prod(grid.sizes[a] for a in involved) <= MOST_PAIRS

    def _exchange_s(self, step: Conversion, peers: int, n: int) -> float:
        """Seconds of an exchange where messages are many: exact on one level, else a bound from above."""
        levels, grid = self.machine.levels, self.reduced.grid
        if len(levels) == 1 and levels[0].shared_bytes_per_s is None:
            return peers * levels[0].latency_s + n / levels[0].bytes_per_s
        involved = {a for t in (step.src, step.dst) for axes in t.axes for a in axes}
        # As if every message crossed the outermost level that the axes reach, all ranks of a unit at once.
        over = grid.ordered(a for b, c in zip(step.src.axes, step.dst.axes, strict=True) for a in (*b, *c) if b != c)
        over = over or grid.ordered(involved)
        return peers * max(one.latency_s for one in levels) + n * slowest(grid, levels, over)

    def _least_inside(self, outer: Layout, inner: Layout) -> int:
        """The fewest elements that a rank keeps of the largest block of `outer`, split further as `inner` is."""
        total = self.space.weight(outer.tensor)
        for d, (before, after) in enumerate(zip(outer.axes, inner.axes, strict=True)):
            rows = self.reduced.largest_block(outer.tensor, d, before)
            for axis in after[len(before) :]:
                rows //= self.reduced.grid.sizes[axis]
            total *= rows
        return total

    def _on_its_axes(self, step: Conversion) -> tuple[int, int, int]:
        """Traffic of a step, on the grid of the axes that it involves, dimensions that it leaves alone as one block."""
        space, src, dst = self.reduced, step.src, step.dst
        changed = tuple(
            a != b or v is not None or w is not None
            for a, b, v, w in zip(src.axes, dst.axes, src.windows, dst.windows, strict=True)
        )
        involved = set(src.partial)
        for d, moves in enumerate(changed):
            if moves:
                involved.update(src.axes[d], dst.axes[d])
        # Traffic does not depend on how ranks are numbered: axes in the order in which the layouts name them, so that
        # steps alike are counted once on all grids.
        named = [a for layout in (src, dst) for axes in layout.axes for a in axes]
        axes = tuple(a for a in dict.fromkeys([*named, *src.partial]) if a in involved)
        name = {a: f"a{i}" for i, a in enumerate(axes)}
        grid = Grid(tuple((name[a], space.grid.sizes[a]) for a in axes) or _ONE)
        small = Conversion(
            step.kind,
            grid.ordered(name[a] for a in step.over if a in name),
            _renamed(src, changed, name, grid),
            _renamed(dst, changed, name, grid),
        )
        if step.kind == "reduce_scatter":
            return _small_traffic(_tensor_conv(space, src, changed), grid, small, space.virtual_padding)
        # In proportion to what it leaves alone.
        left = prod(space.largest_block(src.tensor, d, src.axes[d]) for d, moves in enumerate(changed) if not moves)
        conv = _tensor_conv(space, src, changed, alone=1)
        sent, busiest, peers = _small_traffic(conv, grid, small, space.virtual_padding)
        return left * sent, left * busiest, peers

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
        conv = _tensor_conv(self.reduced, y, [False] * len(y.axes))
        return Model(Space(conv, Grid(_ONE)), self.machine, self.dtype)


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


def _tensor_conv(space: ReducedSpace, layout: Layout, changed: Sequence[bool], alone: int | None = None) -> Conv:
    """A convolution whose tensor of this name has its full extent where a conversion changes it, else a block's.

    Args:
        alone: instead of a block's extent.
    """
    conv, tensor = space.conv, layout.tensor
    extent = [
        d.extent if moves else alone or space.largest_block(tensor, i, layout.axes[i])
        for i, (d, moves) in enumerate(zip(conv.dims(tensor), changed, strict=True))
    ]
    if tensor == "bias":
        groups = conv.groups if changed[0] else 1
        return Conv(1, groups, extent[0], conv.spatial, groups)
    if tensor == "w":
        groups = conv.groups if changed[0] else 1
        outer, inner = extent[0], extent[1] * groups
        channels, filters = (outer, inner) if conv.transposed else (inner, outer)
        return Conv(1, channels, filters, conv.spatial, groups, transposed=conv.transposed)
    spatial = tuple(
        s if moves else Spatial(s.name, n, kernel=1)
        for s, n, moves in zip(conv.spatial, extent[2:], changed[2:], strict=True)
    )
    groups = conv.groups if changed[1] else 1
    channels, filters = (extent[1], groups) if tensor == "x" else (groups, extent[1])
    return Conv(extent[0], channels, filters, spatial, groups, transposed=conv.transposed)


def _renamed(layout: Layout, kept: Sequence[bool], name: dict[str, str], grid: Grid | None = None) -> Layout:
    """Layouts with other names for axes, none where a dimension isn't kept; addends in the order of `grid`."""
    axes = tuple(tuple([name[a] for a in axes]) if keep else () for axes, keep in zip(layout.axes, kept, strict=True))
    partial = tuple([name[a] for a in layout.partial])
    return Layout(layout.tensor, axes, layout.windows, grid.ordered(partial) if grid is not None else partial)


@lru_cache(maxsize=1 << 16)
def _window(spatial: Spatial, tensor: str, sizes: tuple[int, ...], virtual: bool) -> Window | None:
    """Of a convolution's x or y."""
    grid = Grid(tuple((f"a{i}", size) for i, size in enumerate(sizes)) or _ONE)
    space = Space(Conv(1, 1, 1, (spatial,)), grid, virtual_padding=virtual)
    return space.window(tensor, 2, grid.names if sizes else ())


class _AnyExtent(Space):
    """Stands in for a space where only the order of conversions is asked: every exchange moves something."""

    def moved_axes(self, src: Layout, dst: Layout) -> Axes:
        moving = zip(src.axes, dst.axes, src.windows, dst.windows, strict=True)
        return self.grid.ordered(a for b, c, v, w in moving if (b, v) != (c, w) for a in (*b, *c))


@lru_cache(maxsize=1 << 16)
def _plan_of(sizes: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Conversion, ...]:
    """The conversions between two layouts, whatever the extents; windows stand as _ANY."""
    grid = Grid(tuple((f"a{i}", size) for i, size in enumerate(sizes)) or _ONE)
    return redistribute(_AnyExtent(Conv(1, 1, 1, ()), grid), src, dst)


@lru_cache(maxsize=1 << 18)
def _small_traffic(conv: Conv, grid: Grid, step: Conversion, virtual: bool) -> tuple[int, int, int]:
    """(elements that the busiest rank sends, sends or receives, messages of a rank)."""
    space = _small_space(conv, grid, virtual)
    if step.kind == "exchange":
        return exchange_traffic(space, step.src, step.dst)
    what = (space, step.kind, step.over, step.src, step.dst)
    sent = elements_sent(*what)
    return int(sent.max()), int(np.maximum(sent, elements_received(*what)).max()), grid.over(step.over) - 1


@lru_cache(maxsize=1 << 6)
def _small_space(conv: Conv, grid: Grid, virtual: bool) -> Space:
    return Space(conv, grid, virtual_padding=virtual)


@lru_cache(maxsize=1 << 10)
def _small_model(
    conv: Conv, grid: Grid, machine: Machine, dtype: str, virtual: bool, measured: Measured | None
) -> Model:
    return Model(_small_space(conv, grid, virtual), machine, dtype, measured=measured)
