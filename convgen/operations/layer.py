"""One layer's training as operations: their names, the values that they read and make, and their sections.

| operation | reads | makes | section |
|---|---|---|---|
| conv_forward | x, w | y | forward |
| add_bias | y, bias | y | forward |
| conv_backward_data | dy, w | dx | backward_data |
| conv_backward_filter | dy, x | dw | backward_filter |
| sum_bias | dy | db | backward_filter |

A transposed convolution's are conv_transpose_forward and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from convgen.algebra.conv import PHASES, Conv, Phase
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.signature import Signature
from convgen.algebra.space import Space
from convgen.algebra.wants import layouts
from convgen.operations.bias import AddBias, SumBias
from convgen.operations.convolution import MAKES, READS, Convolution
from convgen.operations.row import Operation
from convgen.operations.transposed import TransposedConvolution

ROWS_OF_X = "rows=input"  # backward_filter with the rows of x as blocks, those of dy read for them
TRANSPOSED: Mapping[str, Phase] = {f"conv_transpose_{p}": p for p in PHASES}
CONVOLUTIONS: Mapping[str, Phase] = {**{f"conv_{p}": p for p in PHASES}, **TRANSPOSED}


def _value(phase: Phase, tensor: str) -> str:
    """The value of a tensor in a phase: backward reads dy and makes gradients."""
    gradient = phase != "forward" and (tensor == "y" or tensor == MAKES[phase])
    return f"d{tensor}" if gradient else tensor


# By phase, the values that a convolution reads, in order, and the one that it makes.
VALUES_READ: Mapping[Phase, tuple[str, ...]] = {p: tuple(_value(p, t) for t in READS[p]) for p in PHASES}
VALUE_MADE: Mapping[Phase, str] = {p: _value(p, MAKES[p]) for p in PHASES}
# By operation.
MADE_BY: Mapping[str, str] = {n: VALUE_MADE[p] for n, p in CONVOLUTIONS.items()} | {"add_bias": "y", "sum_bias": "db"}
# Words for each operation's signatures, in their order; the first signature needs none.
WAYS: Mapping[str, tuple[str, ...]] = {
    name: ("", ROWS_OF_X) if CONVOLUTIONS.get(name) == "backward_filter" else ("",) for name in MADE_BY
}


@dataclass(frozen=True)
class Row:
    """An operation of a layer.

    Attributes:
        reads: the values read; a gradient has a d before its tensor's name.
    """

    operation: Operation
    reads: tuple[str, ...]
    section: Phase

    @property
    def makes(self) -> str:
        return MADE_BY[self.operation.name]

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS[self.operation.name]

    def signature(self, way: str = "") -> Signature:
        return self.operation.signatures[self.ways.index(way)]

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the values read, then that of the value made."""
        signature = self.operation.signatures[0]
        return tuple(o.name for o in (*signature.inputs, *signature.results))


@lru_cache(maxsize=1024)
def rows(conv: Conv) -> Mapping[str, Row]:
    """The operations of a layer, by name."""
    kind = TransposedConvolution if conv.transposed else Convolution
    found = [
        *(Row(kind(p, conv), VALUES_READ[p], p) for p in PHASES),
        Row(AddBias(conv), ("y", "bias"), "forward"),
        Row(SumBias(conv), ("dy",), "backward_filter"),
    ]
    return {row.operation.name: row for row in found}


@lru_cache(maxsize=1024)
def convolution(conv: Conv, phase: str) -> Row:
    """The convolution of a phase."""
    (row,) = (r for name, r in rows(conv).items() if CONVOLUTIONS.get(name) == phase)
    return row


def way_of(roles: Roles) -> str:
    """The words of the signature of a convolution to which these roles belong."""
    return ROWS_OF_X if roles.rows == "input" else ""


def wanted(space: Space, phase: str, roles: Roles) -> tuple[Layout, Layout, Layout]:
    """Layouts that a phase's convolution reads and makes: (first input, second input, output)."""
    row, way = convolution(space.conv, phase), way_of(roles)
    signature = row.signature(way if way in row.ways else "")
    first, second, made = layouts(space, signature, dict(roles.nests))
    return first, second, made
