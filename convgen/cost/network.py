"""What a network's program sends: the bytes of every step, exactly and for every rank (DESIGN section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import Box
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Conversion
from convgen.cost.traffic import elements_sent
from convgen.program.network import Moved, Program
from convgen.program.rows import PlacedRow, index_sets


def volume(program: Program) -> dict[str, list[dict[str, Any]]]:
    """Bytes that each rank sends in each step of "forward" and "backward"; slices send nothing and are left out."""
    return {"forward": _records(program, program.forward()), "backward": _records(program, program.backward())}


def _records(program: Program, steps: Iterable[Moved]) -> list[dict[str, Any]]:
    return [record for moved in steps for record in _record(program, moved)]


def _record(program: Program, moved: Moved) -> Iterator[dict[str, Any]]:
    c = moved.conversion
    if c.kind == "slice":
        return
    known = program.values.get(moved.value)
    size = element_bytes(known.dtype if known else "float32")
    yield {
        "step": moved.step,
        "collective": c.kind,
        "axes": list(c.over),
        "bytes_sent_per_rank": [n * size for n in sent_elements(moved.placed, program.grid, c)],
    }


def bytes_of(row: PlacedRow, grid: Grid) -> int:
    """Elements that all ranks send for a row, forward and backward."""
    chains = [*row.fetch, *row.store, *(b for b in row.back if b)]
    chains += row.given if any(b is not None for b in row.back) else ()
    own = sum(sum(sent_elements(row, grid, c)) for chain in chains for c in chain)
    return own + sum(bytes_of(one, grid) for _, one in row.derived)


def sent_elements(row: PlacedRow, grid: Grid, c: Conversion) -> list[int]:
    """Elements that leave each rank."""
    sets = index_sets(row.signature, grid)
    if c.kind == "exchange" and c.reduction is not None:
        return overlapping(sets.held(c.src), sets.held(c.dst), grid, c.over)
    return [int(n) for n in elements_sent(sets, c.kind, c.over, c.src, c.dst)]


def element_bytes(dtype: str) -> int:
    """Of a torch dtype's name."""
    return {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}.get(
        dtype, 8
    )


def overlapping(held: Box, kept: Box, grid: Grid, over: Axes) -> list[int]:
    """Of parts that are added where they overlap, what each rank holds of others' blocks."""
    ids = grid.group_ids(over)
    lo = np.maximum(held[:, None, :, 0], kept[None, :, :, 0])
    hi = np.minimum(held[:, None, :, 1], kept[None, :, :, 1])
    both = np.maximum(hi - lo, 0).prod(axis=-1) * (ids[:, None] == ids[None, :])
    np.fill_diagonal(both, 0)
    return [int(n) for n in both.sum(axis=1)]
