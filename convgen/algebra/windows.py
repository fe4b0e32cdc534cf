"""Which rows of the other tensor a block of rows needs, along one spatial dimension.

Stride S, dilation d, kernel K, padding P_lo, P_hi. Output row o reads the input rows o*S - P_lo + d*k for
k in [0, K). Everything follows from that line: never derive a halo from K//2. Half-open intervals, in rows;
they may leave the tensor, and the excess is zero padding. Works on integers and on arrays alike.

Source: Dumoulin & Visin, arXiv:1603.07285, section 4 (the relation); [SP] III-A is the case S=1, d=1, odd K, P=K//2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convgen.algebra.blocks import Number, plain
from convgen.algebra.conv import Spatial


def input_window(s: Spatial, lo: Number, hi: Number) -> tuple[Number, Number]:
    """Input rows that output rows `[lo, hi)` read, padding included; empty for no rows.

    Example:
        >>> input_window(Spatial("H", 56, kernel=3, pad_lo=1, pad_hi=1), 28, 56)
        (27, 57)
    """
    start = lo * s.stride - s.pad_lo
    end = (hi - 1) * s.stride - s.pad_lo + s.reach + 1
    return plain(start), plain(np.where(hi > lo, end, start))


def output_window(s: Spatial, lo: Number, hi: Number) -> tuple[Number, Number]:
    """Output rows that read some input row of `[lo, hi)`, tensor edges not considered; possibly none.

    Example:
        >>> output_window(Spatial("H", 56, kernel=3, stride=2, pad_lo=1, pad_hi=1), 28, 56)
        (14, 29)
    """
    start = -((s.reach - lo - s.pad_lo) // s.stride)
    end = (hi - 1 + s.pad_lo) // s.stride + 1
    return plain(start), plain(np.where(hi > lo, end, start))


def edge_padding(s: Spatial, x_lo: Number, x_hi: Number, y_lo: Number, y_hi: Number) -> tuple[Number, Number]:
    """Zero rows below and above input rows `[x_lo, x_hi)` for a convolution onto output rows `[y_lo, y_hi)`.

    Negative where the input has rows that this output never reads.
    """
    return x_lo - (y_lo * s.stride - s.pad_lo), (y_hi - 1) * s.stride - s.pad_lo + s.reach + 1 - x_hi


def fits_one_padding(s: Spatial, below: Number, above: Number) -> Any:
    """Whether a convolution with padding `below` on both sides has exactly these output rows.

    ATen pads both sides alike and ignores up to S-1 rows that no output row reaches.
    """
    return (below >= 0) & (below - above >= 0) & (below - above < s.stride)


def output_frame(s: Spatial, lo: Number, hi: Number) -> tuple[Number, Number]:
    """`output_window`, widened by the fewest rows that let one padding serve both sides.

    The rows added hold zeros; what they contribute falls outside `[lo, hi)`.
    """
    start, end = output_window(s, lo, hi)
    below, above = edge_padding(s, lo, hi, start, end)
    wanted: Any = np.maximum(above, 0)
    rows: Any = np.maximum(-((below - wanted) // s.stride), 0)
    start, below = start - rows, below + rows * s.stride
    end = end + np.maximum((below - above) // s.stride, 0)
    return plain(start), plain(np.where(hi > lo, end, start))
