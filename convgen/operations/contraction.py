"""Contractions: linear layers, matrix products, batched ones. Indices that the result lacks are summed.

Each operand's gradient is a contraction as well: of the result's gradient with the other operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, Literal

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.offered import offered
from convgen.operations.row import At, Derived, Operation, Work, own, touched


@dataclass(frozen=True)
class Contraction(Operation):
    """An einsum of two operands by `subscripts`, in which a letter is an index; each index of the result is in an
    operand.

    Example:
        >>> linear((8, 5), 3).subscripts
        'aK,FK->aF'
    """

    subscripts: str
    extents: tuple[tuple[str, int], ...]

    @property
    def as_convolution(self) -> Mapping[str, str]:
        """The names that a convolution has for a linear layer's indices."""
        return {"a": "N", "K": "C", "F": "F"}

    @cached_property
    def _sides(self) -> tuple[str, str, str]:
        operands, result = self.subscripts.split("->")
        first, second = operands.split(",")
        return first, second, result

    @property
    def is_product(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        extent = dict(self.extents)
        x, w, y = (
            Operand(name, tuple(extent[i] for i in side), own(*side))
            for name, side in zip("xwy", self._sides, strict=True)
        )
        return (Signature(self.extents, (x, w), (y,)),)

    @property
    def leaves_results(self) -> bool:
        return True

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, w, *bias = operands
        return (torch.nn.functional.linear(x, w, *bias) if bias else contracted(*self._sides, x, w),)

    @property
    def bias_along(self) -> int | None:
        first, second, result = self._sides
        is_linear = second == result[-1:] + first[-1:] and first[:-1] == result[:-1]
        return len(result) - 1 if is_linear else None

    def adds_bias(self, way: int, at: At, *operands: Any) -> bool:
        return self.bias_along is not None

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, w, *_ = operands
        return self.local(way, at, *operands), (x if wanted[1] else None, w if wanted[0] else None)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (x, w), (first, second, result) = dys, kept, self._sides
        return (
            contracted(result, second, first, dy, w) if wanted[0] else None,
            contracted(result, first, second, dy, x) if wanted[1] else None,
        )

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """All products, then their sums."""
        letters = [i for i, _ in self.extents]
        wide: list[Any] = []
        for t, side in zip(operands, self._sides, strict=False):
            order = sorted(range(len(side)), key=lambda d: letters.index(side[d]))
            extents = [t.shape[side.index(i)] if i in side else 1 for i in letters]
            wide.append(t.permute(order).reshape(extents))
        result = self._sides[2]
        summed = [d for d, i in enumerate(letters) if i not in result]
        total = (wide[0] * wide[1]).sum(summed) if summed else wide[0] * wide[1]
        left = [i for i in letters if i in result]
        return (total.permute([left.index(i) for i in result]),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        first, second, result = self._sides
        return {
            "x": Derived(Contraction(f"{result},{second}->{first}", self.extents), ("dy", "w")),
            "w": Derived(Contraction(f"{result},{first}->{second}", self.extents), ("dy", "x")),
        }

    def work(self, way: int, at: At) -> Work:
        return Work(2 * prod(at.extent(i) for i, _ in self.extents), touched(at, self.signatures[way]))


def linear(shape: Sequence[int], features: int) -> Contraction:
    """The contraction of x[..., K] with w[F, K]."""
    lead = "abcdefgh"[: len(shape) - 1]
    extents = (*zip(lead, shape[:-1], strict=True), ("K", shape[-1]), ("F", features))
    return Contraction(f"{lead}K,FK->{lead}F", extents)


def matrix_product(batch: Sequence[int], rows: int, inner: int, columns: int) -> Contraction:
    """The contraction of [..., M, K] with [..., K, L]."""
    lead = "abcdefgh"[: len(batch)]
    extents = (*zip(lead, batch, strict=True), ("M", rows), ("K", inner), ("L", columns))
    return Contraction(f"{lead}MK,{lead}KL->{lead}ML", extents)


def contracted(first: str, second: str, result: str, a: Any, b: Any) -> Any:
    """The einsum of two operands with these indices; it is one matrix product where that does it, as for a linear layer
    and its gradients."""
    way = _product_of(first, second, result)
    if way in ("rows", "rows turned"):
        return torch.matmul(a, b if way == "rows" else b.t())
    if way == "columns":
        a, b = a.flatten(0, -2).t(), b.flatten(0, -2)
        there = offered((a.shape[0], b.shape[1]), a) if a.dtype == b.dtype else None
        return a @ b if there is None else torch.mm(a, b, out=there)
    return torch.einsum(f"{first},{second}->{result}", a, b)


@cache
def _product_of(first: str, second: str, result: str) -> Literal["rows", "rows turned", "columns", "any"]:
    """Which matrix product the einsum is: of the first operand's rows with the second or its transpose, or of the
    columns of both; "any" for none of these."""
    if not first:  # the gradient of a sum over all indices
        return "any"
    *rows, k = first
    if len(second) == 2 and k in second and second.replace(k, "") == result[-1:] and [*result[:-1]] == rows:
        return "rows" if second[0] == k else "rows turned"
    columns = len(result) == 2 and first[:-1] == second[:-1] and first[-1] + second[-1] == result
    return "columns" if columns and rows else "any"
