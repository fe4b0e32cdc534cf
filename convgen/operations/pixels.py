"""Pixel shuffle and unshuffle: channels as rows, and rows as channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.relations import Ratio
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own, unfit


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

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        made = [(lo * self.factor, hi * self.factor) for lo, hi in at.inside[0][2:]]
        return (torch.pixel_unshuffle(unfit(dys[0], made, [at.blocks["d2"], at.blocks["d3"]]), self.factor),)

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

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (lo, hi) = dys, at.inside[0][1]
        rows, many = [(0, n) for n in dy.shape[2:]], self.factor**2
        dy = unfit(dy, [(lo * many, hi * many), *rows], [at.blocks["d1"], *rows])
        return (torch.pixel_shuffle(dy, self.factor),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        (x,), (n, c, h, w), r = operands, self.shape, self.factor
        return (x.reshape(n, c, h // r, r, w // r, r).permute(0, 1, 3, 5, 2, 4).reshape(n, -1, h // r, w // r),)
