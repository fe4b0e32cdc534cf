"""What a network's program sends: the bytes of every step, exactly and for every rank (DESIGN section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from convgen.algebra.grid import Grid
from convgen.cost.moving import sent_elements
from convgen.program.network import FLOATS, Moved, Program
from convgen.program.rows import PlacedRow, index_sets


def volume(program: Program, *, of_inputs: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Bytes that each rank sends in each step of "forward" and "backward"; what sends nothing is left out: slices, and
    exchanges for other numbers of samples.

    Args:
        of_inputs: whether inputs want gradients, too.
    """
    backward = program.backward(of_inputs=of_inputs)
    return {"forward": records(program, program.forward()), "backward": records(program, backward)}


def records(program: Program, steps: Iterable[Moved]) -> list[dict[str, Any]]:
    """Of some conversions of a program, in VOLUME's form."""
    return [record for moved in steps for record in _record(program, moved)]


def _record(program: Program, moved: Moved) -> Iterator[dict[str, Any]]:
    c = moved.conversion
    if c.kind == "slice":
        return
    size = element_bytes(_dtype(program, moved))
    sent = sent_elements(index_sets(moved.placed.signature, program.grid), c)
    if c.kind == "exchange" and not sent.any():
        return
    yield {
        "step": moved.step,
        "collective": c.kind,
        "axes": list(c.over),
        "bytes_sent_per_rank": [int(n) * size for n in sent],
    }


def _dtype(program: Program, moved: Moved) -> str:
    """Of what moves; a result that nobody reads has the type of what it is made of."""
    if moved.value in program.values:
        return program.values[moved.value].dtype
    if moved.placed.signature.results[moved.chain[1]].integer:
        return "int64"
    return next((v.dtype for n in moved.placed.bound.reads if (v := program.values[n]).dtype in FLOATS), "float32")


def bytes_of(row: PlacedRow, grid: Grid) -> int:
    """Elements that all ranks send for a row, forward and backward."""
    chains = [*row.fetch, *row.store, *(b for b in row.back if b)]
    chains += row.given if any(b is not None for b in row.back) else ()
    sets = index_sets(row.signature, grid)
    own = sum(int(sent_elements(sets, c).sum()) for chain in chains for c in chain)
    return own + sum(bytes_of(one, grid) for _, one in row.derived)


def element_bytes(dtype: str) -> int:
    """Of a torch dtype's name."""
    return {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}.get(
        dtype, 8
    )
