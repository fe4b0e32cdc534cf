"""Local work of one rank: flops and memory traffic of a convolution, from the frames of its operands.

A convolution multiplies, for every row of y in the frame, its N, F and the channels per group that w's block
has, by every tap: 2 flops each. Backward-data and backward-filter count the same way over the rows of dy that
they read, halo included. Memory traffic is each operand read and the result written once. Adding the bias
reads and writes y; summing it reads dy. Slices, packing and padding are not counted. Of a transposed convolution,
products are counted over the rows of x, its coarse activation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.layout import Layout
from convgen.algebra.space import Space
from convgen.cost.traffic import blocks_volume


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
