"""A layer's local problem when so many ranks share it: one dimension split, the rank with most to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Literal

from convgen.algebra.blocks import block
from convgen.algebra.conv import Conv
from convgen.algebra.relations import ReadBy
from convgen.algebra.windows import edge_padding
from convgen.kernels.config import ceil_div
from convgen.kernels.problem import LocalDim, Problem
from convgen.program.nodes import Phase

Split = Literal["channel", "filter", "sample", "spatial"]
SPLITS: tuple[Split, ...] = ("channel", "filter", "sample", "spatial")
OTHER_SPLIT: dict[Split, Split] = {
    "channel": "filter",
    "filter": "channel",
}  # of a transposed one, as Conv.direct has it


def local_problem(
    conv: Conv, split: Split, ways: int, phase: Phase, dtype: str, memory_format: str = "channels_last"
) -> Problem | None:
    """The problem of the rank with most to do when a layer is split; None if there are fewer elements than ranks.

    Channels and filters of a grouped layer are split by whole groups as long as a rank has several; space by the rows
    of the first dimension.
    """
    if conv.transposed:
        other = OTHER_SPLIT.get(split, split)
        return local_problem(conv.direct, other, ways, conv.direct_phase(phase), dtype, memory_format)
    groups, shared = conv.groups, gcd(conv.groups, ways) if split in ("channel", "filter") else 1
    channels, filters = conv.channels // groups, conv.filters // groups
    whole = {"channel": channels, "filter": filters, "sample": conv.batch, "spatial": conv.spatial[0].out}[split]
    if whole < ways // shared:
        return None
    rest = ways // shared
    made = [
        Problem(
            phase=phase,
            batch=ceil_div(conv.batch, ways) if split == "sample" else conv.batch,
            channels=ceil_div(channels, rest) if split == "channel" else channels,
            filters=ceil_div(filters, rest) if split == "filter" else filters,
            groups=groups // shared,
            dims=dims,
            dtype=dtype,
            memory_format=memory_format,
        )
        for dims in _local_dims(conv, ways if split == "spatial" else 1, phase)
    ]
    return max(made, key=lambda p: (p.flops, p.bytes))


def _local_dims(conv: Conv, ways: int, phase: Phase) -> Iterator[tuple[LocalDim, ...]]:
    """Each rank's spatial dimensions when the first one is split.

    A rank has its block of the activation that the phase makes or reads without a halo, and of the other its block and
    the halo.
    """
    for rank in range(ways):
        dims: list[LocalDim] = []
        for i, s in enumerate(conv.spatial):
            parts, part = (ways, rank) if i == 0 else (1, 0)
            x, y = block(0, s.extent, parts, part), block(0, s.out, parts, part)
            if phase == "backward_data":
                y = _hull(y, ReadBy(s.taps).window(*x), s.out)
            else:
                x = _hull(x, s.taps.window(*y), s.extent)
            below, _ = edge_padding(s.taps, *x, *y)
            dims.append(LocalDim(s.name, x[1] - x[0], y[1] - y[0], s.kernel, s.stride, s.dilation, int(below)))
        yield tuple(dims)


def _hull(a: tuple[int, int], b: tuple[int, int], extent: int) -> tuple[int, int]:
    """The least interval that holds both intervals, within the tensor."""
    return max(min(a[0], b[0]), 0), min(max(a[1], b[1]), extent)


def with_zero_rows(p: Problem) -> Problem:
    """The problem where x's rows include the zeros that one side has more than the other, as a CPU's module holds x."""
    dims: list[LocalDim] = []
    for d in p.dims:
        above = (d.y - 1) * d.stride + d.dilation * (d.kernel - 1) + 1 - d.below - d.x
        alike = d.below >= 0 and 0 <= d.below - above < d.stride
        dims.append(d if alike else replace(d, x=d.x + d.below + above, below=0))
    return replace(p, dims=tuple(dims))
