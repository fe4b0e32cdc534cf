"""Which measured travel a program's step is, as a machine's file names these."""

from __future__ import annotations

from convgen.cost.measured_steps import Travel
from convgen.cost.network import bucket_record
from convgen.cost.rows import Price
from convgen.program.flow import Start
from convgen.program.network import Moved, Program
from convgen.program.rows import index_sets


def travel_of(program: Program, price: Price, step: Moved | Start) -> Travel | None:
    """The travel of a step; None where nothing moves, or for a chunk, which is priced by its whole conversion."""
    if isinstance(step, Start) and step.bucket is not None:
        moves = price.of(step.bucket.dtype).moves
        sent = max(bucket_record(program, step.bucket, step.moved)["bytes_sent_per_rank"]) // moves.element_bytes
        found = moves.travel("all_reduce", step.bucket.over, sent)
    elif isinstance(step, Start) and step.chunk:
        return None
    else:
        moved = step if isinstance(step, Moved) else step.moved[0]
        c, moves = moved.conversion, price.of(program.dtype_of(moved)).moves
        if c.kind == "slice":
            return None
        found = moves.travel(c.kind, c.over, moves.moved(index_sets(moved.placed.signature, program.grid), c).sent)
    return found if found.sent_bytes else None
