"""What travels meanwhile takes in memory, beside what rows take anyhow.

| what | is there | bytes of it |
|---|---|---|
| strips | what a boundary reads, as long as backward may want it, instead of a window | own rows, and those that came |
| pieces | while a row's pieces are put together | its result once more |
| packed | a bucket's gradients, from its start until all of backward has been, at most | they once more |

Gathered chunks are as much as what is gathered whole, but for rows that two chunks read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import volume
from convgen.algebra.tensors import Dim
from convgen.cost.network import bucket_elements, element_bytes
from convgen.program.chunks import blocks_of, brought, dimension
from convgen.program.flow import Start, backward
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, at_rank, index_sets

Interval = tuple[int, int]


def strip_elements(row: PlacedRow, k: int, grid: Grid, rank: int) -> int:
    """Elements that the boundary of a row reads on a rank; 0 where it has none."""
    if not row.split:
        return 0
    signature, sets = row.signature, index_sets(row.signature, grid)
    operand, layouts = signature.inputs[k], row.fetch[k][0]
    held, window = (sets.held(layout)[rank] for layout in (layouts.src, layouts.dst))
    sizes = [int(hi - lo) for lo, hi in window]
    total = 0
    for d, made in enumerate(operand.dims):
        if made.relation is None:
            continue
        (index,) = made.indices
        spans = sets.split(Dim(index, signature.extent[index]), dict(row.roles).get(index, ()))
        lo, hi = (int(side[rank]) for side in spans)
        own = int(held[d, 0]), int(held[d, 1])
        first, last = made.relation.inside(lo, hi, own, operand.shape[d])
        others = prod(n for e, n in enumerate(sizes) if e != d)
        total += others * sum(_rows(row, k, d, side) for side in ((lo, first), (last, hi)))
        sizes[d] = _rows(row, k, d, (first, last))
    return total


def _rows(row: PlacedRow, k: int, d: int, block: Interval) -> int:
    """Rows of an operand that a block of the index reads."""
    relation, extent = row.signature.inputs[k].dims[d].relation, row.signature.inputs[k].shape[d]
    assert relation is not None
    first, last = relation.hull(*relation.window(*block), extent)
    return max(last - first, 0) if block[1] > block[0] else 0


def is_in_pieces(row: PlacedRow) -> bool:
    """Whether a row's result is put together of pieces, and not sent one by one."""
    return (row.early is not None and row.split) or (row.chunks is not None and not row.chunks.result)


def result_elements(row: PlacedRow, grid: Grid, rank: int) -> int:
    """Of what local code makes, on a rank."""
    at = {i: hi - lo for i, (lo, hi) in at_rank(row, grid, rank).blocks.items()}
    (result,) = row.signature.results
    return prod(prod(at[i] for i in made.indices) if made.indices else n
                for made, n in zip(result.dims, result.shape, strict=True))  # fmt: skip


def packed_bytes(program: Program, rank: int) -> dict[int, int]:
    """By row in whose backward a bucket is started, bytes of its gradients on a rank."""
    found: dict[int, int] = {}
    for start in _buckets(program):
        row = start.moved[-1].row
        assert start.bucket is not None
        counts = bucket_elements(program, start.moved)
        found[row] = found.get(row, 0) + int(np.asarray(counts)[rank]) * element_bytes(start.bucket.dtype)
    return found


def _buckets(program: Program) -> Iterator[Start]:
    yield from (s for s in backward(program) if isinstance(s, Start) and s.bucket is not None)


def overlap_elements(row: PlacedRow, grid: Grid, rank: int) -> int:
    """Of an operand that comes by chunks, elements that two chunks read, and each has."""
    chunks = row.chunks
    if chunks is None or chunks.operand is None:
        return 0
    operand = row.signature.inputs[chunks.operand]
    d = dimension(operand, chunks.index)
    relation, fetch = operand.dims[d].relation, row.fetch[chunks.operand]
    if relation is None or not fetch:
        return 0
    box = index_sets(row.signature, grid).held(fetch[-1].dst)
    others = int(volume(np.delete(box, d, axis=1))[rank])
    twice = 0
    for (lo, hi), (start, _) in zip(blocks_of(row, grid), brought(row, grid), strict=True):
        first, _ = relation.hull(*relation.window(int(lo[rank]), int(hi[rank])), operand.shape[d])
        twice += max(int(start[rank]) - int(first), 0)
    return twice * others
