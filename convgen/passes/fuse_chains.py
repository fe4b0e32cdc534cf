"""`fuse-chains`: several rows that compute element by element become one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.redistribute import Conversion
from convgen.operations.element_texts import ElementStep
from convgen.operations.fused import Fused
from convgen.operations.moments import Normalise
from convgen.passes.contract import NetworkPass
from convgen.passes.fuse_epilogues import renamed
from convgen.program.behind_norms import behind_norms, readers_of, vectors_behind
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, place
from convgen.program.wide import Group, joined, widened
from convgen.spec.graph import FLOATS


@dataclass(frozen=True)
class FuseChains(NetworkPass):
    """Rows that make each element from elements in the same place become one row.

        %s = mul %h, %gamma
        %n = mul %s, %noise             --->   %y = mul_mul_add %h, %gamma, %noise, %x
        %y = add %n, %x

    Needs:  a GPU, whose kernel does the steps in registers, forward, and all gradients in another one; `fuse-epilogues`
        and `fuse-masks` before: what a convolution's kernel does takes no launch at all.
    Sound:  no other row reads the values between, nothing moves there, other operands come as before, and all values
        have one type.
    Leaves: what norms do (program/behind_norms.py; ATen's, along the last dimension), operators without a text
        (operations/element_texts.py), and a bias that its product adds, unless a chain stands behind it, whose kernel
        adds the bias without more memory traffic, and sums its gradient in the pass that it makes anyway.
    """

    name: ClassVar[str] = "fuse-chains"

    def run(self, program: Program) -> Program:
        found = widened(program, list(_groups(program)), _as_one)
        if found is program or not program.buckets:
            return found
        return replace(found, buckets=tuple(renamed(program, found)))


def _groups(program: Program) -> Iterator[Group]:
    """The longest chains of rows that one kernel can compute, the chains that end last first."""
    done = {i for rows, steps in behind_norms(program) for i in (*rows, *(i for i, _, _ in steps))}
    fit = {i for i in range(len(program.rows)) if i not in done and _fits(program, program.rows[i])}
    makers = {program.rows[i].bound.makes[0]: i for i in fit}
    readers = Counter(v for row in program.rows for v in row.bound.reads)
    kept = {v for _, v in (*program.outputs, *program.updates)}
    taken, readers_of_each = set[int](), readers_of(program)
    normed = [i for i, row in enumerate(program.rows) if isinstance(row.bound.operation, Normalise)]
    vectors = {j for i in normed for j in vectors_behind(program, i, readers_of_each)}
    for last in sorted(fit - program.riding, reverse=True):
        group = [last] if last not in taken else []
        while group:
            reads = (v for v in program.rows[group[0]].bound.reads if readers[v] == 1 and v not in kept and v in makers)
            before = next((makers[v] for v in reads if _follows(program, makers[v], group[0])), None)
            if before is None or not _is_chain(program, (before, *group), vectors):
                break
            group.insert(0, before)
            if before in program.riding:
                break
        if sum(not _step(program.rows[i]).is_free for i in group) > 1:
            taken |= {*group}
            yield tuple(group)


def _step(row: PlacedRow) -> ElementStep:
    found = row.bound.operation.element_step()
    assert found is not None
    return found


def _fits(program: Program, row: PlacedRow) -> bool:
    if row.derived or row.is_cut or row.ahead or row.bound.operation.element_step() is None:
        return False
    dtypes = {program.values[v].dtype for v in (*row.bound.reads, *row.bound.makes)}
    return len(dtypes) == 1 and dtypes <= {*FLOATS}


def _follows(program: Program, i: int, j: int) -> bool:
    """Whether nothing moves between two rows, and backward comes to both at once."""
    before, row = program.rows[i], program.rows[j]
    k = row.bound.reads.index(before.bound.makes[0])
    moves = before.store[0] or before.given[0] or row.fetch[k] or row.back[k]
    again = [[s for s in program.again if s.start <= n < s.stop] for n in (i, j)]
    return not moves and before.roles == row.roles and again[0] == again[1]


def _as_one(program: Program, group: Group) -> PlacedRow | None:
    """The row that stands for a group, whose other operands come as they did."""
    rows, last = [program.rows[i] for i in group], program.rows[group[-1]]
    bound = joined([row.bound for row in rows])
    reads = [program.values[v].stored for v in bound.reads]
    made = place(bound, program.grid, 0, dict(last.roles), reads, last.makes)
    inner = {row.bound.makes[0] for row in rows[:-1]}
    came = [
        (fetch, back or ())
        for row in rows
        for v, fetch, back in zip(row.bound.reads, row.fetch, row.back, strict=True)
        if v not in inner
    ]
    comes = [(fetch, back or ()) for fetch, back in zip(made.fetch, made.back, strict=True)]
    alike = [tuple(map(_kinds, both)) for both in comes] == [tuple(map(_kinds, both)) for both in came]
    return made if alike and made.store == last.store and made.given == last.given else None


def _kinds(chain: Sequence[Conversion]) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.over) for c in chain]


def _is_chain(program: Program, group: Group, vectors: Collection[int]) -> bool:
    """
    Args:
        vectors: rows that scale and shift what is normalised; ATen's norm does them along the last dimension.
    """
    operation = joined([program.rows[i].bound for i in group]).operation
    chain = operation.chain if isinstance(operation, Fused) else None
    return chain is not None and not (chain.trailing and any(i in vectors for i in group))
