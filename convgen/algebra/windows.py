"""The rows of a window that a rank holds for a local convolution that pads both sides alike, as ATen's do.

Kernels that pad virtually take any window. Others take one padding a dimension and ignore up to S-1 rows that no
output row reads; where one padding doesn't do, the rank holds the window in a *frame* with rows of zeros. x is what
taps read, y what reads it; intervals are half-open, in rows, of integers or of arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convgen.algebra.blocks import Number, plain
from convgen.algebra.relations import ReadBy, Relation, Taps


def edge_padding(t: Taps, x_lo: Number, x_hi: Number, y_lo: Number, y_hi: Number) -> tuple[Number, Number]:
    """Zero rows below and above input rows `[x_lo, x_hi)` for a convolution onto output rows `[y_lo, y_hi)`.

    Negative where the input has rows that this output never reads.
    """
    return x_lo - (y_lo * t.stride - t.pad), (y_hi - 1) * t.stride - t.pad + t.reach + 1 - x_hi


def fits_one_padding(t: Taps, below: Number, above: Number) -> Any:
    """Whether a convolution with padding `below` on both sides has exactly these output rows."""
    return (below >= 0) & (below - above >= 0) & (below - above < t.stride)


def output_frame(t: Taps, lo: Number, hi: Number) -> tuple[Number, Number]:
    """The window of `ReadBy`, widened by the fewest rows that let one padding serve both sides.

    The added rows hold zeros; what they contribute falls outside `[lo, hi)`.
    """
    start, end = ReadBy(t).window(lo, hi)
    below, above = edge_padding(t, lo, hi, start, end)
    wanted: Any = np.maximum(above, 0)
    rows: Any = np.maximum(-((below - wanted) // t.stride), 0)
    start, below = start - rows, below + rows * t.stride
    end = end + np.maximum((below - above) // t.stride, 0)
    return plain(start), plain(np.where(hi > lo, end, start))


def frame(relation: Relation, lo: Number, hi: Number) -> tuple[Number, Number]:
    """Rows that a rank holds of a window, zeros included."""
    return output_frame(relation.taps, lo, hi) if isinstance(relation, ReadBy) else relation.window(lo, hi)


def padding_of(
    relation: Relation, own: tuple[Number, Number], index: tuple[Number, Number]
) -> tuple[Taps, Number, Number] | None:
    """Taps, and zero rows below and above, of a convolution between rows `own` and the block `index` that reads them.

    None for relations that no convolution has.
    """
    match relation:
        case Taps():
            return relation, *edge_padding(relation, *own, *index)
        case ReadBy():
            return relation.taps, *edge_padding(relation.taps, *index, *own)
        case _:
            return None
