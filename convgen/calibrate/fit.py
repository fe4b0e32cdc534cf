"""Latency and rate of messages from their times: seconds = latency + bytes / rate.

Least squares of the relative error, so that messages of 64 bytes count as much as those of 16 MiB; latency and 1/rate
are not negative.

Source: the model is [TRG] section 3's; non-negative least squares are Lawson and Hanson's, by SciPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from convgen.errors import InputError

ENOUGH_SIZES = 3
_LONGER = "--seconds with a larger number, on a machine that does nothing else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A line through times of messages.

    Attributes:
        median_error, worst_error: of the sizes, |line - measured| / measured.
    """

    latency_s: float
    bytes_per_s: float
    median_error: float
    worst_error: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


def fit_line(sizes: Sequence[int], seconds: Sequence[float], what: str) -> Fit:
    """The line of least relative error.

    Args:
        sizes: bytes of the messages.
        seconds: what each message took, in the same order.
        what: the messages, for errors.
    Raises:
        InputError: fewer than three sizes, not a time for each, times not above 0, or none that grow with the size.
    """
    n, t = np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64)
    if len(n) != len(t):
        raise InputError(f"{what}: {len(n)} sizes and {len(t)} times", hint="a time for every size")
    if len(set(sizes)) < ENOUGH_SIZES:
        raise InputError(f"{what}: {len(set(sizes))} sizes, a line needs {ENOUGH_SIZES}", hint=_LONGER)
    if not (np.isfinite(t) & (t > 0) & (n > 0)).all():
        wrong = int(np.flatnonzero(~(np.isfinite(t) & (t > 0) & (n > 0)))[0])
        raise InputError(f"{what}: {sizes[wrong]} bytes took {seconds[wrong]:g} s", hint="times and sizes above 0")
    optimize: Any = import_module("scipy.optimize")  # it ships no types
    largest = n.max()  # sizes are divided by it, so that both columns are of one order of magnitude
    (latency, slope), _ = optimize.nnls(np.stack([1 / t, n / largest / t], axis=1), np.ones_like(t))
    if slope <= 0:
        raise InputError(
            f"{what}: times don't grow with the size; {n.min():.0f} bytes took {t[n.argmin()]:.3g} s, "
            f"{n.max():.0f} bytes {t[n.argmax()]:.3g} s",
            hint=_LONGER,
        )
    error = np.abs(latency + slope * n / largest - t) / t
    return Fit(
        latency_s=float(latency),
        bytes_per_s=float(largest / slope),
        median_error=float(np.median(error)),
        worst_error=float(error.max()),
    )
