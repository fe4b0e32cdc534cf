"""Pooling: windows of rows, reduced. Max and average by taps; adaptive by the rows that each output row covers.

An average divides by the global count of what a window covers, never by what a rank holds of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from convgen.algebra.relations import Ratio, Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.late import torch
from convgen.operations.row import At, Operation, Work, touched


@dataclass(frozen=True)
class MaxPool(Operation):
    """The largest of each window: x[N, C, ...] to y[N, C, ...]. Padding is never the largest."""

    shape: tuple[int, ...]
    taps: tuple[Taps, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return (_windows(self.shape, self.taps, self.out),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x = at.wished(0, operands[0], -inf)
        pool = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)[len(self.taps) - 1]
        kernel, stride, dilation = ([getattr(t, k) for t in self.taps] for k in ("kernel", "stride", "dilation"))
        return (pool(x, kernel, stride, 0, dilation),)

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


def _windows(shape: tuple[int, ...], relations: tuple[Taps | Ratio, ...], out: tuple[int, ...]) -> Signature:
    """x[N, C, rows read] to y[N, C, rows]."""
    names = ("N", "C", *(f"o{i}" for i in range(len(out))))
    x = Operand(
        "x", shape, (Made(("N",)), Made(("C",)), *(Made((n,), r) for n, r in zip(names[2:], relations, strict=True)))
    )
    y = Operand("y", (*shape[:2], *out), tuple(Made((n,)) for n in names))
    return Signature(tuple(zip(names, y.shape, strict=True)), (x,), (y,))
