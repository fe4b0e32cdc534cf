"""Tensors that own their dimensions, and the rows that are read of them."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.algebra.relations import Relation


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension that axes may split: its name, extent in elements, and how many groups it is made of."""

    name: str
    extent: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an operation or a program.

    Attributes:
        dims: those that axes may split, outermost first.
        inner: elements per index of these, never split (a kernel's taps).
    """

    name: str
    dims: tuple[Dim, ...]
    inner: int = 1

    @property
    def elements(self) -> int:
        count = self.inner
        for d in self.dims:
            count *= d.extent
        return count


@dataclass(frozen=True, slots=True)
class Rows:
    """What a reader needs of one dimension: the rows that its blocks of `index` read through `relation`.

    Attributes:
        is_open: whether extents are known at run time only: then a block is taken to need other blocks' rows, whatever
            it needs at the extents that are here.
    """

    relation: Relation
    index: Dim
    is_open: bool = False
