"""What an operation is: the row of a table that algebra, program and price read. It knows nothing of ranks.

Local code is a few lines of ATen, told where it stands (`At`): the block of each index, the window wished for of each
operand, and how much of it there is. The difference is padding. Operands come without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from convgen.algebra.signature import Signature

Interval = tuple[int, int]


@dataclass(frozen=True)
class At:
    """Where a rank's part of an operation stands.

    Attributes:
        blocks: of each index, its block.
        windows: of each operand and dimension, the rows wished for, in the relation's numbering.
        inside: of these, the rows that there are (all of them, where rows come round again).
    """

    blocks: Mapping[str, Interval]
    windows: tuple[tuple[Interval, ...], ...]
    inside: tuple[tuple[Interval, ...], ...]

    def padding(self, operand: int, dims: Sequence[int]) -> list[int]:
        """Rows wished for and not there, below and above, in the order of torch's pad: last dimension first."""
        sides: list[int] = []
        for d in sorted(dims, reverse=True):
            (lo, hi), (first, last) = self.windows[operand][d], self.inside[operand][d]
            sides += [first - lo, hi - last] if last > first else [hi - lo, 0]
        return sides

    def extent(self, index: str) -> int:
        """Elements of an index's block."""
        lo, hi = self.blocks[index]
        return hi - lo


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does: products and sums, and elements read and made."""

    flops: int
    elements: int


class Operation(Protocol):
    """A row. Frozen, with the extents of what it is applied to."""

    @property
    def name(self) -> str:
        """One word, in the text of a program."""
        ...

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The ways to compute it; the price chooses."""
        ...

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """A rank's part of the results, by signature number `way`."""
        ...

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The whole operation on one device, by another way than `local` where there is one."""
        ...

    def work(self, way: int, at: At) -> Work:
        """What `local` takes there."""
        ...


def touched(at: At, signature: Signature) -> int:
    """Elements that a rank reads and makes."""
    read = sum(prod(hi - lo for lo, hi in operand) for operand in at.inside)
    made = sum(prod(at.extent(i) for d in r.dims for i in d.indices) for r in signature.results)
    return read + made
