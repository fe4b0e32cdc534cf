"""Measurements of a machine where the model's few numbers don't suffice: collectives, and convolutions by shape.

Both correct the model instead of replacing it. A collective takes its modelled seconds times a factor, measured for its
kind, its group and its bytes. A convolution reaches the share of the peak that convolutions of like shapes reach.
Values between measurements are interpolated, values beyond are those of the nearest; but a collective with more bytes
than any that was measured saves no more seconds on the model than the largest one did, as links get no faster.

Source: convolutions are interpolated by simple kriging (N. Cressie, Statistics for Spatial Data, section 3.2): the
estimate of least variance, where logarithms of efficiencies are the more alike the nearer the shapes are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from convgen.algebra.redistribute import Kind

PHASES = ("forward", "backward_data", "backward_filter")
ALIKE = 16.0  # doublings between shapes at which efficiencies correlate by 1/e; found by leaving out each probe
NOISE = 0.1  # standard deviation of a measurement, over that of efficiencies
CLOSE, JUMP = 1.5, 2.0  # more than JUMP times as far off the model, at most CLOSE times the bytes: another way begins
BLOCK = 1 << 16  # most bytes to another rank that go a way of their own (templates/runtime/transport.py)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A kind of collective as modules run it.

    Attributes:
        ranks: how many the group has.
        bytes: what a rank sends, ascending.
        over_model: for each of these, measured over modelled seconds.
    """

    kind: Kind
    ranks: int
    bytes: tuple[float, ...]
    over_model: tuple[float, ...]

    @cached_property
    def short_bytes(self) -> float:
        """Bytes up to which it goes a quicker way: few bytes more take several times as long; 0 where there is none."""
        sent = float(BLOCK * (self.ranks - 1))
        jumps = [sent if n <= sent < more else n for (n, f), (more, other) in self._pairs if _jumps(n, f, more, other)]
        return max(jumps, default=0.0)

    @property
    def _pairs(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        return list(pairwise(zip(self.bytes, self.over_model, strict=True)))

    def at(self, sent_bytes: float) -> float:
        """Measured over modelled seconds at so many bytes; interpolated in logarithms, but where a quicker way ends."""
        most, last = self.bytes[-1], self.over_model[-1]
        if sent_bytes > most and last < 1:
            return 1 - (1 - last) * most / sent_bytes
        for (low, below), (high, above) in self._pairs:
            if low <= sent_bytes <= high:
                if _jumps(low, below, high, above):
                    return below if sent_bytes <= self.short_bytes else above
                part = math.log(sent_bytes / low) / math.log(high / low)
                return math.exp(math.log(below) + (math.log(above) - math.log(below)) * part)
        return self.over_model[0] if sent_bytes < self.bytes[0] else last


def _jumps(low: float, below: float, high: float, above: float) -> bool:
    return high < CLOSE * low and above > JUMP * below


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measured convolution of one rank.

    Attributes:
        channels, filters: in a group. taps: in a window. pixels: of y, over all samples.
        step: the product of the strides: pixels of x for one of y.
        efficiency: share of the peak that forward, backward-data and backward-filter reach.
    """

    channels: int
    filters: int
    taps: int
    pixels: int
    groups: int = 1
    step: int = 1
    efficiency: tuple[float, float, float]

    @property
    def shape(self) -> tuple[float, ...]:
        return self.channels, self.filters, self.taps, self.pixels, self.groups, self.step


@lru_cache(maxsize=1 << 14)
def over_model(misfits: tuple[Misfit, ...], kind: Kind, ranks: int, sent_bytes: float) -> float:
    """Measured over modelled seconds of a collective; 1 where its kind was not measured."""
    found = measured_as(misfits, kind, ranks)
    return 1.0 if found is None else found.at(sent_bytes)


@lru_cache(maxsize=1 << 10)
def measured_as(misfits: tuple[Misfit, ...], kind: Kind, ranks: int) -> Misfit | None:
    """The measurement of a kind of collective whose number of ranks is nearest to this one; None where none was
    made."""
    same = [m for m in misfits if m.kind == kind]
    return min(same, key=lambda m: abs(math.log(m.ranks / ranks)), default=None)


@lru_cache(maxsize=1 << 14)
def efficiency_like(probes: tuple[Probe, ...], phase: str, shape: tuple[float, ...]) -> float:
    """The share of the peak at a shape, estimated from all probes; between the least and the most of them.

    Args:
        shape: channels and filters of a group, taps, pixels, groups, step.
    """
    mean, weights = _kriged(probes, phase)
    place = PHASES.index(phase)
    found = math.exp(mean + sum(w * _alike(p.shape, shape) for w, p in zip(weights, probes, strict=True)))
    measured = [p.efficiency[place] for p in probes]
    return min(max(found, min(measured)), max(measured))


def left_out(probes: tuple[Probe, ...], phase: str) -> tuple[float, ...]:
    """For each probe its share of the peak as the other probes estimate it, over the measured one."""
    place = PHASES.index(phase)
    rests = [(p, probes[:i] + probes[i + 1 :]) for i, p in enumerate(probes)]
    return tuple(efficiency_like(rest, phase, p.shape) / p.efficiency[place] for p, rest in rests if rest)


@lru_cache(maxsize=1 << 6)
def _kriged(probes: tuple[Probe, ...], phase: str) -> tuple[float, tuple[float, ...]]:
    """The mean of the logarithms of efficiency, and each probe's weight in the estimate."""
    logs = [math.log(p.efficiency[PHASES.index(phase)]) for p in probes]
    mean = sum(logs) / len(logs)
    alike = np.array([[_alike(p.shape, q.shape) for q in probes] for p in probes], dtype=np.float64)
    weights: Any = np.linalg.solve(alike + NOISE**2 * np.eye(len(probes)), np.array(logs) - mean)
    return mean, tuple(map(float, weights))


def _alike(a: Sequence[float], b: Sequence[float]) -> float:
    return math.exp(-sum(abs(math.log2(max(m, 1.0) / max(n, 1.0))) for m, n in zip(a, b, strict=True)) / ALIKE)
