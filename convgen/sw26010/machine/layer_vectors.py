"""Vector instructions of layers between convolutions: element by element, sums over channels and samples, losses.

A register that is sent to other CPEs is the first row of a buffer of 1 x 4 doubles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.machine import transfers
from convgen.sw26010.machine.core_group import LANES
from convgen.sw26010.machine.faults import DmaFault
from convgen.sw26010.machine.ldm import Buffer
from convgen.sw26010.machine.vectors import Vectors

Array = NDArray[Any]
MERGE_VADD, MERGE_FUNCTIONS = 6, 1  # of two parts' moments


class LayerVectors(Vectors):
    """The vector unit, with what layers between convolutions need of it."""

    # Element by element.
    def relu(self, into: Buffer, x: Buffer) -> None:
        """into = max(x, 0)."""
        self._made(into, np.maximum(x.doubles(), 0.0))
        self.counts.vmax += transfers.vectors(into)

    def relu_backward(self, into: Buffer, x: Buffer, dy: Buffer) -> None:
        """into = dy where x > 0, else 0."""
        self._made(into, np.where(x.doubles() > 0, dy.doubles(), 0.0))
        self.counts.vmax += transfers.vectors(into)

    def add(self, into: Buffer, one: Buffer, other: Buffer) -> None:
        """into = one + other."""
        self._made(into, one.doubles() + other.doubles())
        self.counts.vadd += transfers.vectors(into)

    def times(self, into: Buffer, x: Buffer, factor: float) -> None:
        """into = factor x."""
        self._made(into, factor * x.doubles())
        self.counts.vadd += transfers.vectors(into)

    def masked(self, into: Buffer, x: Buffer, mask: Buffer, factor: float) -> None:
        """into = factor mask x."""
        self._made(into, factor * mask.doubles() * x.doubles())
        self.counts.vadd += 2 * transfers.vectors(into)

    def sgd(self, w: Buffer, g: Buffer, rate: float, decay: float) -> None:
        """w = w - rate (g + decay w)."""
        w.doubles()[...] -= rate * (g.doubles() + decay * w.doubles())
        self.counts.vadd += 2 * transfers.vectors(w)

    def momentum(self, w: Buffer, v: Buffer, g: Buffer, rate: float, momentum: float, decay: float) -> None:
        """v = momentum v + g + decay w; w = w - rate v."""
        v.doubles()[...] = momentum * v.doubles() + (g.doubles() + decay * w.doubles())
        w.doubles()[...] -= rate * v.doubles()
        self.counts.vadd += 3 * transfers.vectors(w)

    # Registers that CPEs send each other.
    def register(self, buffer: Buffer, at: int = 0) -> Array:
        """Four neighbours of the first row of a buffer, ready to be sent."""
        return buffer.doubles()[0, at : at + LANES].copy()

    def add_register(self, into: Buffer, message: Array, at: int = 0) -> None:
        """into[0, at : at + 4] += message."""
        into.doubles()[0, at : at + LANES] += message
        self.counts.vadd += 1

    def merge(self, into: Buffer, moments: Array) -> None:
        """into = the moments (count, mean, sum of squared deviations) of both parts together.

        Source: Chan, Golub and LeVeque 1979, Eqs. 2.1.
        """
        mine = into.doubles()[0]
        count = mine[0] + moments[0]
        if moments[0]:
            delta = moments[1] - mine[1]
            mine[2] += moments[2] + delta * delta * (mine[0] * moments[0] / count)
            mine[1] += delta * (moments[0] / count)
            mine[0] = count
        self.counts.vadd += MERGE_VADD
        self.counts.functions += MERGE_FUNCTIONS

    # Sums over a channel, of the first `elements` of a line.
    def add_moments(self, sums: Buffer, x: Buffer, elements: int) -> None:
        """Merge the moments of the line into those in sums; a pass makes the mean, another the deviations."""
        line = x.doubles()[0, :elements]
        mean = line.sum() / elements
        self.merge(sums, np.array((elements, mean, np.square(line - mean).sum())))
        self.counts.vadd += 3 * -(-elements // LANES)
        self.counts.functions += 1

    def add_products(self, sums: Buffer, dy: Buffer, x: Buffer, mean: Buffer, elements: int) -> None:
        """sums[0, :2] += sum of dy, sum of dy (x - mean)."""
        line, gradient = x.doubles()[0, :elements], dy.doubles()[0, :elements]
        sums.doubles()[0, :2] += (gradient.sum(), (gradient * (line - mean.doubles()[0, 0])).sum())
        self.counts.vadd += 3 * -(-elements // LANES)

    def add_total(self, sums: Buffer, x: Buffer, elements: int) -> None:
        """sums[0, 0] += sum of x."""
        sums.doubles()[0, 0] += x.doubles()[0, :elements].sum()
        self.counts.vadd += -(-elements // LANES)

    # Results of a channel's elements and its factors.
    def normalised(self, into: Buffer, x: Buffer, factors: Buffer) -> None:
        """into = a (x - mean) + h, of factors a, mean, h."""
        a, mean, h = factors.doubles()[0]
        self._made(into, a * (x.doubles() - mean) + h)
        self.counts.vadd += 2 * transfers.vectors(into)

    def combined(self, into: Buffer, x: Buffer, dy: Buffer, factors: Buffer) -> None:
        """into = a dy + p (x - mean) + q, of factors a, p, mean, q."""
        a, p, mean, q = factors.doubles()[0]
        self._made(into, a * dy.doubles() + p * (x.doubles() - mean) + q)
        self.counts.vadd += 3 * transfers.vectors(into)

    def shifted(self, into: Buffer, x: Buffer, factors: Buffer) -> None:
        """into = x + b, of the factor b."""
        self._made(into, x.doubles() + factors.doubles()[0, 0])
        self.counts.vadd += transfers.vectors(into)

    # Rows of several samples in a tile.
    def add_rows(self, into: Buffer, x: Buffer) -> None:
        """into[0] += sum of the rows of x."""
        into.doubles()[0] += x.doubles().sum(axis=0)
        self.counts.vadd += transfers.vectors(x)

    def shift_rows(self, into: Buffer, x: Buffer, b: Buffer) -> None:
        """Every row of into = that of x + b."""
        self._made(into, x.doubles() + b.doubles())
        self.counts.vadd += transfers.vectors(into)

    # Local response normalisation: channels are rows. Row r of the result is row lead + r of x.
    def response(self, y: Buffer, x: Buffer, lead: int, window: tuple[int, int], k: float, a: float, b: float) -> None:
        """y = x (k + a sum of x^2 over channels r - lo to r + hi)^-b; `window` is (lo, hi)."""
        rows = slice(lead, lead + y.rows)
        scale = k + a * _along(np.square(x.doubles()), window)[rows]
        with np.errstate(divide="ignore", invalid="ignore"):  # k = 0: as infinite as it is
            self._made(y, x.doubles()[rows] * scale**-b)
        self.counts.vadd += (sum(window) + 3) * transfers.vectors(y)
        self.counts.functions += y.rows * y.columns

    def response_backward(
        self, dx: Buffer, x: Buffer, dy: Buffer, ratio: Buffer, lead: int, window: tuple[int, int], k: float, a: float,
        b: float,
    ) -> None:  # fmt: skip
        """dx = dy s^-b - 2 a b x (sum of dy x s^(-b - 1) over the windows that have x); `ratio` holds the addends."""
        lo, hi = window
        if not x.array.shape == dy.array.shape == ratio.array.shape:
            raise DmaFault(f"x, dy and ratio have {x.rows}, {dy.rows} and {ratio.rows} channels")
        rows = slice(lead, lead + dx.rows)
        scale = k + a * _along(np.square(x.doubles()), window)
        with np.errstate(divide="ignore", invalid="ignore"):
            power = scale**-b
            self._made(ratio, dy.doubles() * x.doubles() * power / scale)
            direct = dy.doubles()[rows] * power[rows]
        self._made(dx, direct - 2 * a * b * x.doubles()[rows] * _along(ratio.doubles(), (hi, lo))[rows])
        self.counts.vadd += (lo + hi + 5) * transfers.vectors(x) + (lo + hi + 4) * transfers.vectors(dx)
        self.counts.functions += 2 * x.rows * x.columns

    # The softmax of a row of scores, and its cross entropy with the label's class.
    def softmax_loss(self, x: Buffer, loss: Buffer, label: Buffer, ignore: int) -> None:
        """Add the loss log(sum of exp(x)) - x[label] to loss[0, 0] and 1 to loss[0, 1]; x becomes its softmax.

        Where the label is `ignore` nothing is added.

        Raises:
            InputError: the label is no class.
        """
        scores, at = x.doubles()[0], _class(x, label, ignore)
        away = scores - scores.max()
        powers = np.exp(away)
        if at is not None:
            loss.doubles()[0, :2] += (np.log(powers.sum()) - away[at], 1.0)
        scores[...] = powers / powers.sum()
        self.counts.vmax += transfers.vectors(x)
        self.counts.vadd += 3 * transfers.vectors(x)
        self.counts.functions += x.columns + 2

    def softmax_loss_backward(self, p: Buffer, label: Buffer, gradient: Buffer, ignore: int) -> None:
        """p becomes gradient * (p - 1) at the label's class, gradient * p elsewhere; zeros if the label is `ignore`."""
        scores, at = p.doubles()[0], _class(p, label, ignore)
        if at is None:
            scores[...] = 0.0
        else:
            scores[at] -= 1
            scores *= gradient.doubles()[0, 0]
        self.counts.vadd += transfers.vectors(p) + 1

    @staticmethod
    def _made(into: Buffer, contents: Array) -> None:
        if contents.shape != into.array.shape:
            raise DmaFault(f"{into.name}{list(into.array.shape)} can't hold a result {list(contents.shape)}")
        into.overwritten()[...] = contents


def _along(rows: Array, window: tuple[int, int]) -> Array:
    """For every row r the sum of the rows r - lo to r + hi that exist."""
    lo, hi = (min(reach, rows.shape[0] - 1) for reach in window)
    found = rows.copy()
    for d in range(1, lo + 1):
        found[d:] += rows[:-d]
    for d in range(1, hi + 1):
        found[:-d] += rows[d:]
    return found


def _class(scores: Buffer, label: Buffer, ignore: int) -> int | None:
    """The label as a number of a class, or None where it is `ignore`. Raises InputError: neither."""
    value = float(label.doubles()[0, 0])
    if value == ignore:
        return None
    if not (value.is_integer() and 0 <= value < scores.columns):
        raise InputError(f"label {value:g} is none of {scores.columns} classes")
    return int(value)
