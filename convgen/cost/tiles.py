"""What share of whole tiles' rate a GPU reaches, by the extents that a rank convolves.

A kernel (convgen/kernels) makes a product of rows and columns, which are pixels, filters and channels as the phase has
it, tile by tile: a program makes a tile, or a piece of one, on a processor. A small block loses what is multiplied
beyond the edges of tiles, processors without a program in the last wave, time to read what narrow tiles need, and time
to add where several programs share a tile. The best tiles and numbers of programs are taken, so that time never falls
where an extent grows, and so many times the pixels never take longer than so many launches.

What memory and a launch take at least is not in it: prices have both (model.py, rows.py). Constants are fitted to the
bounds of compiled kernels (convgen/kernels/bound.py): bench/tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, isqrt, sqrt
from typing import Any

import numpy as np

DEEP = 16  # channels, filters or pixels that one step of a kernel sums over
WIDTHS = (16, 32, 64, 128, 256)
SIDES = tuple((m, n) for m in WIDTHS for n in WIDTHS if max(m, n) >= 64 and m * n <= 1 << 15)
ROWS, COLUMNS = (np.array(side, dtype=np.float64)[:, None] for side in zip(*SIDES, strict=True))
MADE = ROWS * COLUMNS
BESIDE = 4  # pixels side by side that are columns together where filters or channels are few
# Programs that share a tile: of activations, and of filters, whose pixels are cut into pieces.
FEW = (1, 2, 3, 4, 6, 8)
MANY = tuple(sorted({round(2 ** (k / 6)) for k in range(49)}))
PLAIN = 16  # products of matrix units in the time of one product without them, as groups of one channel have
PLAIN_MADE = 1024  # elements that a program without matrix units makes
BUNCH = 8  # pieces of a tile that are added at once; more are added bunch by bunch (convgen/kernels/sharing.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A device's numbers. A step of a tile of m rows and n columns takes m*n products, or `reading` * (m + n) if more.

    Attributes:
        processors: how many the device has.
        reading: products in whose time a processor reads an element of a step's operands.
        adding: products in whose time a processor adds an element of a piece that another program has summed.
    """

    processors: int
    reading: float
    adding: float

    def share(self, phase: str, shape: tuple[float, ...], rate: float = 1.0) -> float:
        """The share of the rate of whole tiles that fill the device: above 0, at most 1.

        Args:
            shape: channels and filters of a group, taps, pixels of y, groups, step (the product of the strides).
            rate: the rate of the type's products over the fastest type's; adding takes as long for all types.
        """
        return _share(self, phase, shape, rate)


@lru_cache(maxsize=1 << 15)
def _share(tiles: Tiles, phase: str, shape: tuple[float, ...], rate: float) -> float:
    channels, filters, taps, pixels, groups, step = map(float, shape)
    pieces, summed = _pieces(MANY if phase == "backward_filter" else FEW)
    least = inf
    for rows, columns, steps in _products(phase, channels, filters, taps, pixels, step):
        programs = np.ceil(rows / ROWS) * np.ceil(columns / COLUMNS) * groups * pieces
        each = np.ceil(steps / pieces) * DEEP * np.maximum(MADE, tiles.reading * (ROWS + COLUMNS))
        busy = np.ceil(programs / tiles.processors) * (each + tiles.adding * rate * MADE * summed)
        least = min(least, float(busy.min()))
    made, over = _plain(phase, channels, filters, taps, pixels, step)
    programs = ceil(made * groups / PLAIN_MADE) * pieces
    each = np.ceil(over / pieces) * PLAIN + tiles.adding * rate * summed
    least = min(least, PLAIN_MADE * float((np.ceil(programs / tiles.processors) * each).min()))
    return min(1.0, channels * filters * taps * pixels * groups / (tiles.processors * least))


def _products(
    phase: str, channels: float, filters: float, taps: float, pixels: float, step: float
) -> Iterator[tuple[float, float, float]]:
    """Rows, columns and steps of DEEP of each product that a phase may be computed as."""
    if phase == "backward_filter":
        yield filters, taps * channels, float(ceil(pixels / DEEP))
        return
    columns, over = (filters, channels) if phase == "forward" else (channels, filters)
    rows = pixels
    if phase == "backward_data":  # rows of x with one remainder by the stride have own taps; or they are channels, too
        busy = min(taps, step)
        rows, taps = pixels * busy, float(ceil(taps / busy))
        yield pixels, columns * step, _deep(taps, over)
    yield rows, columns, _deep(taps, over)
    # Pixels side by side as columns, with a square window: a tap that one of them reads and another doesn't is zero
    # there.
    yield float(ceil(rows / BESIDE)), columns * BESIDE, _deep(taps + (BESIDE - 1) * sqrt(taps), over)


def _plain(phase: str, channels: float, filters: float, taps: float, pixels: float, step: float) -> tuple[float, float]:
    """Elements that a group makes, and products for each of them."""
    if phase == "backward_filter":
        return taps * channels * filters, pixels
    if phase == "forward":
        return pixels * filters, taps * channels
    return pixels * step * channels, ceil(taps / step) * filters


def _deep(taps: float, summed: float) -> float:
    """Steps of DEEP that a program sums over, tap by tap; where channels are few, taps lie side by side."""
    return float(min(ceil(taps) * ceil(summed / DEEP), 2 * ceil(taps * summed / DEEP)))


@lru_cache(maxsize=2)
def _pieces(counts: tuple[int, ...]) -> tuple[Any, Any]:
    """Numbers of pieces that a sum is cut into, and how many of these a tile's last program adds."""
    return np.array([counts], dtype=np.float64), np.array([[_added(n) for n in counts]], dtype=np.float64)


def _added(count: int) -> int:
    if count <= BUNCH:
        return count if count > 1 else 0
    each = isqrt(count - 1) + 1
    return each + ceil(count / each)
