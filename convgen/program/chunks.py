"""Rows in chunks: what moves for one chunk of an index travels while another is computed.

A chunk is a block of the row's indices like any other. What has to hold is that chunks stand side by side: the index is
a dimension of the result, what moves leaves that dimension as it is, and rows of the operand are read in order. Rows of
an operand that several chunks read come in with the first of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import block
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.relations import ReadBy, Taps
from convgen.algebra.signature import Operand
from convgen.algebra.tensors import Dim
from convgen.program.rows import Chain, Chunks, PlacedRow, index_sets, nameless

Ranks = NDArray[np.int64]
THERE, BACK = ("all_gather",), ("reduce_scatter", "all_reduce")


def chunk_faults(row: PlacedRow, grid: Grid) -> Iterator[str]:
    """Why a row can't be computed in its chunks, if it can't."""
    chunks, signature = row.chunks, row.signature
    if chunks is None:
        return
    i, k = chunks.index, chunks.operand
    if row.early is not None:
        yield "its halo is early: interior and boundary are its pieces"
    if i not in dict(signature.extents) or chunks.count < 2:
        yield f"{chunks.count} chunks of {i}"
        return
    if len(signature.results) != 1 or signature.reduction != "sum" or signature.results[0].integer:
        yield "it has several results, or no sum"
        return
    if k is None and not chunks.result:
        yield "nothing of it travels by chunks"
    for operand in (*signature.inputs, *signature.results):
        yield from _in_order(operand, i, is_result=operand is signature.results[0])
    if not any(i in made.indices for made in signature.results[0].dims):
        yield f"{i} is no dimension of {signature.results[0].name}"
        return
    if k is not None:
        operand = signature.inputs[k]
        if not any(i in made.indices for made in operand.dims):
            yield f"{i} is no dimension of {operand.name}"
            return
        yield from _moved(operand.name, row.fetch[k], THERE, dimension(operand, i))
        yield from _moved(f"d{operand.name}", row.back[k] or (), BACK, dimension(operand, i))
        if not (row.fetch[k] or row.back[k]):
            yield f"{operand.name} does not move"
    if chunks.result:
        (result,) = signature.results
        yield from _moved(result.name, row.store[0], BACK, dimension(result, i))
        yield from _moved(f"d{result.name}", row.given[0], THERE, dimension(result, i))
        if not (row.store[0] or row.given[0]):
            yield f"{result.name} does not move"
    lo, hi = _block(row, grid)
    if int((hi - lo).min()) < chunks.count:
        yield f"a rank has {int((hi - lo).min())} of {i} for {chunks.count} chunks"
    elif k is not None and any(bool((b <= a).any()) for a, b in brought(row, grid)):
        yield f"a chunk of {i} brings nothing of {signature.inputs[k].name}"


def _in_order(operand: Operand, index: str, *, is_result: bool) -> Iterator[str]:
    for made in operand.dims:
        if index not in made.indices:
            continue
        if made.indices != (index,):
            yield f"{index} is one of several indices of a dimension of {operand.name}"
        if made.relation is not None and (is_result or not isinstance(made.relation, Taps | ReadBy)):
            yield f"rows of {operand.name} are not read in order"


def _moved(name: str, chain: Chain, kinds: Sequence[str], d: int) -> Iterator[str]:
    """What moves leaves dimension d as it is."""
    if not chain:
        return
    if [c.kind for c in chain[1:]] or chain[0].kind not in kinds or chain[0].reduction is not None:
        yield f"{name} moves by {[c.kind for c in chain]}, not one of {', '.join(kinds)} alone"
        return
    c = chain[0]
    if c.src.has_window or c.dst.has_window:
        yield f"{name} has windows"
    if c.src.axes[d] != c.dst.axes[d] or set(c.src.axes[d]) & set(c.over):
        yield f"{name}: {c.kind} over {','.join(c.over)} moves the dimension that is cut"


def dimension(operand: Operand, index: str) -> int:
    """Which dimension of an operand an index is of."""
    return next(d for d, made in enumerate(operand.dims) if index in made.indices)


def _block(row: PlacedRow, grid: Grid) -> tuple[Ranks, Ranks]:
    """By rank, its block of the index that is cut into chunks."""
    assert row.chunks is not None
    i, signature = row.chunks.index, row.signature
    return index_sets(signature, grid).split(Dim(i, signature.extent[i]), dict(row.roles).get(i, ()))


def blocks_of(row: PlacedRow, grid: Grid) -> list[tuple[Ranks, Ranks]]:
    """For each chunk, by rank: the chunk's block of the index."""
    assert row.chunks is not None
    lo, hi = _block(row, grid)
    return [block(lo, hi, row.chunks.count, np.full_like(lo, j)) for j in range(row.chunks.count)]


def brought(row: PlacedRow, grid: Grid) -> list[tuple[Ranks, Ranks]]:
    """For each chunk, by rank: the operand's rows that come with it, as no chunk before it has brought them."""
    chunks = row.chunks
    assert chunks is not None and chunks.operand is not None
    operand = row.signature.inputs[chunks.operand]
    d = dimension(operand, chunks.index)
    made, fetch = operand.dims[d], row.fetch[chunks.operand]
    read = fetch[-1].dst if fetch else Layout(operand.name, row.reads[chunks.operand])
    held = index_sets(row.signature, grid).held(read)
    start, end = held[:, d, 0], held[:, d, 1]
    found: list[tuple[Ranks, Ranks]] = []
    for lo, hi in blocks_of(row, grid):
        last: Ranks = hi
        if made.relation is not None:
            first, last = made.relation.hull(*made.relation.window(lo, hi), operand.shape[d])
            last = np.where(last > first, last, start)
        last = np.clip(last, start, end)
        found.append((start, last))
        start = last
    found[-1] = (found[-1][0], end)
    return found


@lru_cache(maxsize=1 << 12)
def shares(row: PlacedRow, of_operand: bool, grid: Grid) -> list[NDArray[np.float64]]:
    """For each chunk, by rank: the chunk's part of all that moves for the operand, or for the result."""
    assert row.chunks is not None
    parts = brought(row, grid) if of_operand else blocks_of(row, grid)
    lengths = [hi - lo for lo, hi in parts]
    whole = np.maximum(sum(lengths, np.zeros_like(lengths[0])), 1)
    return [n / whole for n in lengths]


def in_chunks(row: PlacedRow, grid: Grid, count: int, index: str = "", whole: Collection[int] = ()) -> PlacedRow:
    """A row in chunks of an index; the row itself where none will do. The default is the index along which most of what
    moves can be cut; among those one that needs no row twice, and then the outermost in memory.

    Args:
        whole: operands that don't travel by chunks.
    """
    if row.is_cut or len(row.signature.results) != 1:
        return row
    chunks = _best(nameless(row), grid, count, index, frozenset(whole))
    return row if chunks is None else replace(row, chunks=chunks)


@lru_cache(maxsize=1 << 12)
def _best(row: PlacedRow, grid: Grid, count: int, index: str, whole: frozenset[int]) -> Chunks | None:
    signature = row.signature
    operands = [k for k in range(len(signature.inputs)) if k not in whole and travels(row.fetch[k], row.back[k] or ())]
    of_results = (True, False) if travels(row.given[0], row.store[0]) else (False,)
    found: list[tuple[int, int, int, Chunks]] = []
    for i, extent in signature.extents if operands or len(of_results) > 1 else ():
        if (index and i != index) or extent < count:
            continue
        for k in (*(k for k in operands if i in signature.inputs[k].indices), None):
            for of_result in of_results:
                chunks = Chunks(i, count, k, of_result)
                if not any(chunk_faults(replace(row, chunks=chunks), grid)):
                    moves = int(k is not None) + of_result
                    twice = sum(m.relation is not None for o in signature.inputs for m in o.dims if i in m.indices)
                    found.append((moves, -twice, -dimension(signature.results[0], i), chunks))
    return max(found, key=lambda f: f[:3])[3] if found else None


def travels(there: Chain, back: Chain) -> bool:
    """Whether these two chains, of an operand and of a result, may travel by chunks where a row can be cut."""
    kinds = [c.kind for c in there], [c.kind for c in back]
    return any(kinds) and kinds[0] in ([], *([k] for k in THERE)) and kinds[1] in ([], *([k] for k in BACK))
