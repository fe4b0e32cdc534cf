"""What a network's program sends: exact bytes of every step and rank (docs/design.md, Two views of a step)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import volume as volume_of
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Kind
from convgen.cost.busiest import Counts, sent_elements
from convgen.cost.traffic import all_reduced
from convgen.program.chunks import shares
from convgen.program.flow import GRADIENTS, Flow, Start, backward, forward, is_of_operand
from convgen.program.network import Bucket, Moved, Program
from convgen.program.rows import PlacedRow, index_sets


def volume(program: Program, *, of_inputs: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Bytes that each rank sends in each step of "forward" and "backward". Steps that send nothing are left out:
    slices, and exchanges that other numbers of samples need.

    A bucket is one step, where it starts; "of" names the steps that it stands for, and "lane" what it travels on. A
    chunk is a step too, and "of" names the step that it is a chunk of.

    Args:
        of_inputs: whether inputs want gradients, too.
    """
    return {
        "forward": sent(program, forward(program)),
        "backward": sent(program, backward(program, of_inputs=of_inputs)),
    }


def sent(program: Program, steps: Iterable[Flow]) -> list[dict[str, Any]]:
    """Some steps of a program in VOLUME's form, in the order in which they start."""
    found: list[dict[str, Any]] = []
    for step in steps:
        if isinstance(step, Moved):
            found += _record(program, step)
        elif isinstance(step, Start) and step.bucket is not None:
            found.append(bucket_record(program, step.bucket, step.moved))
        elif isinstance(step, Start) and step.chunk:
            found.append(chunk_record(program, step))
        elif isinstance(step, Start):
            found += [r | {"lane": step.lane} for moved in step.moved for r in _record(program, moved)]
    return found


def record(step: str, kind: Kind, over: Axes, sent: Counts, element_bytes: int) -> dict[str, Any]:
    """A step in VOLUME's form, of a layer or a network; `sent`: elements by rank."""
    by_rank = [int(n) * element_bytes for n in sent]
    return {"step": step, "collective": kind, "axes": list(over), "bytes_sent_per_rank": by_rank}


def bucket_record(program: Program, bucket: Bucket, moved: Sequence[Moved]) -> dict[str, Any]:
    """One all-reduce of a bucket's whole content, cut into pieces by the block rule over its count of elements."""
    grid, size = program.grid, element_bytes(bucket.dtype)
    counts = bucket_elements(program, moved)
    one = record(bucket.name, "all_reduce", bucket.over, all_reduced(grid, bucket.over, counts), size)
    return one | {"of": [m.step for m in moved], "lane": GRADIENTS}


def chunk_record(program: Program, start: Start) -> dict[str, Any]:
    """A chunk of a conversion; what a rank sends is proportional to the chunk's part of the rows."""
    (moved,) = start.moved
    c, grid, row = moved.conversion, program.grid, moved.placed
    assert row.chunks is not None
    sets = index_sets(row.signature, grid)
    share = shares(row, is_of_operand(moved), grid)[start.chunk - 1]
    if c.kind == "all_reduce":
        sent = all_reduced(grid, c.over, _part_of(volume_of(sets.held(c.src)), share))
    else:
        sent = _part_of(sent_elements(sets, c), share)
    one = record(start.name, c.kind, c.over, sent, element_bytes(program.dtype_of(moved)))
    return one | {"of": [moved.step], "lane": start.lane}


def _part_of(counts: Counts, share: NDArray[np.float64]) -> Counts:
    return np.rint(counts * share).astype(np.int64)


def bucket_elements(program: Program, moved: Iterable[Moved]) -> Counts:
    """By rank, elements of the gradients that these steps sum."""
    found = np.zeros(program.grid.ranks, dtype=np.int64)
    for m in moved:
        found += volume_of(index_sets(m.placed.signature, program.grid).held(m.conversion.src))
    return found


def records(program: Program, steps: Iterable[Moved]) -> list[dict[str, Any]]:
    """Some conversions of a program in VOLUME's form."""
    return [record for moved in steps for record in _record(program, moved)]


def _record(program: Program, moved: Moved) -> Iterator[dict[str, Any]]:
    c = moved.conversion
    if c.kind == "slice":
        return
    sent = sent_elements(index_sets(moved.placed.signature, program.grid), c)
    if c.kind != "exchange" or sent.any():
        yield record(moved.step, c.kind, c.over, sent, element_bytes(program.dtype_of(moved)))


def bytes_of(row: PlacedRow, grid: Grid) -> int:
    """Elements that all ranks send for a row, forward and backward."""
    chains = [*row.fetch, *row.store, *(b for b in row.back if b)]
    chains += row.given if any(b is not None for b in row.back) else ()
    sets = index_sets(row.signature, grid)
    own = sum(int(sent_elements(sets, c).sum()) for chain in chains for c in chain)
    return own + sum(bytes_of(one, grid) for _, one in row.derived)


def element_bytes(dtype: str) -> int:
    """Bytes of an element, by the name of a torch dtype."""
    return {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}.get(
        dtype, 8
    )
