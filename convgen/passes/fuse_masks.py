"""`fuse-masks`: the backward-data kernel of a convolution makes the gradient of the rectifier before it, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.operations.batch_norm import IMAGES, Centred
from convgen.operations.fused import Fused
from convgen.passes.contract import NetworkPass
from convgen.passes.fuse_epilogues import renamed
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, place
from convgen.program.wide import Group, chains, faults, joined, widened
from convgen.spec.graph import FLOATS

FEW = 64  # fewer channels, with a stride, are read as blocks of rows, by kernels of several launches each


@dataclass(frozen=True)
class FuseMasks(NetworkPass):
    """A convolution, and a row of one operand before it whose gradient follows from its result, become one row.

        %r = relu %b
        %y = conv_forward %r, %w        --->   %y = relu_conv_forward %b, %w

    Needs:  a GPU, whose backward-data kernel does the step before it writes; `fuse-epilogues` before: a step that has
        joined the convolution in front of it saves more there.
    Sound:  nothing moves between them, forward or backward, no other row reads %r, and it has one type; it is kept for
        the filter's gradient anyway.
    Leaves: what a batch norm's kernels do (kernels/norms.py), without reading the result; convolutions in groups, of
        one dimension, or of few channels with a stride, as their kernels can't do the step; and convolutions whose
        gradients are rows of their own, or travel meanwhile.
    """

    name: ClassVar[str] = "fuse-masks"

    def run(self, program: Program) -> Program:
        done = {row.bound.makes[0] for row in program.rows if _is_norm(row)}
        pairs = [chain[n : n + 2] for chain in chains(program) for n in range(len(chain) - 1)]
        pairs = [p for p in pairs if program.rows[p[0]].bound.reads[0] not in done]
        found = widened(program, [p for p in pairs if _fits(program, *(program.rows[i] for i in p))], _as_one)
        if found is program or not program.buckets:
            return found
        return replace(found, buckets=tuple(renamed(program, found)))


def _is_norm(row: PlacedRow) -> bool:
    operation = row.bound.operation
    return isinstance(operation, Centred) and len(operation.of.shape) in IMAGES


def _fits(program: Program, row: PlacedRow, then: PlacedRow) -> bool:
    before, after = row.bound.operation, then.bound.operation
    if before.back_of_result() is None or not after.takes_steps or after.convolves is None:
        return False
    _, conv = after.convolves
    if then.bound.reads[0] != row.bound.makes[0] or conv.groups > 1 or len(conv.spatial) < 2:
        return False
    if any(d.stride > 1 for d in conv.spatial) and conv.channels < FEW:
        return False
    stays = not any((*row.fetch, *row.store, *row.given, *(b for b in row.back if b), then.fetch[0], then.back[0]))
    plain = all(not r.derived and not r.is_cut and not r.ahead for r in (row, then))
    dtypes = {program.values[v].dtype for v in (*row.bound.reads, *row.bound.makes)}
    return stays and plain and len(dtypes) == 1 and dtypes <= set(FLOATS)


def _as_one(program: Program, group: Group) -> PlacedRow | None:
    then = program.rows[group[-1]]
    bound = joined([program.rows[i].bound for i in group])
    operation = bound.operation
    assert isinstance(operation, Fused)
    if operation.mask is None or any(faults(operation)):
        return None
    reads = [program.values[v].stored for v in bound.reads]
    made = place(bound, program.grid, 0, dict(then.roles), reads, then.makes)
    moved = [
        [[(c.kind, c.over) for c in chain] for chain in chains]
        for r in (made, then)
        for chains in (r.fetch, [b or () for b in r.back], r.store, r.given)
    ]
    return made if moved[:4] == moved[4:] else None
