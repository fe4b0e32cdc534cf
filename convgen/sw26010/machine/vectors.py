"""Vector instructions of one CPE on its LDM: what they compute, and what they count."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine import transfers
from convgen.sw26010.machine.core_group import LANES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.ldm import Buffer

Array = NDArray[Any]


class Taps(NamedTuple):
    """Square windows over planes of `columns` columns, `outs` of them side by side."""

    kernel: int
    stride: int
    padding: int
    columns: int
    outs: int


def windows_of(plane: Array, taps: Taps, first: int, out: int, outs: int, outside: float) -> Array:
    """The windows of y's rows [out, out + outs), [outs, taps.outs, K, K]. `plane` has x's rows from `first` on;
    elements beside x are `outside`."""
    top = out * taps.stride - taps.padding
    down = (outs - 1) * taps.stride + taps.kernel
    across = (taps.outs - 1) * taps.stride + taps.kernel
    wide = np.full((down, max(across, taps.padding + taps.columns)), outside)
    wide[first - top : first - top + plane.shape[0], taps.padding : taps.padding + taps.columns] = plane
    seen = np.lib.stride_tricks.sliding_window_view(wide[:, :across], (taps.kernel, taps.kernel))
    return seen[:: taps.stride, :: taps.stride]


class Vectors:
    """The vector unit: buffers in, buffers out, 4 lanes of doubles an instruction."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.cycles: int = 0

    def zero(self, buffer: Buffer, floats: bool = False) -> None:
        """Zeros, as doubles or as floats."""
        buffer.overwritten(floats=floats)[...] = 0.0

    def widen(self, buffer: Buffer) -> None:
        transfers.widen(self.counts, buffer, 1)

    def narrow(self, buffer: Buffer) -> None:
        transfers.narrow(self.counts, buffer, 1)

    def transpose(self, into: Buffer, source: Buffer) -> None:
        transfers.transpose(self.counts, into, source, 1)

    def pick(self, into: Buffer, source: Buffer, at: int, step: int) -> None:
        """into[0, q] = source[0, at + q step]: a line of a strided window."""
        line = source.settled()[0, at : at + step * (into.columns - 1) + 1 : step]
        into.overwritten(floats=source.floats)[0, :] = line

    def add_line(self, into: Buffer, source: Buffer, at: int, step: int) -> None:
        """into[0, at + q step] += source[0, q], in double."""
        line = source.doubles()[0]
        into.doubles()[0, at : at + step * (line.size - 1) + 1 : step] += line
        self.counts.vadd += -(-line.size // LANES)

    def accumulate(self, into: Buffer, source: Buffer) -> None:
        """into += source, in double; a register a cycle, the loads beside the additions."""
        into.doubles()[...] += source.doubles()
        self.counts.vadd += transfers.vectors(into)
        self.cycles += transfers.vectors(into)

    def pool_max(self, into: Buffer, source: Buffer, kernel: int) -> None:
        """into[r, q] = the largest of the kernel x kernel window (r, q) of the source."""
        into.overwritten()[...] = self._windows(into, source, kernel).max(axis=(1, 3))
        self.counts.vmax += kernel**2 * transfers.vectors(into)

    def pool_average(self, into: Buffer, source: Buffer, kernel: int) -> None:
        """into[r, q] = the mean of the kernel x kernel window (r, q) of the source, in double."""
        into.overwritten()[...] = self._windows(into, source, kernel).sum(axis=(1, 3)) / kernel**2
        self.counts.vadd += kernel**2 * transfers.vectors(into)

    def spread_max(self, into: Buffer, source: Buffer, kernel: int) -> None:
        """In every kernel x kernel window of `into` the first largest element becomes source[r, q], the others zero.

        Two comparisons an element are counted: one finds the window's largest, one tells which element it is.
        """
        rows, columns = source.rows, source.columns
        windows = into.doubles().reshape(rows, kernel, columns, kernel).transpose(0, 2, 1, 3)
        first = windows.reshape(rows, columns, kernel**2).argmax(axis=2)[..., None]
        spread = np.zeros((rows, columns, kernel**2))
        np.put_along_axis(spread, first, source.doubles()[..., None], axis=2)
        into.array[...] = spread.reshape(rows, columns, kernel, kernel).transpose(0, 2, 1, 3).reshape(into.array.shape)
        self.counts.vmax += 2 * kernel**2 * transfers.vectors(source)

    def spread_average(self, into: Buffer, source: Buffer, kernel: int) -> None:
        """Every element of the kernel x kernel window (r, q) of `into` becomes source[r, q] / kernel^2, in double."""
        into.overwritten()[...] = (source.doubles() / kernel**2).repeat(kernel, axis=0).repeat(kernel, axis=1)

    @staticmethod
    def _windows(into: Buffer, source: Buffer, kernel: int) -> Array:
        return source.doubles().reshape(into.rows, kernel, into.columns, kernel)

    # Windows that may overlap. A buffer has several rows, one behind the other in a single line: x's begin with row
    # `first` of the plane, y's with row `out`.
    def window_max(self, into: Buffer, x: Buffer, taps: Taps, first: int, rows: int, out: int, outs: int) -> None:
        """The largest element of every window of y's rows [out, out + outs); padding is never the largest."""
        taps = Taps(*taps)
        plane = x.doubles()[0, : rows * taps.columns].reshape(rows, taps.columns)
        made = windows_of(plane, taps, first, out, outs, -np.inf).max(axis=(2, 3))
        self._line(into, made, taps)
        self.counts.vmax += taps.kernel**2 * -(-made.size // LANES)

    def window_average(self, into: Buffer, x: Buffer, taps: Taps, first: int, rows: int, out: int, outs: int) -> None:
        """The sum of every window divided by kernel^2; padding counts as zeros."""
        taps = Taps(*taps)
        plane = x.doubles()[0, : rows * taps.columns].reshape(rows, taps.columns)
        made = windows_of(plane, taps, first, out, outs, 0.0).sum(axis=(2, 3)) / taps.kernel**2
        self._line(into, made, taps)
        self.counts.vadd += taps.kernel**2 * -(-made.size // LANES)

    def gather_max(
        self, into: Buffer, x: Buffer, dy: Buffer, taps: Taps, first: int, rows: int, out: int, outs: int, at: int,
        lines: int,
    ) -> None:  # fmt: skip
        """dx's rows [at, at + lines): every window's dy is added to the window's first largest element."""
        taps = Taps(*taps)
        plane = x.doubles()[0, : rows * taps.columns].reshape(rows, taps.columns)
        found = windows_of(plane, taps, first, out, outs, -np.inf).reshape(outs, -1, taps.kernel**2)
        inside = windows_of(np.ones_like(plane), taps, first, out, outs, 0.0).reshape(found.shape)
        largest: Array = found.argmax(axis=2)
        padding = np.take_along_axis(inside, largest[..., None], axis=2)[..., 0] == 0  # all that lies inside is -inf
        largest[padding] = inside.argmax(axis=2)[padding]
        row = (out + np.arange(outs))[:, None] * taps.stride - taps.padding + largest // taps.kernel - at
        column: Array = np.arange(taps.outs) * taps.stride - taps.padding + largest % taps.kernel
        self._gather(into, dy, row, column, taps, outs, lines)
        self.counts.vmax += 2 * taps.kernel**2 * -(-largest.size // LANES)

    def gather_average(
        self, into: Buffer, dy: Buffer, taps: Taps, out: int, outs: int, at: int, lines: int
    ) -> None:  # fmt: skip
        """dx's rows [at, at + lines): every window's dy / kernel^2 is added to each of its elements."""
        taps = Taps(*taps)
        across = taps.outs
        row = ((out + np.arange(outs))[:, None] * taps.stride - taps.padding - at)[:, :, None]
        column = (np.arange(across) * taps.stride - taps.padding)[None, :, None]
        tap = np.arange(taps.kernel**2)
        row = np.broadcast_to(row + tap // taps.kernel, (outs, across, tap.size))
        column = np.broadcast_to(column + tap % taps.kernel, (outs, across, tap.size))
        self._gather(into, dy, row, column, taps, outs, lines)
        self.counts.vadd += taps.kernel**2 * -(-outs * across // LANES)

    def _gather(
        self, into: Buffer, dy: Buffer, row: Array, column: Array, taps: Taps, outs: int, lines: int
    ) -> None:  # fmt: skip
        """Add dy to those elements (row, column) of dx that lie in the plane and in the rows that `into` has."""
        share = dy.doubles()[0, : outs * taps.outs].reshape(outs, taps.outs)
        if row.ndim == 3:
            share = (share / taps.kernel**2)[:, :, None]
        inside = (row >= 0) & (row < lines) & (column >= 0) & (column < taps.columns)
        made = np.zeros((lines, taps.columns))
        np.add.at(made, (row[inside], column[inside]), np.broadcast_to(share, row.shape)[inside])
        into.overwritten()[0, : made.size] = made.reshape(-1)

    @staticmethod
    def _line(into: Buffer, made: Array, taps: Taps) -> None:
        into.overwritten()[0, : made.size] = made.reshape(-1)
