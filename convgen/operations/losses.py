"""Losses: sums over all elements, to which each rank has an addend.

A mean divides by the global count. With ignored targets that count is a sum, too: then the loss is a quotient of two
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own


@dataclass(frozen=True)
class CrossEntropy(Operation):
    """The sum of -log softmax(x)[target] over x[N, classes, rows...], and how many targets are not ignored.

    Their quotient is the mean. With `weighted` a third operand has a weight for each class, by which both sums count.

    Attributes:
        smoothing: the share of the target that is spread evenly over all classes.
        logs: whether x has logarithms of probabilities already.
        each: whether it makes, instead of sums, each target's loss and whether it counts.
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
        return loss, self._count(x, target, weight)

    def _count(self, x: Any, target: Any, weight: Sequence[Any]) -> Any:
        there = target != self.ignore
        count = weight[0].detach()[target * there] * there if weight else there.to(x.dtype)
        return count if self.each else count.sum()

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The sums, made by the calls of which torch's cross_entropy consists, so that the logarithms are made once;
        and these."""
        x, target, *weight = operands
        logs = x if self.logs else torch.log_softmax(x, 1)
        loss, total = self._picked(logs, target, *(weight or [None]))
        if self.smoothing:
            each = self._weighted(-logs, weight).sum(1).masked_fill_(target == self.ignore, 0)
            share = self.smoothing / x.shape[1]
            loss = (1 - self.smoothing) * loss + (each if self.each else each.sum()) * share
        return (loss, self._count(x, target, weight)), (logs, target, total, *weight)

    def _picked(self, logs: Any, target: Any, weight: Any) -> tuple[Any, Any]:
        """The loss without smoothing, and ATen's sum of weights."""
        how, ignore, aten = 0 if self.each else 2, self.ignore, torch.ops.aten
        if logs.dim() == 2:
            return aten.nll_loss_forward(logs, target, weight, how, ignore)
        loss, total = aten.nll_loss2d_forward(*_by_rows(logs, target), weight, how, ignore)
        return loss.reshape(target.shape) if self.each else loss, total

    def _weighted(self, t: Any, weight: Sequence[Any]) -> Any:
        return t * weight[0].view(-1, *[1] * (t.dim() - 2)) if weight else t

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy, _), (logs, target, total, *weight), aten = dys, kept, torch.ops.aten
        settings = ((weight or [None])[0], 0 if self.each else 2, self.ignore, total)
        part = (1 - self.smoothing) * dy if self.smoothing else dy
        if logs.dim() == 2:
            dx = aten.nll_loss_backward(part, logs, target, *settings)
        else:
            wide, rows = _by_rows(logs.contiguous(), target)  # ATen wants two dimensions of rows
            part = part.reshape(rows.shape) if self.each else part
            dx = aten.nll_loss2d_backward(part, wide, rows, *settings).reshape(logs.shape)
        if self.smoothing:
            share = (dy * (self.smoothing / logs.shape[1])).expand(target.shape).masked_fill(target == self.ignore, 0)
            dx = dx + self._weighted(-share.unsqueeze(1).expand(logs.shape), weight)
        if not self.logs:
            dx = aten._log_softmax_backward_data(dx, logs, 1, logs.dtype)
        return (dx, *[None] * (len(wanted) - 1))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The sums, with the distribution that each target stands for."""
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


def _by_rows(logs: Any, target: Any) -> tuple[Any, Any]:
    """The logarithms and the targets with two dimensions of rows, as ATen takes them."""
    if logs.dim() == 4:
        return logs, target
    n, classes = logs.shape[:2]
    return logs.reshape(n, classes, 1, -1), target.reshape(n, 1, -1)


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

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.local(way, at, *operands), operands

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (x, y), dy, back = kept, dys[0] / prod(self.shape), torch.ops.aten.mse_loss_backward
        return back(dy, x, y, 2) if wanted[0] else None, back(dy, y, x, 2) if wanted[1] else None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, y = operands
        return ((x * x).mean() - 2 * (x * y).mean() + (y * y).mean(),)
