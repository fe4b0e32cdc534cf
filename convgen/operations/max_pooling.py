"""Max pooling, by windows of taps and adaptive. Means are linear maps.

Where rows are reduced over ranks, each largest element comes with its place: its gradient goes there alone, and to the
first of equal ones, as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from convgen.algebra.relations import Ratio, Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import (
    At,
    Derived,
    Interval,
    Operation,
    Work,
    empty_as,
    fit,
    numbered,
    numbers,
    own,
    touched,
    unfit,
)


@dataclass(frozen=True)
class MaxPool(Operation):
    """The largest element of each window, from x[N, C, ...] to y[N, C, ...]. Padding is never the largest."""

    shape: tuple[int, ...]
    taps: tuple[Taps, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, out = numbered(len(self.shape)), (*self.shape[:2], *self.out)
        rows = (Made((i,), t) for i, t in zip(names[2:], self.taps, strict=True))
        x, y = Operand("x", self.shape, (*own(*names[:2]), *rows)), Operand("y", out, own(*names))
        return (Signature(tuple(zip(names, out, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        pool = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)[len(self.taps) - 1]
        read, settings = self._how(at)
        return (pool(self._filled(at, operands[0], read), *settings),)

    def _filled(self, at: At, x: Any, read: list[Interval]) -> Any:
        """The rows that ATen gets; in those that don't exist the least number of x's type."""
        least = -inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        return fit(x, at.inside[0], read, least)

    def _how(self, at: At) -> tuple[list[Interval], list[list[int]]]:
        """The rows that ATen gets, and its kernel, stride, padding and dilation."""
        kernel, stride, dilation = ([getattr(t, side) for t in self.taps] for side in ("kernel", "stride", "dilation"))
        padding = [self._padding(at, d, t) for d, t in enumerate(self.taps, 2)]
        inside, windows = at.inside[0], at.windows[0]
        read = [i if p else w for p, i, w in zip([0, 0, *padding], inside, windows, strict=True)]
        return read, [kernel, stride, padding, dilation]

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The result, and instead of x only the places of the largest."""
        read, settings = self._how(at)
        x = self._filled(at, operands[0], read)
        if len(self.taps) == 1:
            y, places = torch.ops.aten.max_pool2d_with_indices(x.unsqueeze(-2), *_of_one_row(settings))
            return (y.squeeze(-2),), (places,)
        aten = torch.ops.aten
        y, places = (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)[len(self.taps) - 2](x, *settings)
        return (y,), (places,)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (places,), aten, (read, settings) = dys, kept, torch.ops.aten, self._how(at)
        shape = [hi - lo for lo, hi in read]
        if len(self.taps) == 1:
            dy, shape, settings = dy.unsqueeze(-2), [*shape[:2], 1, shape[2]], _of_one_row(settings)
        back = aten.max_pool3d_with_indices_backward if len(self.taps) == 3 else aten.max_pool2d_with_indices_backward
        dx = back(dy, empty_as(dy, shape), *settings, False, places)
        return (unfit(dx.squeeze(-2) if len(self.taps) == 1 else dx, at.inside[0], read),)

    def _padding(self, at: At, d: int, t: Taps) -> int:
        """The rows that ATen adds by itself, equally on both sides, where that makes just the rows that are here; else
        0.

        Not under a dilated window that steps over all rows: ATen takes its gradient to a place that isn't x's.
        """
        (lo, _), (first, last) = at.windows[0][d], at.inside[0][d]
        p = first - lo
        rows = (last - first + 2 * p - t.reach - 1) // t.stride + 1
        if not 0 < p <= t.kernel // 2 or rows != at.extent(f"d{d}"):
            return 0
        starts = range(lo, lo + rows * t.stride, t.stride)
        over = t.dilation > 1 and any(
            all(not first <= s + k * t.dilation < last for k in range(t.kernel)) for s in starts
        )
        return 0 if over else p

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Windows row by row, one dimension after the other; a window in the padding alone is minus infinity."""
        y = operands[0]
        for d, (t, out) in enumerate(zip(self.taps, self.out, strict=True), 2):
            n = y.shape[d]
            y = torch.cat([y, torch.full_like(y.select(d, 0), -inf).unsqueeze(d)], d)
            rows = [[*(r for r in t.row(o) if 0 <= r < n), n] for o in range(out)]
            y = torch.stack([y.index_select(d, torch.tensor(r)).amax(d) for r in rows], d)
        return (y,)

    def work(self, way: int, at: At) -> Work:
        made = prod(at.extent(i) for i, _ in self.signatures[way].extents)
        return Work(made * prod(t.kernel for t in self.taps), touched(at, self.signatures[way]))


def _of_one_row(settings: list[list[int]]) -> list[list[int]]:
    """The settings of a 1-D pooling as those of a 2-D one of one row, which ATen has."""
    kernel, stride, padding, dilation = settings
    return [[1, *kernel], [1, *stride], [0, *padding], [1, *dilation]]


@dataclass(frozen=True)
class AdaptiveMaxPool(Operation):
    """The largest of the rows [floor(o*H/out), ceil((o+1)*H/out)) of x[N, C, rows...], and its flat number among them.

    There are two ways: rows are read; or, where one row is made of all, they are reduced: each rank makes the largest
    of its rows.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, out = numbered(len(self.shape)), (*self.shape[:2], *self.out)
        rows = (Made((i,), Ratio(n, m)) for i, n, m in zip(names[2:], self.shape[2:], self.out, strict=True))
        x = Operand("x", self.shape, (*own(*names[:2]), *rows))
        read = Signature(tuple(zip(names, out, strict=True)), (x,), self._results(own(*names)))
        if prod(self.out) > 1:
            return (read,)
        whole = self._results(own(*names[:2], *(None for _ in self.out)))
        x = Operand("x", self.shape, own(*names))
        return read, Signature(tuple(zip(names, self.shape, strict=True)), (x,), whole, reduction="max")

    def _results(self, dims: tuple[Made, ...]) -> tuple[Operand, ...]:
        out = (*self.shape[:2], *self.out)
        return Operand("y", out, dims), Operand("number", out, dims, gradient=False, integer=True)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """The largest along one dimension after the other, the last first, so that the first of equal ones in memory
        order stays."""
        (y,), number = operands, operands[0].new_zeros((), dtype=torch.int64)
        for d in range(2, len(self.shape)):
            rows = numbers(at.inside[0][d], y).view(-1, *[1] * (y.dim() - 1 - d))
            number = number * self.shape[d] + rows
        number = number.expand(y.shape)
        for d in reversed(range(2, len(self.shape))):
            first = at.inside[0][d][0]
            cells = range(*at.blocks[f"d{d}"]) if way == 0 else (0,)
            some: list[tuple[Any, Any]] = []
            for o in cells:
                lo, hi = Ratio(self.shape[d], self.out[d - 2]).window(o, o + 1) if way == 0 else at.inside[0][d]
                largest, at_row = y.narrow(d, lo - first, hi - lo).max(d, keepdim=True)
                some.append((largest, number.narrow(d, lo - first, hi - lo).gather(d, at_row)))
            y, number = (torch.cat(parts, d) for parts in zip(*some, strict=True))
        return y, number

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        y, number = self.local(way, at, *operands)
        return (y, number), (number,)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """The gradient by the local code of its row, as all numbers are of rows that are here."""
        here = At({f"d{d}": rows for d, rows in enumerate(at.inside[0])}, (), ())
        return AdaptiveMaxPoolGradient(self.shape, self.out).local(0, here, dys[0], kept[0])

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        pool = torch.nn.functional
        pools = (pool.adaptive_max_pool1d, pool.adaptive_max_pool2d, pool.adaptive_max_pool3d)
        return pools[len(self.out) - 1](operands[0], self.out, return_indices=True)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(AdaptiveMaxPoolGradient(self.shape, self.out), ("dy", "number"))}


@dataclass(frozen=True)
class AdaptiveMaxPoolGradient(Operation):
    """dy goes to the one row that was the largest: each row of dx reads the cells that it is in."""

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, out = numbered(len(self.shape)), (*self.shape[:2], *self.out)
        rows = (Made((i,), Ratio(n, m).inverse) for i, n, m in zip(names[2:], self.shape[2:], self.out, strict=True))
        dims = (*own(*names[:2]), *rows)
        dy, number = Operand("dy", out, dims), Operand("number", out, dims, gradient=False, integer=True)
        dx = Operand("dx", self.shape, own(*names))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (dy, number), (dx,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        dy, number = operands
        here, inside, rest = torch.zeros_like(number), torch.ones_like(number, dtype=torch.bool), number
        sizes = [at.extent(f"d{d}") for d in range(len(self.shape))]
        for d in reversed(range(2, len(self.shape))):
            row, rest = rest % self.shape[d] - at.blocks[f"d{d}"][0], rest // self.shape[d]
            inside &= (row >= 0) & (row < sizes[d])
            here += row * prod(sizes[d + 1 :])
        flat = dy.new_zeros(*sizes[:2], prod(sizes[2:]))
        where, what = (here * inside).flatten(2), (dy * inside).flatten(2)
        return (flat.scatter_add(2, where, what).view(sizes),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        dy, number = (t.flatten(2) for t in operands)
        return (
            torch.zeros(*self.shape[:2], prod(self.shape[2:]), dtype=dy.dtype)
            .scatter_add(2, number, dy)
            .view(self.shape),
        )
