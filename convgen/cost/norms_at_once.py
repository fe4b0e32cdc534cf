"""Layer, group and instance norms that a rank computes in one call of ATen, as templates/runtime/norms.py does: the
last row makes its result from what the first row reads, and the rows between do nothing."""

from __future__ import annotations

from convgen.operations.moments import Moments, Normalise
from convgen.program.behind_norms import readers_of, vectors_behind
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, at_rank


def norms_at_once(program: Program, rank: int) -> dict[int, str]:
    """By number of a row: `left`, moments that are not computed; `handed`, a row that hands on what it reads, forward
    and backward; `made`, the row that computes all."""
    found: dict[int, str] = {}
    makers = {v: i for i, row in enumerate(program.rows) for v in row.bound.makes}
    readers = readers_of(program)
    for i, row in enumerate(program.rows):
        operation = row.bound.operation
        if not isinstance(operation, Normalise) or readers[row.bound.reads[1]] != [i]:
            continue
        m = makers.get(row.bound.reads[1])
        if m is None or not _is_whole(program, program.rows[m], row, rank):
            continue
        lines = [i, *vectors_behind(program, i, readers)]
        found |= {m: "left"} | dict.fromkeys(lines, "handed") | {lines[-1]: "made"}
    return found


def _is_whole(program: Program, moments: PlacedRow, row: PlacedRow, rank: int) -> bool:
    """Whether all elements that share moments are on one rank and are normalised there."""
    operation, derived = moments.bound.operation, dict(moments.derived).get(0)
    if not isinstance(operation, Moments) or derived is None or moments.bound.reads[0] != row.bound.reads[0]:
        return False
    of, rms = operation.of, getattr(row.bound.operation, "rms", False)
    if of.keep != tuple(range(len(of.keep))) or of.parts or rms or not (row.is_silent and derived.is_silent):
        return False
    moved = any((*moments.fetch, *moments.store, *moments.given, *(b for b in moments.back if b)))
    if moved or any(r.early is not None or r.chunks is not None for r in (moments, derived, row)):
        return False
    return at_rank(moments, program.grid, rank).inside[0] == at_rank(row, program.grid, rank).inside[0]
