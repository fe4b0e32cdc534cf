"""A network's program as its ranks run it: what a rank computes, what it waits for, and what travels meanwhile.

| thing | means |
|---|---|
| Local | a rank's own part of a row, or of a row's gradient |
| Moved | a conversion, waited for at once |
| Start | a collective that goes on its way, on a lane of its own |
| Wait | until a Start is over: nothing reads what it brings before |

A lane has process groups of its own, so its collectives keep one order whatever happens between them.

Source: docs/overlap.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convgen.program.network import Bucket, Moved, Program, asked, fetched, gradients, label, stored
from convgen.program.rows import Chunks, PlacedRow
from convgen.program.shared import in_order

GRADIENTS, HALOS, CHUNKS = "gradients", "halos", "chunks"  # lanes


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's part of a row.

    Attributes:
        name: the first value that it makes, or the name of its gradient.
        operands: for a vjp, the operands whose gradients it makes.
        part: the interior or the boundary, where a halo travels meanwhile; or a chunk.
        chunk: number of the chunk, from 1.
        rides: it is a bias that its product has added.
    """

    name: str
    row: int
    placed: PlacedRow
    operands: tuple[int, ...] = ()
    part: Literal["whole", "interior", "boundary", "chunk"] = "whole"
    chunk: int = 0
    rides: bool = False

    @property
    def title(self) -> str:
        """The name and the part, for people."""
        if self.part == "chunk" and self.placed.chunks:
            return f"{self.name} (chunk {self.chunk} of {self.placed.chunks.count})"
        return self.name if self.part == "whole" else f"{self.name} ({self.part})"


@dataclass(frozen=True, slots=True)
class Start:
    """One collective that goes on its way.

    Attributes:
        moved: the conversion; or all conversions of a bucket.
        chunk: from 1, where only this chunk of the conversion travels.
    """

    name: str
    lane: str
    moved: tuple[Moved, ...]
    bucket: Bucket | None = None
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Until a Start of this name is over."""

    name: str


Flow = Local | Moved | Start | Wait


def forward(program: Program) -> Iterator[Flow]:
    """The forward pass, in order. Rows that read sums of a bucket stand behind all others."""
    late = _reading(program)
    yield from _in_buckets(_rows(program, 0, len(program.rows), late), program.forward_buckets)
    for i in sorted(late):
        yield from _row(program.rows[i], i, rides=False)


def _packed(program: Program) -> set[str]:
    """Steps that travel in forward's buckets; such a step has the name of the value that it sums."""
    return {step for bucket in program.forward_buckets for step in bucket.steps}


def _reading(program: Program) -> set[int]:
    """Numbers of rows that read what forward's buckets bring."""
    there = _packed(program)
    return {i for i, row in enumerate(program.rows) if not there.isdisjoint(row.bound.reads)} if there else set()


def _in_buckets(steps: Iterable[Flow], buckets: Sequence[Bucket]) -> Iterator[Flow]:
    """Steps with a bucket's sums as one Start, where the last of them would stand; they are waited for at the end."""
    of = {step: bucket for bucket in buckets for step in bucket.steps}
    ready: dict[str, list[Moved]] = {}
    for step in steps:
        if not isinstance(step, Moved) or step.step not in of:
            yield step
            continue
        bucket = of[step.step]
        there = ready.setdefault(bucket.name, [])
        there.append(step)
        if len(there) == len(bucket.steps):
            yield Start(bucket.name, GRADIENTS, tuple(there), bucket)
    yield from (Wait(bucket.name) for bucket in buckets)


def _rows(program: Program, start: int, stop: int, without: Collection[int] = ()) -> Iterator[Flow]:
    """Rows [start, stop) of a program, but for those in `without`."""
    first: dict[int, list[int]] = {}  # by row, the rows whose halos start before it
    rows = [(i, row) for i, row in [*enumerate(program.rows)][start:stop] if i not in without]
    for i, row in rows:
        first.setdefault(i - row.ahead, []).append(i)
    for i, row in rows:
        for j in first.get(i, ()):
            yield from _started(Local(label(program.rows[j]), j, program.rows[j]), [*fetched(program.rows[j], j)])
        yield from _row(row, i, rides=i in program.riding)


def _row(row: PlacedRow, number: int, *, rides: bool) -> tuple[Flow, ...]:
    """A row without the start of its early halo; remembered, as programs of the same rows are asked for many times."""
    if (found := row.flows.get((number, rides))) is None:
        whole = Local(label(row), number, row, rides=rides)
        steps = _rest(whole, [*fetched(row, number)], [*stored(row, number)])
        found = row.flows[number, rides] = tuple(steps)
    return found


def _started(whole: Local, fetch: list[Moved]) -> Iterator[Start]:
    yield from (Start(m.step, HALOS, (m,)) for m in fetch if m.chain[1] == whole.placed.early)


def _rest(whole: Local, fetch: list[Moved], store: list[Moved]) -> Iterator[Flow]:
    """What a row fetches, computes and stores, without the start of its early halo."""
    if whole.placed.chunks is not None:
        yield from _in_chunks(whole, fetch, store, whole.placed.chunks)
        return
    early = [m for m in fetch if m.chain[1] == whole.placed.early]
    yield from (m for m in fetch if m not in early)
    if early and whole.placed.split:
        yield replace(whole, part="interior")
    yield from (Wait(m.step) for m in early)
    yield replace(whole, part="boundary") if early and whole.placed.split else whole
    yield from store


def _in_chunks(whole: Local, fetch: list[Moved], store: list[Moved], chunks: Chunks) -> Iterator[Flow]:
    come = [m for m in fetch if m.chain[1] == chunks.operand]
    go = store if chunks.result else []
    numbers = range(1, chunks.count + 1)
    yield from _pipelined(whole, numbers, come, [m for m in fetch if m not in come], go)
    yield from (Wait(chunk_of(m, j).name) for j in numbers for m in go)
    yield from (m for m in store if m not in go)


def _pipelined(
    whole: Local, numbers: Sequence[int], come: list[Moved], others: list[Moved], go: list[Moved]
) -> Iterator[Flow]:
    """Start all chunks that come; then wait for each, compute it, and start what goes."""
    yield from (chunk_of(m, j) for j in numbers for m in come)
    yield from others
    for j in numbers:
        yield from (Wait(chunk_of(m, j).name) for m in come)
        yield replace(whole, part="chunk", chunk=j)
        yield from (chunk_of(m, j) for m in go)


def chunk_of(moved: Moved, number: int) -> Start:
    """The start of one chunk of a conversion, from 1."""
    return Start(f"{moved.step}:{number}", CHUNKS, (moved,), chunk=number)


def is_of_operand(moved: Moved) -> bool:
    """Whether a conversion is of an operand or its gradient; else it is of a result or a result's gradient."""
    return moved.chain[0] == "back" or moved.chain[0].endswith("fetch")


def backward(program: Program, *, of_inputs: bool = False) -> Iterator[Flow]:
    """The backward pass, in the order in which autograd comes to it; buckets start as they fill. Blocks that are
    computed again are so before the first of their gradients, all but their sums of running statistics."""
    yield from _in_buckets(_backward(program, of_inputs), program.buckets)


def _backward(program: Program, of_inputs: bool) -> Iterator[Flow]:
    wanted = program.differentiable(of_inputs=of_inputs)
    again = {s.stop - 1: s for s in program.again}
    once = _reading(program) | _summing(program) if again else set[int]()
    behind: dict[int, list[Flow]] = {}  # by row, the waits that stand behind its gradients
    for i, row in reversed([*enumerate(program.rows)]):
        if i in again:
            yield from _rows(program, again[i].start, again[i].stop, once)
        steps = [*_gradients(row, i, tuple(asked(row.bound, wanted)))]
        if row.ahead and steps and isinstance(steps[-1], Wait):
            behind.setdefault(i - row.ahead, []).append(steps.pop())
        yield from (*steps, *behind.pop(i, ()))


def _summing(program: Program) -> set[int]:
    """Numbers of rows whose results travel in forward's buckets."""
    there = _packed(program)
    return {i for i, row in enumerate(program.rows) if label(row) in there}


def never_asked(program: Program) -> Iterator[Flow]:
    """Gradients that no step of training asks for, of inputs or not, where the program says how they would be made."""
    wanted = program.differentiable(of_inputs=True)
    for i, row in reversed([*enumerate(program.rows)]):
        own, seen = dict(row.derived), asked(row.bound, wanted)
        every = [o.gradient or k in own for k, o in enumerate(row.signature.inputs)]
        if any(not seen[k] for k in own) or (row.chunks is not None and seen != every):
            yield from _gradients(row, i, tuple(every))


def _gradients(row: PlacedRow, number: int, wanted: tuple[bool, ...]) -> tuple[Flow, ...]:
    """The steps of a row's gradients, remembered."""
    if (found := row.flows.get((number, wanted))) is None:
        found = row.flows[number, wanted] = tuple(_found(row, number, wanted))
    return found


def _found(row: PlacedRow, number: int, wanted: tuple[bool, ...]) -> Iterator[Flow]:
    """What moves for a row's gradients, and what is computed between. Gradients whose halos are early are finished
    behind the others, the last first, as autograd comes to their operands."""
    steps = [*gradients(row, number, wanted)]
    base, names = label(row), row.signature.inputs
    derived = dict(in_order(row, wanted))
    between = row.between(wanted)
    if between and not any(chain is not None and wanted[k] for k, chain in enumerate(row.back)):
        yield Local(f"{base}.d{row.bound.operation.name}", number, row, between)
    whole = {k: Local(f"{base}.d{names[k].name}", number, one) for k, one in derived.items()}
    fetch = {k: [m for m in steps if m.chain[0] == f"derived {k} fetch"] for k in derived}
    store = {k: [m for m in steps if m.chain[0] == f"derived {k} store"] for k in derived}
    early = [k for k, one in derived.items() if one.early is not None]
    if between:  # gradients' rows read the gradient of what lies within the row, which the vjp makes
        yield from _vjp(row, number, wanted, steps)
    for k in early:
        yield from _started(whole[k], fetch[k])
    for k in derived:
        if k not in early:
            yield from _rest(whole[k], fetch[k], store[k])
    if not between:
        yield from _vjp(row, number, wanted, steps)
    for k in sorted(early, reverse=True):
        yield from _rest(whole[k], fetch[k], store[k])


def _vjp(row: PlacedRow, number: int, wanted: tuple[bool, ...], steps: list[Moved]) -> Iterator[Flow]:
    """The gradients that local code's vjp makes."""
    base, names = label(row), row.signature.inputs
    back = tuple(k for k, chain in enumerate(row.back) if chain is not None and wanted[k])
    if not back:
        return
    given = [m for m in steps if m.chain[0] == "given"]
    name = f"{base}.d{',d'.join(names[k].name for k in back)}"
    whole = Local(name, number, row, (*back, *row.between(wanted)))
    if row.chunks is not None:
        yield from _vjp_in_chunks(whole, given, [m for m in steps if m.chain[0] == "back"], row.chunks)
        return
    yield from given
    if row.early is None:
        yield whole
        yield from (m for m in steps if m.chain[0] == "back")
        return
    early = [m for m in steps if m.chain == ("back", row.early)]
    yield replace(whole, part="boundary") if row.split else whole
    yield from (Start(m.step, HALOS, (m,)) for m in early)
    if row.split:
        yield replace(whole, part="interior")
    yield from (m for m in steps if m.chain[0] == "back" and m not in early)
    yield from (Wait(m.step) for m in early)


def _vjp_in_chunks(whole: Local, given: list[Moved], back: list[Moved], chunks: Chunks) -> Iterator[Flow]:
    """The vjp in chunks, the last chunk first; what it has sent is waited for behind all else of the row."""
    come = given if chunks.result else []
    go = [m for m in back if m.chain[1] == chunks.operand]
    numbers = range(chunks.count, 0, -1)
    yield from _pipelined(whole, numbers, come, [m for m in given if m not in come], go)
    yield from (m for m in back if m not in go)
    yield from (Wait(chunk_of(m, j).name) for j in numbers for m in go)
