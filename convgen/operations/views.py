"""The same numbers under other dimensions: views, permutations, expansion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from convgen.algebra.relations import Ratio
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.element_texts import SAME, ElementStep
from convgen.operations.row import At, Operation, Passes, fit, made_here, numbered, own, read_here, summed_to

MANY = 1009  # stands for the number of samples, so that a view of 1 sample is matched like one of several


@dataclass(frozen=True, slots=True)
class Match:
    """Neighbouring dimensions of x and of y whose extents have the same product; extents of 1 are in no match."""

    x: tuple[int, ...]
    y: tuple[int, ...]


def matches(shape: Sequence[int], out: Sequence[int]) -> tuple[Match, ...]:
    """The shortest matches of which a view is made.

    Example:
        >>> matches((4, 6, 5), (4, 2, 3, 5))
        (Match(x=(0,), y=(0,)), Match(x=(1,), y=(1, 2)), Match(x=(2,), y=(3,)))
    """
    left, right = ([d for d, n in enumerate(side) if n > 1] for side in (shape, out))
    found: list[Match] = []
    while left:
        x, y = [left.pop(0)], [right.pop(0)]
        while (p := prod(shape[d] for d in x)) != (q := prod(out[d] for d in y)):
            if p < q:
                x.append(left.pop(0))
            else:
                y.append(right.pop(0))
        found.append(Match(tuple(x), tuple(y)))
    return tuple(found)


class Open(NamedTuple):
    """A view for any sizes that are known at run time only.

    Attributes:
        shape, out: the shapes at sizes that no other extent has.
        x, y: the dimensions whose extents depend on these sizes.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]


class Parts(NamedTuple):
    """A match in a signature: its indices with extents, and what its dimensions of x and of y are made of."""

    extents: dict[str, int]
    x: dict[int, Made]
    y: dict[int, Made]


@dataclass(frozen=True)
class View(Operation):
    """The tensor x in another shape. There are two ways. In the first, the outermost dimension of each match's result
    reads rows of x's outermost one, in any blocks. In the second, where every match joins or splits dimensions, these
    are nests, each dimension an index. A match with a size known at run time only has the first way alone: nests need
    blocks of one size, and ranks may have unequal ones.

    Attributes:
        like: the view for any sizes, where a shape depends on sizes that are known at run time only.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]
    like: Open | None = field(default=None, metadata={"derived": True})

    any_order = True

    def for_any(self, many: Operation, more: Operation) -> Operation:
        assert isinstance(many, View) and isinstance(more, View)
        x, y = (
            tuple(d for d, (m, n) in enumerate(zip(*sides, strict=True)) if m != n)
            for sides in ((many.shape, more.shape), (many.out, more.out))
        )
        return replace(self, like=Open(many.shape, many.out, x, y)) if x else self

    @property
    def passes(self) -> Passes:
        return "none"

    @property
    def hands_gradient_on(self) -> bool:
        return True

    @cached_property
    def matches(self) -> tuple[Match, ...]:
        return matches(self.like.shape, self.like.out) if self.like else matches(self.shape, self.out)

    def _is_open(self, match: Match) -> bool:
        """Whether a match joins or splits a dimension whose extent is known at run time only."""
        joined = max(len(match.x), len(match.y)) > 1
        return self.like is not None and joined and not set(self.like.x).isdisjoint(match.x)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        rows = self._signature([self._by_rows(m) for m in self.matches])
        if all(len(m.x) == 1 or len(m.y) == 1 for m in self.matches):
            nests = [self._by_rows(m) if self._is_open(m) else self._by_nests(m) for m in self.matches]
            return rows, self._signature(nests)
        return (rows,)

    def _signature(self, parts: Sequence[Parts]) -> Signature:
        """The signature of these matches; dimensions that are in no match are whole."""
        extents = {i: n for p in parts for i, n in p.extents.items()}
        x = {d: made for p in parts for d, made in p.x.items()}
        y = {d: made for p in parts for d, made in p.y.items()}
        read = Operand("x", self.shape, tuple(x.get(d, WHOLE) for d in range(len(self.shape))))
        result = Operand("y", self.out, tuple(y.get(d, WHOLE) for d in range(len(self.out))))
        return Signature(tuple(extents.items()), (read,), (result,))

    def _by_rows(self, match: Match) -> Parts:
        (a, *_), (b, *_) = match.x, match.y
        index, (one, other) = f"d{b}", self._units(match)
        same = len(match.x) == len(match.y) == 1
        read = Made((index,), None if same else Ratio(other, one))
        return Parts({index: self.out[b]}, {a: read}, {b: Made((index,))})

    def _by_nests(self, match: Match) -> Parts:
        parts, shape = (match.x, self.shape) if len(match.y) == 1 else (match.y, self.out)
        names = tuple(f"d{match.y[0]}{'abcdefgh'[k]}" for k in range(len(parts)))
        extents = {i: shape[d] for i, d in zip(names, parts, strict=True)}
        each = {d: Made((i,)) for i, d in zip(names, parts, strict=True)}
        x, y = (each if dims == parts else {dims[0]: Made(names)} for dims in (match.x, match.y))
        return Parts(extents, x, y)

    def _units(self, match: Match) -> tuple[int, int]:
        """How many elements a row of x's outermost dimension has, and one of y's."""
        return prod(self.shape[d] for d in match.x[1:]), prod(self.out[d] for d in match.y[1:])

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (x,) = operands
        here = made_here(at, self.signatures[way].results[0])
        flat = x.reshape([prod(x.shape[d] for d in m.x) for m in self.matches])
        for k, (lo, hi) in self._cuts(way, at):
            flat = flat.narrow(k, lo, hi - lo)
        return (flat.reshape(here),)

    def _cuts(self, way: int, at: At) -> Iterator[tuple[int, tuple[int, int]]]:
        """By number of a match, the interval that the rank makes of the elements that it reads."""
        for k, match in enumerate(self.matches):
            if way == 0 or self._is_open(match):
                one, other = self._units(match)
                first, (lo, hi) = at.inside[0][match.x[0]][0] * one, at.blocks[f"d{match.y[0]}"]
                yield k, (lo * other - first, hi * other - first)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), shape = dys, read_here(at, 0)
        flat = [prod(shape[d] for d in m.x) for m in self.matches]
        have = [(0, n) for n in flat]
        for k, cut in self._cuts(way, at):
            have[k] = cut
        dy = dy.reshape([hi - lo for lo, hi in have])
        return (fit(dy, have, [(0, n) for n in flat]).reshape(shape),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].reshape(self.out),)


@dataclass(frozen=True)
class Permute(Operation):
    """Dimension d of y is dimension order[d] of x."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    any_order = True

    @property
    def hands_gradient_on(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x = Operand("x", self.shape, own(*names))
        y = Operand("y", tuple(self.shape[d] for d in self.order), own(*(names[d] for d in self.order)))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].permute(self.order),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        return (dys[0].permute([self.order.index(d) for d in range(len(self.order))]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        letters = "abcdefgh"[: len(self.shape)]
        return (torch.einsum(f"{letters}->{''.join(letters[d] for d in self.order)}", operands[0]),)


@dataclass(frozen=True)
class Expand(Operation):
    """The tensor x repeated along dimensions of extent 1, and along new ones before the first."""

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, new = numbered(len(self.out)), len(self.out) - len(self.shape)
        there = (
            i if self.out[new + d] == n else None for d, (i, n) in enumerate(zip(names[new:], self.shape, strict=True))
        )
        x, y = Operand("x", self.shape, own(*there)), Operand("y", self.out, own(*names))
        return (Signature(tuple(zip(names, self.out, strict=True)), (x,), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (operands[0].expand([at.extent(i) for i in numbered(len(self.out))]),)

    def element_step(self) -> ElementStep | None:
        return SAME._replace(is_free=True)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        return (summed_to(dys[0], read_here(at, 0)),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        return (operands[0] * torch.ones(self.out, dtype=operands[0].dtype),)
