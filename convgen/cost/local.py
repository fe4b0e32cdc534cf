"""Local work of one rank: flops and memory traffic of a convolution, from the frames of its operands.

A convolution multiplies, for every row of y in the frame, its N, F and the channels per group that w's block
has, by every tap: 2 flops each. Backward-data and backward-filter count the same way over the rows of dy that
they read, halo included. Memory traffic is each operand read and the result written once. Adding the bias
reads and writes y; summing it reads dy. Slices, packing and padding are not counted. A transposed convolution's
products are counted over the rows of x, its coarse activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import most_of
from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.traffic import blocks_volume
from convgen.operations.convolution import MAKES
from convgen.operations.row import Operation
from convgen.operations.transposed import EXCHANGED
from convgen.program.nodes import Phase

Shape = tuple[float, ...]  # channels and filters of a group, taps, pixels of y, groups, step
PHASE_OF: dict[str, Phase] = {made: phase for phase, made in MAKES.items()}


def convolution_flops(space: Space, operands: tuple[Layout, Layout, Layout]) -> NDArray[np.int64]:
    """Flops of every rank. `operands` are the layouts of x, w and y (or their gradients) in any order."""
    of = {layout.tensor: layout for layout in operands}
    lo, hi = space.block("w", 1, of["w"].axes[1])
    return 2 * frame_elements(space, of[space.conv.coarse]) * (hi - lo) * space.conv.taps


def convolution_elements(space: Space, operands: tuple[Layout, Layout, Layout]) -> NDArray[np.int64]:
    """Elements that every rank reads and writes."""
    first, second, third = (frame_elements(space, layout) for layout in operands)
    return first + second + third


def frame_elements(space: Space, layout: Layout) -> NDArray[np.int64]:
    """Elements of each rank's frame, zero rows and kernel taps included."""
    return space.elements(layout) if layout.has_window else blocks_volume(space, layout)


def layers_flops_per_s(
    machine: Machine, dtype: str, space: Space, operands: tuple[Layout, Layout, Layout], flops: int
) -> float:
    """The flop/s of the slowest rank's convolution, by its shape. `flops`: that rank's."""
    if not machine.by_shape:
        return machine.flops_per_s(dtype)
    return machine.convolution_flops_per_s(dtype, *layers_shape(space, operands, flops))


def layers_shape(space: Space, operands: tuple[Layout, Layout, Layout], flops: int) -> tuple[str, Shape]:
    """The phase, and the shape by which a machine knows efficiency."""
    conv, w = space.conv, next(layout for layout in operands if layout.tensor == "w")
    sizes = [int((hi - lo).max()) for lo, hi in (space.block("w", d, w.axes[d]) for d in (0, 1))]
    x = next((layout for layout in operands if layout.tensor == conv.fine), None)
    channels = sizes[1]
    groups = 1
    if conv.groups > 1 and x is not None:
        lo, hi = space.block(conv.fine, 1, x.axes[1])
        groups = max(1, int((hi - lo).max()) // max(channels, 1))
    phase = conv.direct_phase(PHASE_OF[operands[2].tensor])
    return phase, _shape((channels, sizes[0] // groups, conv.taps, groups, _step(conv)), flops)


def rows_flops_per_s(
    machine: Machine, dtype: str, operation: Operation, roles: Mapping[str, Axes], grid: Grid, flops: int
) -> float:
    """The flop/s of a network's row, by its roles."""
    if not machine.by_shape or operation.convolves is None:
        return machine.flops_per_s(dtype)
    phase, conv = operation.convolves
    if conv.transposed:
        roles = {EXCHANGED.get(i, i): axes for i, axes in roles.items()}
        phase, conv = conv.direct_phase(phase), conv.direct

    def share(index: str, extent: int) -> int:
        return most_of(extent, [grid.sizes[a] for a in roles.get(index, ())])

    channels, filters, groups = conv.channels // conv.groups, conv.filters // conv.groups, conv.groups
    if groups > 1 and "G" not in roles:
        groups = max(1, min(share("C", groups), share("F", groups)))
    else:
        channels, filters, groups = share("C", channels), share("F", filters), share("G", groups)
    return machine.convolution_flops_per_s(
        dtype, phase, _shape((channels, filters, conv.taps, groups, _step(conv)), flops)
    )


def _shape(sizes: tuple[int, ...], flops: int) -> Shape:
    """`sizes`: channels and filters of a group, taps, groups, step; pixels follow from the flops."""
    channels, filters, taps, groups, step = (max(n, 1) for n in sizes)
    pixels = max(flops / (2 * channels * filters * taps * groups), 1.0)
    return channels, filters, taps, pixels, groups, step


def _step(conv: Conv) -> int:
    return prod(s.stride for s in conv.spatial)
