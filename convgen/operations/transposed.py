"""Transposed convolution: the products of a convolution, read from the other side.

    y[n, f, o*S - P + d*k] += x[n, c, o] * w[c, f, k]

Its forward sum is backward-data's of the convolution that takes y to x, its backward-data that one's forward; only
names change places: x and y, C and F. Source: Dumoulin & Visin, arXiv:1603.07285, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.convolution import MAKES, READS, Convolution, Phase
from convgen.operations.row import At, Derived, Operation, Work

OTHER_SIDE: Mapping[Phase, Phase] = {
    "forward": "backward_data",
    "backward_data": "forward",
    "backward_filter": "backward_filter",
}
EXCHANGED = {"x": "y", "y": "x", "C": "F", "F": "C"}


@dataclass(frozen=True)
class TransposedConvolution(Operation):
    """One phase of a transposed convolution of x[N, C, ...] with w[C, F/g, ...] to y[N, F, ...].

    Attributes:
        conv: the convolution that takes y to x.
    """

    phase: Phase
    conv: Conv

    @property
    def name(self) -> str:
        return f"transposed_conv_{self.phase}"

    @cached_property
    def sum(self) -> Convolution:
        """The same sum, under a convolution's names."""
        return Convolution(OTHER_SIDE[self.phase], self.conv)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return tuple(
            replace(
                s,
                extents=tuple((_other(i), n) for i, n in s.extents),
                inputs=tuple(map(_renamed, s.inputs)),
                results=tuple(map(_renamed, s.results)),
            )
            for s in self.sum.signatures
        )

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return self.sum.local(way, self._there(at), *operands)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return self.sum.reference(*operands)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        reads = {_other(MAKES[OTHER_SIDE[p]]): (p, [_other(t) for t in READS[OTHER_SIDE[p]]]) for p in OTHER_SIDE}
        result = _other(MAKES[self.sum.phase])
        return {
            makes: Derived(replace(self, phase=phase), tuple(f"d{t}" if t == result else t for t in tensors))
            for makes, (phase, tensors) in reads.items()
            if makes != result
        }

    def work(self, way: int, at: At) -> Work:
        return self.sum.work(way, self._there(at))

    @staticmethod
    def _there(at: At) -> At:
        return replace(at, blocks={_other(i): block for i, block in at.blocks.items()})


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
        output_padding: rows more above, of y, that no product needs to reach.
    """
    other = tuple(
        replace(
            s,
            extent=(s.extent - 1) * s.stride - s.pad_lo - s.pad_hi + s.reach + 1 + more,
            pad_hi=s.pad_hi - more,  # so that the convolution back has exactly x's rows
        )
        for s, more in zip(spatial, output_padding, strict=True)
    )
    return TransposedConvolution("forward", Conv(shape[0], filters, shape[1], other, groups))
