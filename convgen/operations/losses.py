"""Losses: sums over everything, of which each rank has an addend.

A mean divides by the global count. With ignored targets that count is a sum as well: two sums and a quotient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own


@dataclass(frozen=True)
class CrossEntropy(Operation):
    """Sum of -log softmax(x)[target] over x[N, classes, rows...], and how many targets are not ignored.

    Their quotient is the mean. With `weighted` a third operand has a weight a class, which both sums take.

    Attributes:
        smoothing: share of the target that all classes have alike.
        logs: x are logarithms of probabilities already.
        each: no sums; the loss of each target, and whether it counts.
    """

    shape: tuple[int, ...]
    ignore: int = -100
    smoothing: float = 0.0
    weighted: bool = False
    logs: bool = False
    each: bool = False

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = [f"d{d}" for d in range(len(self.shape)) if d != 1]
        shape = (self.shape[0], *self.shape[2:])
        inputs = [
            Operand("x", self.shape, own(names[0], None, *names[1:])),
            Operand("target", shape, own(*names), gradient=False, integer=True),
        ]
        if self.weighted:
            inputs.append(Operand("weight", (self.shape[1],), (WHOLE,), gradient=False))
        results = Operand("loss", (), ()), Operand("count", (), (), gradient=False)
        if self.each:
            results = Operand("loss", shape, own(*names)), Operand("count", shape, own(*names), gradient=False)
        return (Signature(tuple(zip(names, shape, strict=True)), tuple(inputs), results),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, target, *weight = operands
        how = "none" if self.each else "sum"
        if self.logs:
            loss = torch.nn.functional.nll_loss(x, target, *weight, reduction=how, ignore_index=self.ignore)
        else:
            loss = torch.nn.functional.cross_entropy(
                x, target, *weight, reduction=how, ignore_index=self.ignore, label_smoothing=self.smoothing
            )
        kept = target != self.ignore
        count = weight[0].detach()[target * kept] * kept if weight else kept.to(x.dtype)
        return loss, count if self.each else count.sum()

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """With the distribution that each target stands for."""
        x, target, *weight = operands
        classes, kept = self.shape[1], target != self.ignore
        weights = weight[0].detach() if weight else torch.ones(classes, dtype=x.dtype)
        one = torch.nn.functional.one_hot(torch.where(kept, target, 0), classes).to(x.dtype)
        wish = (one * (1 - self.smoothing) + self.smoothing / classes) * weights * kept[..., None]
        logs = x.movedim(1, -1)
        if not self.logs:
            logs = logs - logs.logsumexp(-1, keepdim=True)
        loss, count = -(wish * logs).sum(-1), (one * weights * kept[..., None]).sum(-1).detach()
        return (loss, count) if self.each else (loss.sum(), count.sum())


@dataclass(frozen=True)
class SquaredError(Operation):
    """Mean of (x - y)^2 over all elements."""

    shape: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, y), (Operand("loss", (), ()),)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (torch.nn.functional.mse_loss(*operands, reduction="sum") / prod(self.shape),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, y = operands
        return ((x * x).mean() - 2 * (x * y).mean() + (y * y).mean(),)
