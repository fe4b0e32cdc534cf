"""Local work of one rank: flops and memory traffic of a convolution, from the frames of its operands.

A convolution multiplies, for every row of y in the frame, its N, F and the channels per group that w's block
has, by every tap: 2 flops each. Backward-data and backward-filter count the same way over the rows of dy that
they read, halo included. Memory traffic is each operand read and the result written once. Adding the bias
reads and writes y; summing it reads dy. Slices, packing and padding are not counted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.layout import Layout
from convgen.algebra.space import Space, volume


def convolution_flops(space: Space, operands: tuple[Layout, Layout, Layout]) -> NDArray[np.int64]:
    """Flops of every rank. `operands` are the layouts of x, w and y (or their gradients) in any order."""
    of = {layout.tensor: layout for layout in operands}
    channels = space.held(of["w"])[:, 1]
    return 2 * volume(space.frame(of["y"])) * (channels[:, 1] - channels[:, 0]) * space.conv.taps


def convolution_elements(space: Space, operands: tuple[Layout, Layout, Layout]) -> NDArray[np.int64]:
    """Elements that every rank reads and writes."""
    first, second, third = (space.elements(layout) for layout in operands)
    return first + second + third
