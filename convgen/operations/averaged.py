"""The elements of x that share moments, and where the moments of each element lie.

| norm | keeps | shares |
|---|---|---|
| batch | C | |
| instance | N, C | |
| group | N, C | channels of a group |
| layer, RMS | the leading dimensions | |
| batch, by parts | C, what has parts | rows of a part |

Parts are blocks of dimensions by the block rule: the elements that ranks would normalise together, blocks of samples
([SP] III-B's spatial statistics: all rows of a rank's samples), or of samples and rows (its local ones). The number of
parts belongs to the operation, so its result is the same on any grid. Where the grid's blocks are the parts, nothing
moves but what merges a part.

Source: [SP] III-B; docs/design.md, Networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.relations import Blocks, Ratio
from convgen.algebra.signature import WHOLE, Made, Operand
from convgen.late import torch
from convgen.operations.row import At, numbers, on_device, read_here


@dataclass(frozen=True)
class Averaged:
    """The elements that share moments.

    Attributes:
        shape: x's.
        keep: the dimensions along which each element has its own moments, in order; the others are averaged.
        size: how many elements of dimension 1 share moments (a group's channels).
        parts: by a kept dimension, never 1, the number of blocks whose rows share moments.
    """

    shape: tuple[int, ...]
    keep: tuple[int, ...]
    size: int = 1
    parts: tuple[tuple[int, Blocks], ...] = ()

    @cached_property
    def blocks(self) -> dict[int, Blocks]:
        """Parts by dimension."""
        return dict(self.parts)

    def index(self, d: int) -> str:
        """The moments' index for a dimension that is kept."""
        return f"p{d}" if d in self.blocks else f"d{d}"

    @property
    def moments(self) -> tuple[int, ...]:
        """The moments' shape."""
        blocks, size = self.blocks, {1: self.size}
        return (3, *(blocks[d].count if d in blocks else self.shape[d] // size.get(d, 1) for d in self.keep))

    @property
    def extents(self) -> tuple[tuple[str, int], ...]:
        """The indices of a batch norm's moments with their extents: C, and those of parts."""
        return tuple(("C" if d == 1 else f"p{d}", n) for d, n in zip(self.keep, self.moments[1:], strict=True))

    @property
    def count(self) -> int:
        """How many elements share moments; with parts, how many all parts have together."""
        return prod(self.shape) // prod(
            n for d, n in zip(self.keep, self.moments[1:], strict=True) if d not in self.blocks
        )

    @property
    def least(self) -> int:
        """How many elements the smallest part that isn't empty has."""
        rows = ([len(b.row(o)) for o in range(b.count)] for _, b in self.parts)
        rest = prod(n for d, n in enumerate(self.shape) if d not in self.keep)
        return rest * prod(min(filter(None, of), default=0) for of in rows)

    def check(self) -> None:
        """Raises ValueError, on all ranks alike: the variance of one value has no unbiased form."""
        if self.least == 1:
            raise ValueError(
                f"batch norm by parts of {list(self.shape)}: a part has 1 value a channel; more than 1 are expected "
                "when training"
            )

    def groups(self, x: Any) -> Any:
        """The tensor x with the elements that share moments in one dimension, the last."""
        rest = [d for d in range(len(self.shape)) if d not in self.keep]
        x = x.permute(*self.keep, *rest).reshape(*(self.shape[d] for d in self.keep), -1)
        if self.size == 1:
            return x
        k = self.keep.index(1)
        return x.unflatten(k, (-1, self.size)).movedim(k + 1, -1).flatten(-2)

    def leading(self, x: Any, *numbers: Any) -> Any:
        """The tensor x as [1, kept, averaged] if the kept dimensions come first and each of their elements has its own
        of `numbers`; else None."""
        kept = prod(x.shape[: len(self.keep)])
        first = self.keep == tuple(range(len(self.keep))) and x.numel()
        return x.reshape(1, kept, -1) if first and all(t.numel() == kept for t in numbers) else None

    def read(self, name: str) -> Operand:
        """The operand of moments, as x's blocks read them."""
        relations = {d: b.inverse for d, b in self.parts} | ({1: Ratio(1, self.size)} if self.size > 1 else {})
        return Operand(name, self.moments, (WHOLE, *(Made((f"d{d}",), relations.get(d)) for d in self.keep)))

    def spread(self, at: At, operand: int, moments: Any) -> Any:
        """The moments of each of x's elements here, from moments as read: [3, ...], with extents of 1 where x is
        averaged."""
        shape = [3] + [1] * len(self.shape)
        for k, d in enumerate(self.keep, 1):
            if self._is_shared(d, moments.shape[k]):
                moments = moments.index_select(k, self._of_each(at, operand, k, d, moments))
            shape[1 + d] = moments.shape[k]
        return moments.reshape(shape)

    def unspread(self, at: At, operand: int, found: Sequence[Any]) -> Any:
        """The gradient of moments as read, from the gradients of the three numbers that `spread` has made."""
        given, shape = torch.stack(list(found)), read_here(at, operand)
        given = given.reshape([3, *(given.shape[1 + d] for d in self.keep)])
        for k, d in enumerate(self.keep, 1):
            if self._is_shared(d, shape[k]):
                which = self._of_each(at, operand, k, d, given)
                sizes = [shape[j] if j == k else n for j, n in enumerate(given.shape)]
                given = given.new_zeros(sizes).index_add_(k, which, given)
        return given

    def _is_shared(self, d: int, there: int) -> bool:
        """Whether the rows of a dimension here must find their moments among several."""
        return self.size > 1 if d == 1 else d in self.blocks and there > 1

    def _of_each(self, at: At, operand: int, k: int, d: int, like: Any) -> Any:
        """For each row here, the number of its moments among those that are read."""
        first = at.inside[operand][k][0]
        if d == 1:
            return numbers(at.blocks["d1"], like) // self.size - first
        rows = (self.blocks[d].number(r) - first for r in range(*at.blocks[f"d{d}"]))
        return on_device(tuple(rows), torch.int64, like.device)

    def at_elements(self, moments: Any) -> Any:
        """The moments of every element of x, for references: [3, ...], with extents of 1 where x is averaged."""
        for k, d in enumerate(self.keep, 1):
            if d in self.blocks:
                sizes = [len(self.blocks[d].row(o)) for o in range(self.blocks[d].count)]
                moments = moments.repeat_interleave(torch.tensor(sizes), k)
            elif d == 1 and self.size > 1:
                moments = moments.repeat_interleave(self.size, k)
        return moments.reshape(3, *(n if d in self.keep else 1 for d, n in enumerate(self.shape)))
