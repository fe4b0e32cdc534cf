"""What travels meanwhile takes in memory, beside what rows take anyhow.

| what | is there | bytes of it |
|---|---|---|
| strips | what a boundary reads, as long as backward may want it, instead of a window | own rows, and those that came |
| pieces | while a row's pieces are put together | its result once more |
| packed | a bucket's gradients, from its start until all of backward has been, at most | they once more |

Gathered chunks are as much as what is gathered whole, but for rows that two chunks read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import volume
from convgen.cost.network import bucket_elements, element_bytes
from convgen.operations.row import At, standing
from convgen.program.chunks import blocks_of, brought, dimension
from convgen.program.flow import Start, backward
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, at_rank, index_sets

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank computes of a row at once.

    Attributes:
        shape: of what it reads of the operand whose halo is early.
        inside: whether that is a part of the rank's own block, else a strip that is put together.
        whole: whether it is all that the rank has of it.
    """

    at: At
    shape: tuple[int, ...]
    inside: bool
    whole: bool


def pieces_of(row: PlacedRow, grid: Grid, rank: int) -> tuple[Piece, ...]:
    """Of a row whose halo is early, the interior, if there is one, and the boundary, as templates/runtime/pieces.py cuts
    it; none of rows that are not cut."""
    if row.early is None or not row.split:
        return ()
    k, signature, at = row.early, row.signature, at_rank(row, grid, rank)
    layouts, sets = row.fetch[k][0], index_sets(signature, grid)
    operand = signature.inputs[k]
    held, window = (
        tuple((int(lo), int(hi)) for lo, hi in sets.held(layout)[rank]) for layout in (layouts.src, layouts.dst)
    )

    def piece(blocks: Mapping[str, Interval], inside: bool) -> Piece:
        box = [
            own if made.relation is None else made.relation.hull(*made.relation.window(*blocks[made.indices[0]]), n)
            for made, own, n in zip(operand.dims, window, operand.shape, strict=True)
        ]
        shape = tuple(hi - lo for lo, hi in box)
        return Piece(standing(signature, blocks), shape, inside, shape == tuple(hi - lo for lo, hi in held))

    inner: dict[str, Interval] = {}
    for made, own, extent in zip(operand.dims, held, operand.shape, strict=True):
        if made.relation is not None:
            (i,) = made.indices
            inner[i] = made.relation.inside(*at.blocks[i], own, extent)
    if any(hi <= lo for lo, hi in inner.values()):
        return (piece(at.blocks, False),)
    blocks, sides = dict(at.blocks), list[Piece]()
    for i, (lo, hi) in inner.items():
        first, last = at.blocks[i]
        sides += [piece(blocks | {i: side}, False) for side in ((first, lo), (hi, last)) if side[1] > side[0]]
        blocks[i] = (lo, hi)
    return (piece(blocks, True), *sides)


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
