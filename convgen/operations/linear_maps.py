"""Linear maps along dimensions: what average pooling and interpolation are.

ATen can't be told at which row of the whole a part begins. The matrix that its own operator makes of unit vectors can
be cut anywhere: its rows give the relation, and its nonzeros the local code where there is nothing better. There are
two ways: blocks of the result's rows, which read the operand's; or blocks of the operand's rows, whose addends make the
whole result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.relations import Relation, Table
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Derived, Operation, Work, made_here, numbered, own, touched


def of_unit_vectors(operator: Callable[[Any], Any], extent: int) -> Any:
    """The matrix [rows out, rows in] of a map of the rows of (N, C, rows), in float64."""
    return operator(torch.eye(extent, dtype=torch.float64)[None])[0].T


def table(matrix: Any) -> Table:
    """For each row of a matrix the hull of its nonzeros."""
    read = (matrix != 0).int()
    first, last = read.argmax(1), matrix.shape[1] - read.flip(1).argmax(1)
    some = read.any(1)
    return Table(tuple(zip((first * some).tolist(), (last * some).tolist(), strict=True)))


def hulls(operator: Callable[[Any], Any], extent: int, reach: int) -> Table:
    """The `table` of an operator's matrix, without making the matrix, whose size grows as a square: the time and memory
    are those of `2 * reach + 1` rows.

    Args:
        operator: a map of the rows of (N, C, rows) by weights that add up to 1 in each row.
        reach: how far at most the rows that one row reads lie from their weighted mean.
    """
    count = 2 * reach + 1
    if extent <= count:
        return table(of_unit_vectors(operator, extent))
    rows, some = torch.arange(extent, dtype=torch.float64), torch.arange(count)[:, None]
    combs = (torch.arange(extent) % count == some).double()  # an operator's row reads one row of a comb
    read, mean = operator(combs[None])[0] != 0, operator(rows[None, None])[0, 0]
    found = (some + count * ((mean - some) / count).round()).long()
    first = found.where(read, torch.tensor(extent)).amin(0)
    last = found.where(read, torch.tensor(-1)).amax(0) + 1
    return Table(tuple(zip(first.tolist(), last.tolist(), strict=True)))


class LinearMap(Operation):
    """y is x with a matrix applied along some of its dimensions."""

    shape: tuple[int, ...]  # of x

    @abstractmethod
    def matrix(self, d: int) -> Any:
        """The matrix of a dimension that `maps` names: [rows of y, rows of x]."""

    @property
    @abstractmethod
    def maps(self) -> Mapping[int, int]:
        """Dimensions that are mapped, each with its extent in y."""

    @cached_property
    def matrices(self) -> Mapping[int, Any]:
        return {d: self.matrix(d) for d in self.maps}

    def relation(self, d: int) -> Relation:
        """The relation of a dimension: the rows of x that a row of y reads."""
        return table(self.matrices[d])

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        out = tuple(self.maps.get(d, n) for d, n in enumerate(self.shape))
        reads = tuple(Made((i,), self.relation(d) if d in self.maps else None) for d, i in enumerate(names))
        summed = own(*(None if d in self.maps else i for d, i in enumerate(names)))
        x, y = Operand("x", self.shape, reads), Operand("y", out, own(*names))
        rows, whole = Operand("x", self.shape, own(*names)), Operand("y", out, summed)
        return (
            Signature(tuple(zip(names, out, strict=True)), (x,), (y,)),
            Signature(tuple(zip(names, self.shape, strict=True)), (rows,), (whole,)),
        )

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (y,) = operands
        for d, matrix in self.matrices.items():
            y = torch.movedim(torch.movedim(y, d, -1) @ self._part(way, d, at, matrix, y), -1, d)
        return (y,)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dx,) = dys
        if (
            way == 0
            and (made := self.back_at_once(dx, [at.blocks[f"d{d}"] for d in self.maps], at.inside[0])) is not None
        ):
            return (made,)
        for d, matrix in reversed([*self.matrices.items()]):
            dx = torch.movedim(torch.movedim(dx, d, -1) @ self._part(way, d, at, matrix, dx).T, -1, d)
        return (dx,)

    def back_at_once(self, dy: Any, blocks: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]]) -> Any:
        """The gradient of the rows that are read, by one call of ATen; None where there is no such call.

        Args:
            blocks: the blocks of y's rows, by mapped dimension.
            read: the rows of x, by mapped dimension.
        """
        return None

    def _part(self, way: int, d: int, at: At, matrix: Any, like: Any) -> Any:
        """The part of a matrix that is read here, transposed, on like's device; it is brought there once."""
        block, inside = at.blocks[f"d{d}"], at.inside[0][d]
        key = (way, d, block, inside if way == 0 else None, like.dtype, like.device)
        if key not in self._parts:
            here = matrix[slice(*block), slice(*inside)] if way == 0 else matrix[:, slice(*block)]
            with torch.inference_mode(False):
                self._parts[key] = here.T.to(like)
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(Adjoint(self), ("dy",))}

    def work(self, way: int, at: At) -> Work:
        """The work: two flops for each nonzero, with rows mapped one dimension after the other."""
        signature = self.signatures[way]
        made = prod(made_here(at, signature.results[0]))
        reads = {d: signature.inputs[0].dims[d].relation or self.relation(d) for d in self.maps}
        taps = sum(max(len(reads[d].row(o)) for o in range(n)) for d, n in self.maps.items())
        return Work(2 * made * taps, touched(at, signature))


@dataclass(frozen=True)
class Adjoint(LinearMap):
    """The map read from the other side: its gradient, with roles of its own."""

    of: LinearMap

    @cached_property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.signatures[0].results[0].shape

    @property
    def maps(self) -> Mapping[int, int]:
        return {d: self.of.shape[d] for d in self.of.maps}

    def matrix(self, d: int) -> Any:
        return self.of.matrices[d].T

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        if way == 0:
            read = [at.blocks[f"d{d}"] for d in range(len(self.shape))]
            made = self.of.back_at_once(operands[0], [at.inside[0][d] for d in self.maps], read)
            if made is not None:
                return (made,)
        return super().local(way, at, *operands)

    def relation(self, d: int) -> Relation:
        return self.of.relation(d).inverse

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x = torch.zeros(self.of.shape, dtype=operands[0].dtype, requires_grad=True)
        with torch.enable_grad():
            (y,) = self.of.reference(x)
        return torch.autograd.grad(y, x, operands[0], create_graph=operands[0].requires_grad)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(self.of, ("dy",))}
