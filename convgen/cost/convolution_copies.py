"""What ATen's convolutions on a CPU (oneDNN) hold beside their operands and results.

These kernels read and write blocks of 16 channels: x, y, dy and dx are copied to that order and back, and the last
block is padded. Measured beside ATen's own memory (torch 2.13, one to three dimensions, AVX-512):

| call | most at a time, beside what is given |
|---|---|
| y | blocks of w, x and y, then y itself in x's place |
| dx | blocks of w, dy and dx, then dx in dy's place; with a stride three of dx |
| dw | blocks of x, dy and dw |
| dx and dw | dx, then what dw takes beside it |

An x of fewer than 16 channels is read as it is for y and dw, and a kernel of 1 without a stride needs no copies at all.
A transposed convolution makes y from two more tensors of its size. AVX2's kernels have blocks of 8: they pad less.

oneDNN has no float64. There ATen's own kernels write out, in columns, what each row of y reads: for all samples at
once, or sample by sample where taps are dilated, or a gradient goes through a transposed convolution. In one and two
dimensions they go group by group, and put the groups' results together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from convgen.algebra.conv import Conv
from convgen.operations.row import Operation

BLOCK = 16  # channels


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of a rank's x and y; of both in blocks of channels; of x as the kernels of y and dw read it, 0 where
    they read it as it is; and of w in blocks."""

    x: int
    y: int
    x_blocks: int
    y_blocks: int
    x_read: int
    w_blocks: int


def copies(operation: Operation, x: tuple[int, ...], y: tuple[int, ...], w: tuple[int, ...], of_x: bool | None) -> int:
    """The most elements that a convolution holds at once beside its operands and results.

    Args:
        x, y, w: shapes of a rank's blocks.
        of_x: None for forward; for backward, whether dx is asked for.
    """
    if operation.convolves is None:
        return 0
    _, conv = operation.convolves
    turned = conv.transposed
    if _is_product(conv) and not turned:
        return 0
    of = _sizes(conv, x, y, w)
    strided = any(s.stride > 1 for s in conv.spatial) and not turned
    if of_x is None:
        return of.w_blocks + (2 * of.y if turned else max(of.x_read + of.y_blocks - of.y, of.y_blocks))
    filters = of.x_read + of.y_blocks + of.w_blocks
    if not of_x:
        return filters
    inputs = max(of.y_blocks + of.x_blocks - of.x, 2 * of.x if strided else of.x_blocks) + of.w_blocks
    return max(inputs, filters)


def columns(operation: Operation, x: tuple[int, ...], y: tuple[int, ...], w: tuple[int, ...], of_x: bool | None) -> int:
    """The same for float64, which oneDNN lacks: columns. Arguments are those of `copies`."""
    if operation.convolves is None:
        return 0
    _, conv = operation.convolves
    taps, flat = prod(s.kernel for s in conv.spatial), len(conv.spatial) < 3
    if conv.transposed:
        return taps * w[1] * prod(x[2:]) * (x[0] if flat and of_x is None else 1)
    if _is_product(conv):
        return (prod(x[1:]) if flat else prod(x)) if of_x else 0
    dilated = any(s.dilation > 1 for s in conv.spatial)
    groups = x[1] // w[1]
    channels = w[1] if flat or dilated else x[1]
    apart = (prod(y) + (prod(x) if of_x is not None else 0)) // groups if groups > 1 and flat else 0
    return taps * channels * prod(y[2:]) * (1 if dilated else x[0]) + apart


def columns_of_row(operation: Operation, first: tuple[int, ...], second: tuple[int, ...], made: tuple[int, ...]) -> int:
    """The same for a gradient that is a row of its own; its dx is made with rows beside it, which are cut off.

    Args:
        first, second: shapes of its operands, dy with the rows that it wishes for.
        made: shape of its result.
    """
    if operation.convolves is None:
        return 0
    phase, conv = operation.convolves
    taps, samples = prod(s.kernel for s in conv.spatial), first[0]
    if phase == "backward_data":
        beside = prod(first) + 2 * prod(made)
        if conv.transposed:
            return taps * first[1] * prod(made[2:]) * samples + beside
        return taps * made[1] * prod(first[2:]) * (samples if len(conv.spatial) < 3 else 1) + beside
    if conv.transposed:
        return taps * first[1] * prod(second[2:])
    return taps * second[1] * prod(first[2:]) * samples


def _is_product(conv: Conv) -> bool:
    return conv.groups == 1 and all(s.kernel == s.stride == 1 and s.pad_lo == s.pad_hi == 0 for s in conv.spatial)


def _sizes(conv: Conv, x: tuple[int, ...], y: tuple[int, ...], w: tuple[int, ...]) -> Sizes:
    """Groups of fewer than 16 channels are read as they are, unless each has a single channel."""
    whole = conv.groups == 1 or conv.groups == conv.channels or (conv.channels // conv.groups) % BLOCK == 0
    blocks = [_in_blocks(s) if whole else prod(s) for s in (x, y)]
    narrow = whole and conv.groups == 1 and x[1] < BLOCK
    return Sizes(prod(x), prod(y), blocks[0], blocks[1], 0 if narrow else blocks[0], prod(w))


def _in_blocks(shape: tuple[int, ...]) -> int:
    n, c, *rows = shape
    return n * -(-c // BLOCK) * BLOCK * prod(rows)
