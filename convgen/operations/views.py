"""The same numbers under other dimensions: views, permutations, expansion, pixel shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.relations import Ratio
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.late import torch
from convgen.operations.row import At, Operation, made_here, numbered, own


@dataclass(frozen=True, slots=True)
class Run:
    """Dimensions of x and of y, next to each other, that have the same product; extents of 1 are in none."""

    x: tuple[int, ...]
    y: tuple[int, ...]


def runs(shape: Sequence[int], out: Sequence[int]) -> tuple[Run, ...]:
    """The shortest runs that a view is made of.

    Example:
        >>> runs((4, 6, 5), (4, 2, 3, 5))
        (Run(x=(0,), y=(0,)), Run(x=(1,), y=(1, 2)), Run(x=(2,), y=(3,)))
    """
    left, right = ([d for d, n in enumerate(side) if n > 1] for side in (shape, out))
    found: list[Run] = []
    while left:
        x, y = [left.pop(0)], [right.pop(0)]
        while (p := prod(shape[d] for d in x)) != (q := prod(out[d] for d in y)):
            if p < q:
                x.append(left.pop(0))
            else:
                y.append(right.pop(0))
        found.append(Run(tuple(x), tuple(y)))
    return tuple(found)


@dataclass(frozen=True)
class View(Operation):
    """x in another shape. Two ways: the outermost of the result's dimensions that a run is made of reads rows of the
    outermost of x's, in any blocks; or, where every run joins or splits, as nests, each dimension an index.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return runs(self.shape, self.out)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        by_rows = self._by_rows()
        return (by_rows, self._by_nests()) if all(len(r.x) == 1 or len(r.y) == 1 for r in self.runs) else (by_rows,)

    def _by_rows(self) -> Signature:
        x, y = list(own(*(None,) * len(self.shape))), list(own(*(None,) * len(self.out)))
        extents: list[tuple[str, int]] = []
        for run in self.runs:
            a, b = run.x[0], run.y[0]
            index, (one, other) = f"d{b}", self._units(run)
            extents.append((index, self.out[b]))
            y[b] = Made((index,))
            x[a] = Made((index,), Ratio(other, one) if len(run.x) + len(run.y) > 2 else None)
        return Signature(tuple(extents), (Operand("x", self.shape, tuple(x)),), (Operand("y", self.out, tuple(y)),))

    def _by_nests(self) -> Signature:
        x, y = list(own(*(None,) * len(self.shape))), list(own(*(None,) * len(self.out)))
        extents: list[tuple[str, int]] = []
        for run in self.runs:
            many, one, shape, joined = (run.x, run.y, self.shape, y) if len(run.y) == 1 else (run.y, run.x, self.out, x)
            split = x if joined is y else y
            names = tuple(f"d{run.y[0]}{'abcdefgh'[k]}" for k in range(len(many)))
            extents += [(i, shape[d]) for i, d in zip(names, many, strict=True)]
            joined[one[0]] = Made(names)
            for i, d in zip(names, many, strict=True):
                split[d] = Made((i,))
        return Signature(tuple(extents), (Operand("x", self.shape, tuple(x)),), (Operand("y", self.out, tuple(y)),))

    def _units(self, run: Run) -> tuple[int, int]:
        """Elements of a row of x's and of y's outermost dimension."""
        return prod(self.shape[d] for d in run.x[1:]), prod(self.out[d] for d in run.y[1:])

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (x,) = operands
        here = made_here(at, self.signatures[way].results[0])
        if way == 1:
            return (x.reshape(here),)
        flat = x.reshape([prod(x.shape[d] for d in run.x) for run in self.runs])
        for k, run in enumerate(self.runs):
            one, other = self._units(run)
            lo, hi = at.blocks[f"d{run.y[0]}"]
            flat = flat.narrow(k, lo * other - at.inside[0][run.x[0]][0] * one, (hi - lo) * other)
        return (flat.reshape(here),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].reshape(self.out),)


@dataclass(frozen=True)
class Permute(Operation):
    """Dimension d of y is dimension order[d] of x."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x = Operand("x", self.shape, own(*names))
        y = Operand("y", tuple(self.shape[d] for d in self.order), own(*(names[d] for d in self.order)))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].permute(self.order),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        letters = "abcdefgh"[: len(self.shape)]
        return (torch.einsum(f"{letters}->{''.join(letters[d] for d in self.order)}", operands[0]),)


@dataclass(frozen=True)
class Expand(Operation):
    """x repeated along dimensions of extent 1, and along new ones before the first."""

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, new = numbered(len(self.out)), len(self.out) - len(self.shape)
        there = (
            i if self.out[new + d] == n else None for d, (i, n) in enumerate(zip(names[new:], self.shape, strict=True))
        )
        x, y = Operand("x", self.shape, own(*there)), Operand("y", self.out, own(*names))
        return (Signature(tuple(zip(names, self.out, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].expand([at.extent(i) for i in numbered(len(self.out))]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return (operands[0] * torch.ones(self.out, dtype=operands[0].dtype),)


@dataclass(frozen=True)
class PixelShuffle(Operation):
    """x[N, C r^2, H, W] to y[N, C, H r, W r]: row o of y reads row o // r, channel c the r^2 channels from c r^2."""

    shape: tuple[int, ...]
    factor: int

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        (n, c, h, w), r, names = self.shape, self.factor, numbered(4)
        rows = Ratio(1, r)
        x = Operand(
            "x", self.shape, (*own("d0"), Made(("d1",), Ratio(1, 1, r * r)), Made(("d2",), rows), Made(("d3",), rows))
        )
        y = Operand("y", (n, c // (r * r), h * r, w * r), own(*names))
        return (Signature(tuple(zip(names, y.shape, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        y = torch.pixel_shuffle(operands[0], self.factor)
        for d in (2, 3):
            y = y.narrow(d, at.blocks[f"d{d}"][0] - at.inside[0][d][0] * self.factor, at.extent(f"d{d}"))
        return (y,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        (x,), (n, c, h, w), r = operands, self.shape, self.factor
        return (x.reshape(n, c // (r * r), r, r, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, -1, h * r, w * r),)


@dataclass(frozen=True)
class PixelUnshuffle(Operation):
    """x[N, C, H r, W r] to y[N, C r^2, H, W]: channel c of y reads channel c // r^2, a row the r rows from o r."""

    shape: tuple[int, ...]
    factor: int

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        (n, c, h, w), r, names = self.shape, self.factor, numbered(4)
        rows = Ratio(1, 1, r)
        x = Operand(
            "x", self.shape, (*own("d0"), Made(("d1",), Ratio(1, r * r)), Made(("d2",), rows), Made(("d3",), rows))
        )
        y = Operand("y", (n, c * r * r, h // r, w // r), own(*names))
        return (Signature(tuple(zip(names, y.shape, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        start = at.blocks["d1"][0] - at.inside[0][1][0] * self.factor**2
        return (torch.pixel_unshuffle(operands[0], self.factor).narrow(1, start, at.extent("d1")),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        (x,), (n, c, h, w), r = operands, self.shape, self.factor
        return (x.reshape(n, c, h // r, r, w // r, r).permute(0, 1, 3, 5, 2, 4).reshape(n, -1, h // r, w // r),)
