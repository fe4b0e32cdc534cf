"""The verifier of what travels while a network computes.

| check | says |
|---|---|
| early | pieces of a row can be put together |
| chunks | chunks of a row stand side by side, and what moves leaves their dimension as it is |
| buckets | hold all sums of parameters' gradients or none, of one type, over the same axes, each once |
| forward's buckets | hold sums of running statistics that nothing else waits for, alike |
| order | what is started is waited for once, before anyone reads it and before the pass ends |

All ranks run one program, so the collectives of a lane have one order on all of them; a lane's groups are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from convgen.algebra.grid import Grid
from convgen.program.chunks import chunk_faults
from convgen.program.early import early_faults
from convgen.program.flow import Flow, Local, Start, Wait, backward, forward
from convgen.program.network import Moved, Program, label
from convgen.program.norms import summed_statistics
from convgen.program.rows import PlacedRow


def flight_faults(program: Program) -> Iterator[str]:
    """What is wrong with what travels meanwhile, in the order of rows."""
    for row in program.rows:
        yield from _early(label(row), row)
        yield from _chunks(label(row), row, program.grid)
    yield from _buckets(program)
    yield from _forward_buckets(program)
    yield from order_faults(program, [*forward(program)])
    for of_inputs in (False, True):
        yield from order_faults(program, [*backward(program, of_inputs=of_inputs)])


def _early(name: str, row: PlacedRow) -> Iterator[str]:
    if row.early is not None:
        yield from (f"{name}: operand {row.early} early: {fault}" for fault in early_faults(row, row.early))
    for k, one in row.derived:
        yield from _early(f"{name}.d{row.signature.inputs[k].name}", one)


def _chunks(name: str, row: PlacedRow, grid: Grid) -> Iterator[str]:
    yield from (f"{name} in chunks: {fault}" for fault in chunk_faults(row, grid))
    for k, one in row.derived:
        yield from _chunks(f"{name}.d{row.signature.inputs[k].name}", one, grid)


def _buckets(program: Program) -> Iterator[str]:
    steps: dict[str, list[Moved]] = {}
    for m in program.backward():
        steps.setdefault(m.step, []).append(m)
    inside = Counter(s for bucket in program.buckets for s in bucket.steps)
    yield from (f"{s} is in {n} buckets" for s, n in inside.items() if n > 1)
    for bucket in program.buckets:
        for step in bucket.steps:
            for m in steps.get(step, []):
                value, kind = program.values[m.value], program.dtype_of(m)
                if value.kind != "parameter" or not m.is_of_gradient:
                    yield f"{bucket.name}: {step} is no gradient of a parameter"
                if m.placed.chunks is not None and m.chain == ("back", m.placed.chunks.operand):
                    yield f"{bucket.name}: {step} travels by chunks"
                if m.conversion.kind != "all_reduce" or m.conversion.over != bucket.over or kind != bucket.dtype:
                    what = f"{m.conversion.kind} over {m.conversion.over} of {kind}"
                    yield f"{bucket.name} is all_reduce over {bucket.over} of {bucket.dtype}, {step} {what}"
            if len(steps.get(step, [])) != 1:
                yield f"{bucket.name}: {len(steps.get(step, []))} steps are named {step}"
    of_values: dict[str, list[bool]] = {}
    for step, several in steps.items():
        for m in several:
            if m.is_of_gradient:
                of_values.setdefault(m.value, []).append(step in inside)
    yield from (
        f"only some sums of {v}'s gradient are in buckets" for v, those in of_values.items() if len({*those}) > 1
    )


def _forward_buckets(program: Program) -> Iterator[str]:
    sums = {m.step: m for m in summed_statistics(program)} if program.forward_buckets else {}
    inside = Counter(s for bucket in program.forward_buckets for s in bucket.steps)
    yield from (f"{s} is in {n} buckets" for s, n in inside.items() if n > 1)
    for bucket in program.forward_buckets:
        for step in bucket.steps:
            m = sums.get(step)
            if m is None:
                yield f"{bucket.name}: {step} is no sum of running statistics that nothing else waits for"
            elif m.conversion.over != bucket.over or program.dtype_of(m) != bucket.dtype:
                what = f"{bucket.name} is all_reduce over {bucket.over} of {bucket.dtype}"
                yield f"{what}, {step} over {m.conversion.over} of {program.dtype_of(m)}"


def order_faults(program: Program, steps: Iterable[Flow]) -> Iterator[str]:
    """Collectives of a pass that are started and not waited for, or read before."""
    flying: dict[str, Start] = {}
    over: set[str] = set()
    for step in steps:
        match step:
            case Start():
                if step.name in flying or step.name in over:
                    yield f"{step.name} is started twice"
                flying[step.name] = step
            case Wait():
                if step.name not in flying:
                    yield f"{step.name} is waited for, and not in flight"
                else:
                    over.add(step.name)
                    del flying[step.name]
            case Local():
                yield from _read(program, step, flying)
            case Moved():
                pass
    yield from (f"{name} is never waited for" for name in flying)


def _read(program: Program, local: Local, flying: dict[str, Start]) -> Iterator[str]:
    """Collectives in flight that bring what a rank's part of a row reads."""
    for name, start in flying.items():
        for m in start.moved:
            kind, k = m.chain
            of_row = m.placed is local.placed and local.row == m.row
            comes = kind == "given" if local.operands else kind.endswith("fetch")
            inside = local.part == "interior" and local.placed.early == k
            ahead = local.chunk - start.chunk if local.operands else start.chunk - local.chunk
            later = local.part == "chunk" and ahead > 0
            if of_row and comes and not inside and not later:
                yield f"{local.title} reads {name} before it is waited for"
            if kind == "store" and local.row != m.row and m.value in program.rows[local.row].bound.reads:
                yield f"{local.title} reads {m.value} before {name} is waited for"
            makes = program.rows[local.row].bound.makes
            if m.is_of_gradient and m.value in makes and local.row != m.row:
                yield f"{local.title} reads the gradient of {m.value} before {name} is waited for"
