"""Flops and elements of a row: of every rank, and of the one that has most.

Indices are split independently: some rank has any combination of their parts. So the largest parts of each index alone
give the busiest rank, without numbering ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from convgen.algebra.blocks import span
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import Spans
from convgen.algebra.layout import Axes
from convgen.algebra.relations import Relation
from convgen.algebra.signature import Made, Signature
from convgen.algebra.tensors import Dim
from convgen.operations.row import At, Launch, Operation, Work, repeats
from convgen.program.rows import index_sets

Nests = tuple[tuple[str, tuple[int, ...]], ...]
Reads = tuple[tuple[Relation, int], ...]


@lru_cache(maxsize=1 << 16)
def most_work(operation: Operation, way: int, nests: Nests, *, undone: bool = False) -> tuple[Launch, ...]:
    """Flops and elements of the rank with the most of each, launch by launch; the same on all grids with such nests,
    whatever their axes are called.

    Args:
        nests: by index, the numbers of parts that it is split into, outermost first.
        undone: whether launches are those whose gradients backward takes.
    """
    if type(operation).launches is Operation.launches:
        at = _fullest(operation.signatures[way], dict(nests))
        done = operation.undone(way, at) if undone else operation.launches(way, at)
    else:  # such launches depend on where blocks begin
        numbered = iter(range(sum(len(sizes) for _, sizes in nests)))
        axes = [(index, tuple((f"a{next(numbered)}", n) for n in sizes)) for index, sizes in nests]
        grid = Grid(tuple(pair for _, some in axes for pair in some))  # of the axes that split something
        roles = tuple((i, tuple(name for name, _ in some)) for i, some in axes)
        done = work_by_rank(operation, way, roles, grid, undone=undone)
    return tuple([replace(d, work=Work(int(np.max(d.work.flops)), int(np.max(d.work.elements)))) for d in done])


def _fullest(signature: Signature, nests: Mapping[str, tuple[int, ...]]) -> At:
    """Blocks of the ranks that may be busiest, and the rows that they read: numbers for one rank, else arrays."""
    read = relations(signature)
    parts = [largest_parts(n, nests.get(i, ()), read.get(i, ())) for i, n in signature.extents]
    count = [len(p) for p in parts]
    blocks: dict[str, Any] = {}
    rows: dict[tuple[str, Relation, int], Any] = {}
    for k, ((index, _), part) in enumerate(zip(signature.extents, parts, strict=True)):
        if prod(count) == 1:
            columns: list[Any] = list(part[0])
        else:
            shape = [n if j == k else 1 for j, n in enumerate(count)]
            columns = [np.broadcast_to(np.array(c).reshape(shape), count).ravel() for c in zip(*part, strict=True)]
        blocks[index] = 0, columns[0]
        for (relation, extent), column in zip(read.get(index, ()), columns[1:], strict=True):
            rows[index, relation, extent] = 0, column

    return at_blocks(signature, blocks, rows)


def at_blocks(signature: Signature, blocks: Mapping[str, Any], rows: Mapping[tuple[str, Relation, int], Any]) -> At:
    """A place in a row with blocks of these lengths.

    Args:
        rows: the rows that blocks read: (index, relation, rows that there are) -> an interval.
    """

    def inside(made: Made, extent: int) -> Any:
        if made.relation is not None:
            return rows[made.indices[0], made.relation, extent]
        return _side(made, extent, blocks, 0)

    found: Any = tuple([tuple([inside(m, n) for m, n in zip(o.dims, o.shape, strict=True)]) for o in signature.inputs])
    return At(blocks, found, found)


@lru_cache(maxsize=1 << 12)
def relations(signature: Signature) -> Mapping[str, Reads]:
    """By index, the relations by which it reads, each with the number of rows that there are."""
    found: dict[str, dict[tuple[Relation, int], None]] = {}
    for operand in signature.inputs:
        for made, extent in zip(operand.dims, operand.shape, strict=True):
            if made.relation is not None:
                found.setdefault(made.indices[0], {})[made.relation, extent] = None
    return {i: tuple(reads) for i, reads in found.items()}


@lru_cache(maxsize=1 << 16)
def largest_parts(extent: int, sizes: tuple[int, ...], reads: Reads) -> tuple[tuple[int, ...], ...]:
    """(elements, rows read by each relation) of an index's parts, without parts that have no more than another in all.

    Example:
        >>> from convgen.algebra.relations import Taps
        >>> largest_parts(10, (3,), ((Taps(3, 1, 1, 1), 10),))
        ((4, 5),)
    """
    count = prod(sizes)
    index = np.indices(sizes).reshape(len(sizes), count)
    lo, hi = span(extent, 1, sizes, tuple(index), np.zeros(count, dtype=np.int64))
    columns = [hi - lo]
    for relation, rows in reads:
        first, last = relation.hull(*relation.window(lo, hi), rows)
        columns.append(np.maximum(last - first, 0))
    kept: list[tuple[int, ...]] = []
    for one in sorted({tuple(map(int, row)) for row in np.stack(columns, axis=1)}, reverse=True):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)


def work_by_rank(
    operation: Operation, way: int, roles: tuple[tuple[str, Axes], ...], grid: Grid, *, undone: bool = False
) -> tuple[Launch, ...]:
    """Flops and elements, launch by launch, as arrays over ranks.

    Args:
        undone: whether launches are those whose gradients backward takes.
    """
    signature, nests = operation.signatures[way], dict(roles)
    sets = index_sets(signature, grid)
    zero = np.zeros(grid.ranks, dtype=np.int64)
    blocks: dict[str, Spans] = {}
    for index, extent in signature.extents:
        blocks[index] = sets.split(Dim(index, extent), nests.get(index, ()))
    inside = tuple(
        tuple(_side(made, n, blocks, zero) for made, n in zip(o.dims, o.shape, strict=True)) for o in signature.inputs
    )
    where: Any = (blocks, inside, inside)  # arrays over ranks, where a rank has numbers
    at = At(*where)
    return operation.undone(way, at) if undone else operation.launches(way, at)


def taken_back(
    launches: Sequence[Launch], asked: Collection[int] | None, derived: Collection[int] = ()
) -> Iterator[tuple[int, Launch]]:
    """Launches that backward takes, each with how often, as `repeats` counts; a convolution's gradients are launches of
    their own phases. Where `asked` is None, forward's launches, each once."""
    if asked is None:
        yield from ((1, one) for one in launches)
        return
    for often, one in zip(repeats(launches, asked, derived), launches, strict=True):
        if one.operation.convolves is None:
            yield often, one
            continue
        own = [k in asked and k not in derived for k in one.operands]
        inputs = one.operation.signatures[0].inputs  # the first may be what another launch has made
        wanted = [*[often > sum(own)] * (len(inputs) - len(own)), *own]
        for operand, is_wanted in zip(inputs, wanted, strict=True):
            if is_wanted:
                yield 1, replace(one, operation=one.operation.gradients[operand.name].operation)


def _side(made: Made, extent: int, blocks: Mapping[str, Any], zero: Any) -> Any:
    """How much each rank has of a dimension, from 0, as only relations ask where it begins."""
    if made.relation is not None:
        return made.relation.hull(*made.relation.window(*blocks[made.indices[0]]), extent)
    if not made.indices:
        return zero, zero + extent
    count = zero + 1
    for i in made.indices:
        count = count * (blocks[i][1] - blocks[i][0])
    return zero, count
