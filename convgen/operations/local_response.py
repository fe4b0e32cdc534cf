"""Local response normalisation across channels: x / (k + alpha * mean of x^2 over a window of channels)^beta.

A channel's window of `size` channels begins size // 2 channels below it; channels that don't exist count as zeros.
Source: Krizhevsky et al. 2012, 3.3; alpha multiplies the mean, as in PyTorch and Caffe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.relations import Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, Work, numbered, own, touched


@dataclass(frozen=True)
class LocalResponseNorm(Operation):
    """x[N, C, ...] to y[N, C, ...]."""

    shape: tuple[int, ...]
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        window = Made((names[1],), Taps(self.size, pad=self.size // 2))
        x = Operand("x", self.shape, (*own(names[0]), window, *own(*names[2:])))
        y = Operand("y", self.shape, own(*names))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x = at.wished(0, operands[0])
        mean = x.square().unfold(1, self.size, 1).mean(-1)
        return (x.narrow(1, self.size // 2, at.extent("d1")) * (self.k + self.alpha * mean) ** -self.beta,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return (torch.nn.functional.local_response_norm(operands[0], self.size, self.alpha, self.beta, self.k),)

    def work(self, way: int, at: At) -> Work:
        made = prod(at.extent(i) for i, _ in self.signatures[way].extents)
        return Work(made * (self.size + 3), touched(at, self.signatures[way]))
