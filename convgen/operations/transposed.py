"""Transposed convolution: the products of a convolution, read from the other side.

    y[n, f, o*S - P + d*k] += x[n, c, o] * w[c, f, k]

Its forward sum is backward-data's of the convolution that takes y to x, its backward-data that one's forward; only
names change places: x and y, C and F. Source: Dumoulin & Visin, arXiv:1603.07285, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from convgen.algebra.conv import OTHER_TENSOR, Conv, Phase, Spatial
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.convolution import Convolution, other_phases
from convgen.operations.row import At, Derived, Operation, Work

EXCHANGED = {**OTHER_TENSOR, "C": "F", "F": "C"}


@dataclass(frozen=True)
class TransposedConvolution(Operation):
    """One phase of a transposed convolution of x[N, C, ...] with w[C, F/g, ...] to y[N, F, ...].

    Operands, and the ways of backward-filter, are in a convolution's order: dy, x; rows of y as blocks, then of x.
    """

    phase: Phase
    conv: Conv

    @property
    def name(self) -> str:
        return f"conv_transpose_{self.phase}"

    @property
    def convolves(self) -> tuple[Phase, Conv]:
        return self.phase, self.conv

    def convolutions(self, way: int, at: At) -> Iterator[tuple[Convolution, int, At]]:
        yield self.sum, *self.of_sum(way, at)

    @cached_property
    def sum(self) -> Convolution:
        """The convolution that is the same sum."""
        return Convolution(self.conv.direct_phase(self.phase), self.conv.direct)

    @property
    def is_product(self) -> bool:
        return True

    @property
    def joins(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return tuple(
            replace(
                s,
                extents=tuple((_other(i), n) for i, n in s.extents),
                inputs=self._in_order([_renamed(o) for o in s.inputs]),
                results=tuple(map(_renamed, s.results)),
            )
            for s in (self.sum.signatures[self._way(i)] for i in range(len(self.sum.signatures)))
        )

    def _in_order(self, of_sum: Sequence[Any]) -> tuple[Any, ...]:
        """The sum's operands in this row's order, or this row's in the sum's."""
        return tuple(of_sum[::-1] if self.phase == "backward_filter" else of_sum)

    def _way(self, way: int) -> int:
        """The number of the sum's signature that is this row's number `way`; dw's come in pairs, in the other order."""
        return way ^ (self.phase == "backward_filter")

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return self.sum.local(*self.of_sum(way, at), *self._in_order(operands))

    @property
    def bias_along(self) -> int | None:
        return self.sum.bias_along

    def adds_bias(self, way: int, at: At, *operands: Any) -> bool:
        return self.sum.adds_bias(*self.of_sum(way, at), *operands)

    gives_anew = True

    @property
    def leaves_results(self) -> bool:
        return True

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return self.sum.has_vjp(*self.of_sum(way, at), *self._in_order(operands))

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        of_sum = self.of_sum(way, at)
        return self.sum.kept(*of_sum, self._in_order(wanted), *self._in_order(operands))

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        found = self.sum.vjp(*self.of_sum(way, at), self._in_order(wanted), kept, *dys)
        return self._in_order(found)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return self.sum.reference(*self._in_order(operands))

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return other_phases(self.phase, lambda phase: replace(self, phase=phase))

    def work(self, way: int, at: At) -> Work:
        return self.sum.work(*self.of_sum(way, at))

    def of_sum(self, way: int, at: At) -> tuple[int, At]:
        """This row's way and place, as the sum has them."""
        blocks = {_other(i): block for i, block in at.blocks.items()}
        parts = {_other(name): count for name, count in at.parts.items()}
        return self._way(way), At(blocks, self._in_order(at.windows), self._in_order(at.inside), parts=parts)


def _other(name: str) -> str:
    return EXCHANGED.get(name, name)


def _renamed(operand: Operand) -> Operand:
    dims = tuple(Made(tuple(map(_other, d.indices)), d.relation) for d in operand.dims)
    return replace(operand, name=_other(operand.name), dims=dims)


def transposed_convolution(
    shape: tuple[int, ...], filters: int, spatial: tuple[Spatial, ...], output_padding: tuple[int, ...], groups: int = 1
) -> TransposedConvolution:
    """The forward phase for x of this shape.

    Args:
        shape: (N, C, rows...) of x.
        spatial: name, kernel, stride, padding below and above, and dilation of each dimension; `extent` rows of x.
        output_padding: how many rows y has more above, which no product needs to reach.
    """
    made = tuple(s.transposed(s.extent, more) for s, more in zip(spatial, output_padding, strict=True))
    return TransposedConvolution("forward", Conv(shape[0], shape[1], filters, made, groups, transposed=True))
