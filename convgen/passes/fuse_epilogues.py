"""`fuse-epilogues`: a convolution's kernel does the elementwise steps behind it before it writes, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.operations.bound import Bound
from convgen.operations.fused import Fused
from convgen.passes.contract import NetworkPass
from convgen.program.early import early_faults
from convgen.program.network import Bucket, Program
from convgen.program.rows import PlacedRow, gradients_kinds, place
from convgen.program.wide import Group, chains, faults, joined, widened
from convgen.spec.graph import FLOATS


@dataclass(frozen=True)
class FuseEpilogues(NetworkPass):
    """A convolution and the rows behind it that work on its result element by element become one row, one launch.

        %c = conv_forward %x, %w
        %s = add %c, %b                 --->   %y = conv_forward_add_relu %x, %w, %b
        %y = relu %s

    Needs:  a GPU, whose kernels do these steps before they write; gradients' rows, halos in flight and buckets as they
        shall be.
    Sound:  no other row reads the values between, nothing moves there, and they have one type. Gradients of the
        convolution's operands keep their rows: these read the gradient of the convolution's own result, which is made
        of the gradient of the last (operations/fused.py).
    Leaves: steps that a kernel can't do (`Operation.as_epilogue`), convolutions in chunks, and, behind a convolution in
        pieces, steps that read another activation.
    """

    name: ClassVar[str] = "fuse-epilogues"

    def run(self, program: Program) -> Program:
        found = widened(program, [g for chain in chains(program) for g in _groups(program, chain)], _as_one)
        if found is program or not program.buckets:
            return found
        return replace(found, buckets=tuple(renamed(program, found)))


def _groups(program: Program, chain: Group) -> Iterator[Group]:
    """For each convolution of a chain, a group: the convolution and the rows behind it that it takes in."""
    n = 0
    while n < len(chain):
        end = n
        if _is_open(program, program.rows[chain[n]]):
            whole = program.rows[chain[n]].early is None
            while end + 1 < len(chain) and _follows(program, chain[end], chain[end + 1], whole):
                end += 1
            while program.rows[chain[end]].bound.operation.casts_to:
                end -= 1
        if end > n:
            yield chain[n : end + 1]
        n = end + 1


def _is_open(program: Program, row: PlacedRow) -> bool:
    """Whether a row is a convolution whose result is stored where it is made."""
    if not row.bound.operation.takes_steps:
        return False
    stays = not row.store[0] and not row.given[0] and row.chunks is None and not row.ahead
    return stays and program.values[row.bound.makes[0]].dtype in FLOATS


def _follows(program: Program, i: int, j: int, whole: bool) -> bool:
    """Whether row j can be a step behind the kernel that makes what row i makes.

    Args:
        whole: whether the convolution is made at once, not in pieces, each of which would read its part of operands.
    """
    row, before = program.rows[j], program.rows[i].bound.makes[0]
    k, kinds = row.bound.reads.index(before), program.values
    step = row.bound.operation.as_epilogue(k)
    if row.bound.operation.casts_to and program.autocast:  # which may be another type there
        return False
    if step is None or row.fetch[k] or row.store[0] or row.given[0] or row.derived or row.early is not None:
        return False
    others = [n for n in range(len(row.bound.reads)) if n != k]
    for n, (kind, _) in zip(others, step.operands, strict=True):
        value = kinds[row.bound.reads[n]]
        if kind == "element" and (value.dtype != kinds[before].dtype or not whole):
            return False
        if value.kind == "made" and row.fetch[n]:
            return False
    return kinds[row.bound.makes[0]].dtype == kinds[before].dtype


def _as_one(program: Program, group: Group) -> PlacedRow | None:
    """The group as one row, whose operands come as the convolution's do."""
    first, last = program.rows[group[0]], program.rows[group[-1]]
    bound = joined([program.rows[i].bound for i in group])
    operation = bound.operation
    assert isinstance(operation, Fused)
    if any(faults(operation)):
        return None
    derived: dict[str, PlacedRow] = {}
    for k, one in first.derived:
        name = f"x{operation.parts[0].sources[k]}"
        read = operation.gradients[name].reads
        own = Bound(one.bound.operation, read, (name,), autocast=gradients_kinds(bound, read))
        derived[name] = replace(one, bound=own)
    reads = [program.values[v].stored for v in bound.reads]
    made = place(bound, program.grid, 0, dict(last.roles), reads, last.makes, derived)
    alike = all(
        [(c.kind, c.over) for c in ours] == [(c.kind, c.over) for c in theirs]
        for ours, theirs in zip(made.fetch, first.fetch, strict=False)
    )
    if not alike or made.store[0] or made.given[0]:
        return None
    if first.early is None:
        return made
    return None if any(early_faults(made, first.early)) else replace(made, early=first.early, split=first.split)


def renamed(before: Program, after: Program) -> Iterator[Bucket]:
    """Buckets under the names that their steps have now that rows are joined, in the order in which backward comes."""
    steps: dict[str, str] = {}
    of: dict[str, list[str]] = {}
    for m in after.backward():
        if m.is_of_gradient:
            of.setdefault(m.value, []).append(m.step)
    for m in before.backward():
        if m.is_of_gradient:
            steps[m.step] = of[m.value].pop(0)
    order = {m.step: n for n, m in enumerate(after.backward())}
    for bucket in before.buckets:
        yield replace(bucket, steps=tuple(sorted((steps[s] for s in bucket.steps), key=order.__getitem__)))
