"""What overlap takes in memory, beside what rows take anyhow.

| what | is there | bytes of it |
|---|---|---|
| strips | what a boundary reads in place of a window, as long as backward may want it | own rows, and those that came |
| zeros | beside a part at an edge, which is padded by hand | the part once more |
| pieces | while a row's pieces are put together | its result once more |
| sums | of gradients of an operand that pieces read whole, while another is added | the gradient once more |
| packed | what is gathered or scattered in parts that have gaps in memory, while it moves | the same once more |
| bucket | gradients while they are packed; with more than two ranks also while they travel | the same once more |

Chunks of a gathered operand take what the whole operand does, and once more the rows that two chunks read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, volume
from convgen.algebra.redistribute import Conversion
from convgen.cost.network import bucket_elements, element_bytes
from convgen.operations.row import At, made_here, standing
from convgen.program.chunks import blocks_of, brought, dimension
from convgen.program.flow import Start, backward
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, at_rank, index_sets

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank computes of a row at once.

    Attributes:
        reads: shapes of operands.
        strip: whether the part that it reads of the early operand is put together; else it is part of a block.
        gaps: whether what it reads of the operand that moves, and what it makes, are parts of blocks with gaps in
            memory, which kernels copy first.
    """

    at: At
    reads: tuple[tuple[int, ...], ...]
    strip: bool = False
    gaps: tuple[bool, bool] = (False, False)


def parts_of(row: PlacedRow, grid: Grid, rank: int) -> tuple[Part, ...]:
    """The parts in which a rank computes a row: the whole; its interior, if there is one, and its boundary, as
    templates/runtime/pieces.py cuts them; or chunks."""
    at, signature = at_rank(row, grid, rank), row.signature
    if row.chunks is not None:
        cut = {(int(lo[rank]), int(hi[rank])) for lo, hi in blocks_of(row, grid)}
        k = row.chunks.operand or 0
        return tuple(_part(row, at, {**at.blocks, row.chunks.index: c}, k, _reads(at)[k]) for c in sorted(cut))
    if row.early is None or not row.split:
        return (Part(at, _reads(at)),)
    k, operand = row.early, signature.inputs[row.early]
    held = [(int(lo), int(hi)) for lo, hi in index_sets(signature, grid).held(row.fetch[k][0].src)[rank]]
    inner: dict[str, Interval] = {}
    for made, own, extent in zip(operand.dims, held, operand.shape, strict=True):
        if made.relation is not None:
            (i,) = made.indices
            inner[i] = made.relation.inside(*at.blocks[i], own, extent)
    if any(hi <= lo for lo, hi in inner.values()):
        return (Part(at, _reads(at), strip=True),)
    blocks, sides = dict(at.blocks), list[Part]()
    for i, (lo, hi) in inner.items():
        first, last = at.blocks[i]
        rows = [side for side in ((first, lo), (hi, last)) if side[1] > side[0]]
        sides += [replace(_part(row, at, {**blocks, i: side}, k), strip=True) for side in rows]
        blocks[i] = (lo, hi)
    return (_part(row, at, blocks, k, [hi - lo for lo, hi in held]), *sides)


def _part(row: PlacedRow, whole: At, blocks: Mapping[str, Interval], k: int, held: Sequence[int] | None = None) -> Part:
    """
    Args:
        held: the shape of the block of operand k that it reads a part of.
    """
    at, (result, *_) = replace(standing(row.signature, blocks), parts=whole.parts), row.signature.results
    gaps = held is not None and _has_gaps(_reads(at)[k], held)
    return Part(at, _reads(at), gaps=(gaps, _has_gaps(made_here(at, result), made_here(whole, result))))


def _reads(at: At) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(hi - lo for lo, hi in operand) for operand in at.inside)


def _has_gaps(part: Sequence[int], whole: Sequence[int]) -> bool:
    return any(a != b and prod(part[:d]) > 1 for d, (a, b) in enumerate(zip(part, whole, strict=True)))


def is_in_pieces(row: PlacedRow) -> bool:
    """Whether a row's result is put together from pieces; else it is whole, or pieces are sent one by one."""
    return (row.early is not None and row.split) or (row.chunks is not None and not row.chunks.result)


def is_summed(row: PlacedRow, k: int) -> bool:
    """Whether the gradient of an operand is a sum of gradients that pieces of the row make."""
    return k != row.early and row.split if row.early is not None else row.chunks is not None and k != row.chunks.operand


def result_elements(row: PlacedRow, grid: Grid, rank: int) -> int:
    """Elements of what local code makes on a rank."""
    at = {i: hi - lo for i, (lo, hi) in at_rank(row, grid, rank).blocks.items()}
    (result,) = row.signature.results
    return prod(prod(at[i] for i in made.indices) if made.indices else n
                for made, n in zip(result.dims, result.shape, strict=True))  # fmt: skip


def repacked(c: Conversion, sets: IndexSets, rank: int) -> int:
    """Elements that a rank packs, or unpacks, beside what a conversion reads and makes."""
    src, dst = ([int(hi - lo) for lo, hi in sets.held(side)[rank]] for side in (c.src, c.dst))
    if c.form != "whole" or c.kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return 0
    part, whole = (src, dst) if c.kind == "all_gather" else (dst, src)
    return prod(whole) if c.kind == "all_to_all" or _has_gaps(part, whole) else 0


def packed_bytes(program: Program, rank: int) -> dict[int, int]:
    """By the row whose backward starts a bucket, bytes of the bucket's gradients on a rank."""
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
    """For an operand that comes by chunks, elements that two chunks read, so that both have them."""
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
