"""Signatures: what each dimension of an operation's operands and results is made of; layouts and gradients follow.

A signature names indices. A dimension is an index (or a nest of them, outermost first), what a block of an index reads
through a relation, or whole. Give each grid axis one role, an index; then an operand that has the index is split on it,
one that lacks it holds copies, and a result that lacks an index which operands have is *partial* over the index's axes.
Every operation of a network is described so; nothing here knows what an operation computes.

The gradient of an operand as a row read it has a type as well (`Signature.gradient`): partial over the axes that have
a role in the row and don't split the operand, overlapping where it is windowed, equal over axes without a role.

Source: docs/design.md, One idea.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from convgen.algebra.blocks import most
from convgen.algebra.layout import Axes
from convgen.algebra.relations import Relation

# How ranks' addends become one: sums; maxima; moments (count, mean, sum of squared deviations) of disjoint parts.
Reduction = Literal["sum", "max", "merge"]


@dataclass(frozen=True, slots=True)
class Made:
    """What one dimension is made of.

    Attributes:
        indices: outermost first, e.g. ("G", "C") of grouped channels; none: whole, a rank needs all of it.
        relation: which of the dimension's rows a block of the (one) index reads; None: the block itself.
    """

    indices: tuple[str, ...] = ()
    relation: Relation | None = None

    def __str__(self) -> str:
        index = "*" if not self.indices else ",".join(self.indices)
        index = f"({index})" if len(self.indices) > 1 else index
        return index if self.relation is None else f"{self.relation.word}({index})"


WHOLE = Made()


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand or a result.

    Attributes:
        shape: extents in elements.
        dims: what each dimension is made of.
        gradient: whether it can have a gradient.
        integer: whether its elements are integers that number something (classes, rows).
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Made, ...]
    gradient: bool = True
    integer: bool = False

    @property
    def indices(self) -> frozenset[str]:
        return frozenset(i for d in self.dims for i in d.indices)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.dims))}]"


class Piece(NamedTuple):
    """How one dimension of a value lies on a grid: as blocks over `axes`, or as the rows that such blocks read."""

    axes: Axes
    relation: Relation | None = None


class Wanted(NamedTuple):
    """What a rank holds of an operand in a row: a piece a dimension; one addend of the sum over `partial`."""

    pieces: tuple[Piece, ...]
    partial: Axes = ()

    @property
    def split_by(self) -> frozenset[str]:
        """Axes over which ranks hold different parts, overlapping ones included."""
        return frozenset(a for p in self.pieces for a in p.axes)


@dataclass(frozen=True)
class Signature:
    """One way to compute an operation on blocks. Its text is the rule, in a line.

    Example:
        >>> x, w, y = Operand("x", (8, 5), (Made(("N",)), Made(("K",)))), Operand("w", (5,), (Made(("K",)),)), Operand(
        ...     "y", (8,), (Made(("N",)),)
        ... )
        >>> print(Signature((("N", 8), ("K", 5)), (x, w), (y,)))
        x[N, K], w[K] -> y[N], sum over K

    Attributes:
        extents: of each index, in elements.
        reduction: how addends over axes of summed indices become one.
        runs_empty: local code takes empty operands and gives what the result is without them (concatenation,
            padding by a constant); else a result of empty windows is zeros (minus infinity for maxima).
    """

    extents: tuple[tuple[str, int], ...]
    inputs: tuple[Operand, ...]
    results: tuple[Operand, ...]
    reduction: Reduction = "sum"
    runs_empty: bool = False

    def __post_init__(self) -> None:
        for operand in (*self.inputs, *self.results):
            if len(operand.dims) != len(operand.shape):
                raise ValueError(f"{operand.name}: {len(operand.dims)} entries for {len(operand.shape)} dimensions")
            for made, extent in zip(operand.dims, operand.shape, strict=True):
                if made.relation is not None and len(made.indices) != 1:
                    raise ValueError(f"{operand.name}: a relation is of one index, not of {made.indices}")
                if made.relation is None and made.indices and prod(self.extent[i] for i in made.indices) != extent:
                    raise ValueError(f"{operand.name}: {extent} elements are not {made.indices} of {self.extents}")
        for result in self.results:
            if any(d.relation for d in result.dims):
                raise ValueError(f"{result.name}: blocks of a result are its own")

    @cached_property
    def _hash(self) -> int:
        return hash((self.extents, self.inputs, self.results, self.reduction))

    def __hash__(self) -> int:  # signatures are keys of every cache
        return self._hash

    @cached_property
    def extent(self) -> dict[str, int]:
        return dict(self.extents)

    @cached_property
    def summed(self) -> frozenset[str]:
        """Indices of operands that some result lacks: an axis whose role is one of these leaves addends."""
        read = {i for o in self.inputs for i in o.indices}
        return frozenset(i for i in read if any(i not in r.indices for r in self.results))

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.results))
        over = ", ".join(i for i, _ in self.extents if i in self.summed)
        return " -> ".join(sides) + (f", {self.reduction} over {over}" if over else "")

    @cached_property
    def nests(self) -> tuple[tuple[str, ...], ...]:
        """Nests that have several indices of more than one element: these indices, outermost first."""
        found = (
            tuple(i for i in d.indices if self.extent[i] > 1) for o in (*self.inputs, *self.results) for d in o.dims
        )
        return tuple(dict.fromkeys(nest for nest in found if len(nest) > 1))

    @cached_property
    def beside(self) -> frozenset[str]:
        """Indices of one element that stand in a nest beside others: who splits one has all of the nest, or nothing."""
        dims = [d.indices for o in (*self.inputs, *self.results) for d in o.dims if len(d.indices) > 1]
        large = [indices for indices in dims if any(self.extent[i] > 1 for i in indices)]
        return frozenset(i for indices in large for i in indices if self.extent[i] == 1)

    def roles(self, roles: Mapping[str, Axes]) -> Axes:
        """Axes that have a role in the row."""
        return tuple(a for i, _ in self.extents for a in roles.get(i, ()))

    def partial(self, roles: Mapping[str, Axes]) -> Axes:
        """Axes over which some result is partial."""
        return tuple(a for i, _ in self.extents if i in self.summed for a in roles.get(i, ()))

    @cached_property
    def _lacks(self) -> dict[int, tuple[str, ...]]:
        """By result's id, the indices of operands that the result is a sum over."""
        read = {i for o in self.inputs for i in o.indices}
        return {id(r): tuple(i for i, _ in self.extents if i in read - r.indices) for r in self.results}

    def wants(self, operand: Operand, roles: Mapping[str, Axes]) -> Wanted:
        """What a rank reads of an operand, or makes of a result, under these roles (index -> axes, outermost first)."""
        pieces = tuple(
            [Piece(tuple([a for i in d.indices for a in roles.get(i, ())]), d.relation) for d in operand.dims]
        )
        if (lacks := self._lacks.get(id(operand))) is None:
            return Wanted(pieces)
        return Wanted(pieces, tuple([a for i in lacks for a in roles.get(i, ())]))

    def gradient(self, operand: Operand, roles: Mapping[str, Axes]) -> Wanted:
        """The type of what a rank finds as gradient of an operand from the gradient of its part of the result.

        Along an axis without a role all ranks compute the same, so each has a copy of the whole gradient. Along an axis
        with a role that doesn't split the operand each rank finds an addend, from its part of the result.
        """
        pieces = self.wants(operand, roles).pieces
        split = {a for p in pieces for a in p.axes}
        return Wanted(pieces, tuple(a for a in self.roles(roles) if a not in split))

    def fits(self, roles: Mapping[str, Axes], sizes: Mapping[str, int]) -> bool:
        """Whether local code can take the blocks of nests: an axis splits an outer index only while a rank has several
        of it, and an inner index only where each rank has at most one of the outer."""
        for operand in (*self.inputs, *self.results):
            for made in operand.dims:
                for i, outer in enumerate(made.indices[:-1]):
                    left = self.extent[outer]
                    for axis in (a for a in roles.get(outer, ()) if sizes[a] > 1):
                        if left == 1:
                            return False
                        left = most(left, sizes[axis])
                    inner = [a for index in made.indices[i + 1 :] for a in roles.get(index, ()) if sizes[a] > 1]
                    if left > 1 and inner:
                        return False
        return True
