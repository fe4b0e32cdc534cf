"""Means of windows and of cells. They divide by what the whole has of a window, never by what a rank holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from convgen.algebra.relations import Ratio, Relation, Taps
from convgen.late import torch
from convgen.operations.linear_maps import LinearMap, of_unit_vectors
from convgen.operations.row import At, on_device


@dataclass(frozen=True)
class AdaptiveAveragePool(LinearMap):
    """Row o of `out` is the mean of the rows [floor(o*H/out), ceil((o+1)*H/out)) of x[N, C, rows...]."""

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.out, 2))

    def relation(self, d: int) -> Relation:
        return Ratio(self.shape[d], self.out[d - 2])

    def matrix(self, d: int) -> Any:
        return of_unit_vectors(lambda x: torch.adaptive_avg_pool1d(x, [self.out[d - 2]]), self.shape[d])

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        pool = torch.nn.functional
        pools = (pool.adaptive_avg_pool1d, pool.adaptive_avg_pool2d, pool.adaptive_avg_pool3d)
        return (pools[len(self.out) - 1](operands[0], self.out),)


@dataclass(frozen=True)
class AveragePool(LinearMap):
    """The mean of each window of x[N, C, rows...], divided by what the *whole* has of it.

    Attributes:
        taps: without dilation.
        out: rows made; with ceil_mode the last window may leave the padding.
        count_include_pad: padding counts, and what lies behind it doesn't.
        divisor: instead of any count, in two and three dimensions.
    """

    shape: tuple[int, ...]
    taps: tuple[Taps, ...]
    out: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.out, 2))

    def relation(self, d: int) -> Relation:
        return self.taps[d - 2]

    def counts(self, d: int) -> tuple[int, ...]:
        """What row o's window divides by along a dimension."""
        t, n, found = self.taps[d - 2], self.shape[d], list[int]()
        for o in range(self.out[d - 2]):
            lo, hi = t.window(o, o + 1)
            hi = min(hi, n + t.pad)
            found.append(hi - lo if self.count_include_pad else min(hi, n) - max(lo, 0))
        return tuple(found)

    def matrix(self, d: int) -> Any:
        t = self.taps[d - 2]
        matrix = torch.zeros(self.out[d - 2], self.shape[d], dtype=torch.float64)
        for o, count in enumerate(self.counts(d)):
            lo, hi = t.window(o, o + 1)
            matrix[o, max(lo, 0) : max(hi, 0)] = 1 / (count if self.divisor is None else t.kernel)
        if self.divisor is not None and d == 2:
            matrix *= prod(u.kernel for u in self.taps) / self.divisor
        return matrix

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """ATen's own over windows filled with zeros, its divisors exchanged for those of the whole."""
        if way == 1:
            return super().local(way, at, *operands)
        pool = torch.nn.functional
        pools = (pool.avg_pool1d, pool.avg_pool2d, pool.avg_pool3d)
        kernel, stride = [t.kernel for t in self.taps], [t.stride for t in self.taps]
        y = pools[len(self.out) - 1](at.wished(0, operands[0]), kernel, stride)
        if self.divisor is not None:
            return (y * (prod(kernel) / self.divisor),)
        for d, t in enumerate(self.taps, 2):
            counts = on_device(tuple(self.counts(d)[slice(*at.blocks[f"d{d}"])]), y.dtype, y.device)
            y = y * (t.kernel / counts).view(-1, *[1] * (y.dim() - 1 - d))
        return (y,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's own, of the whole."""
        kernel, stride, padding = ([getattr(t, side) for t in self.taps] for side in ("kernel", "stride", "pad"))
        settings = (kernel, stride, padding, self.ceil_mode, self.count_include_pad)
        pool = torch.nn.functional
        if len(self.out) == 1:
            return (pool.avg_pool1d(operands[0], *settings),)
        return ((pool.avg_pool2d, pool.avg_pool3d)[len(self.out) - 2](operands[0], *settings, self.divisor),)
