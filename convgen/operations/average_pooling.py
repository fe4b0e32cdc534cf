"""Means of windows and of cells. They divide by the elements that the whole tensor has in a window, never by those that
a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from convgen.algebra.relations import Ratio, Relation, Taps
from convgen.late import torch
from convgen.operations.linear_maps import LinearMap, of_unit_vectors
from convgen.operations.row import At, empty_as, on_device, read_here, unfit


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

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        if {*self.out} != {1}:
            return super().local(way, at, *operands)
        (x,), whole = operands, prod(self.shape[2:])
        y = x.mean(list(range(2, x.dim())), keepdim=True)
        return (y if (here := prod(x.shape[2:])) == whole else y * (here / whole),)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        if {*self.out} != {1}:
            return super().vjp(way, at, wanted, kept, *dys)
        return ((dys[0] / prod(self.shape[2:])).expand(read_here(at, 0)),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        pool = torch.nn.functional
        pools = (pool.adaptive_avg_pool1d, pool.adaptive_avg_pool2d, pool.adaptive_avg_pool3d)
        return (pools[len(self.out) - 1](operands[0], self.out),)


@dataclass(frozen=True)
class AveragePool(LinearMap):
    """The mean of each window of x[N, C, rows...], divided by the elements that the *whole* tensor has in it.

    Attributes:
        taps: without dilation.
        out: rows made; with ceil_mode the last window may leave the padding.
        count_include_pad: whether padding counts; rows beyond the padding never do.
        divisor: a number to divide by instead of any count, in two and three dimensions.
    """

    shape: tuple[int, ...]
    taps: tuple[Taps, ...]
    out: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    @property
    def joins(self) -> bool:
        return True

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.out, 2))

    def relation(self, d: int) -> Relation:
        return self.taps[d - 2]

    def counts(self, d: int) -> tuple[int, ...]:
        """The number by which each row's window divides along a dimension."""
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
        """ATen's pooling over windows filled with zeros; its divisors are exchanged for those of the whole."""
        if way == 1:
            return super().local(way, at, *operands)
        pool = torch.nn.functional
        pools = (pool.avg_pool1d, pool.avg_pool2d, pool.avg_pool3d)
        kernel, stride = [t.kernel for t in self.taps], [t.stride for t in self.taps]
        y = pools[len(self.out) - 1](at.wished(0, operands[0]), kernel, stride)
        for factor in self._factors(at, y):
            y = y * factor
        return (y,)

    def _factors(self, at: At, y: Any) -> list[Any]:
        """Factors that exchange ATen's divisors for those of the whole."""
        if self.divisor is not None:
            return [prod(t.kernel for t in self.taps) / self.divisor]
        found: list[Any] = []
        for d, t in enumerate(self.taps, 2):
            counts = on_device(tuple(self.counts(d)[slice(*at.blocks[f"d{d}"])]), y.dtype, y.device)
            found.append((t.kernel / counts).view(-1, *[1] * (y.dim() - 1 - d)))
        return found

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        if way == 1:
            return super().vjp(way, at, wanted, kept, *dys)
        (dy,), aten, shape = dys, torch.ops.aten, [hi - lo for lo, hi in at.windows[0]]
        for factor in reversed(self._factors(at, dy)):
            dy = dy * factor
        kernel, stride = [t.kernel for t in self.taps], [t.stride for t in self.taps]
        if len(self.out) == 1:  # ATen pools these as images of one row
            dy, shape, kernel, stride = dy.unsqueeze(-2), [*shape[:2], 1, shape[2]], [1, *kernel], [1, *stride]
        back = aten.avg_pool3d_backward if len(self.out) == 3 else aten.avg_pool2d_backward
        zeros = [0] * len(kernel)
        dx = back(dy, empty_as(dy, shape), kernel, stride, zeros, False, True, None)
        return (unfit(dx.squeeze(-2) if len(self.out) == 1 else dx, at.inside[0], at.windows[0]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's pooling of the whole."""
        kernel, stride, padding = ([getattr(t, side) for t in self.taps] for side in ("kernel", "stride", "pad"))
        settings = (kernel, stride, padding, self.ceil_mode, self.count_include_pad)
        pool = torch.nn.functional
        if len(self.out) == 1:
            return (pool.avg_pool1d(operands[0], *settings),)
        return ((pool.avg_pool2d, pool.avg_pool3d)[len(self.out) - 2](operands[0], *settings, self.divisor),)
