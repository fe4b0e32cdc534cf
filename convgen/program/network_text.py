"""A network's program as text: values, and a line a step, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.program.flow import Flow, Local, Start, Wait, backward, forward
from convgen.program.network import Moved, Program, Value


def show(program: Program) -> str:
    """The text; types are those of DESIGN section 3, of each value by its name."""
    lines = [f"network {program.name} on {program.grid} {{"]
    for kind in ("input", "parameter", "buffer", "constant"):
        lines += [f"  {kind} {typed(v)}" for v in program.values.values() if v.kind == kind]
    lines.append("  forward:")
    lines += [text for step in forward(program) for text in _flow(step, program)]
    lines.append("  backward:")
    lines += [text for step in backward(program) for text in _flow(step)]
    lines += [f"  update %{b} = %{v}" for b, v in program.updates]
    lines += [f"  return {n} = %{v}" for n, v in program.outputs]
    return "\n".join([*lines, "}", ""])


def typed(value: Value) -> str:
    axes = ", ".join("*" if not a else a[0] if len(a) == 1 else f"({','.join(a)})" for a in value.stored)
    return f"{value.name}[{axes}]"


def _flow(step: Flow, program: Program | None = None) -> Iterator[str]:
    """What moves, is started and is waited for, and what ranks compute: in backward only of rows in pieces.

    Args:
        program: whose forward pass it is of.
    """
    match step:
        case Moved():
            yield _step(step)
        case Start():
            if step.bucket is None:
                yield _step(step.moved[0], step.chunk).replace(" = ", " = start ", 1)
            else:
                of = ", ".join(f"%{m.step}" for m in step.moved)
                yield f"    %{step.name} = start all_reduce {of} over={','.join(step.bucket.over)}"
        case Wait():
            yield f"    wait %{step.name}"
        case Local():
            if program is not None:
                yield _local(step, program)
            elif step.part != "whole":
                yield f"    %{step.name} = {step.placed.bound.operation.name} gradient{_part(step)}"


def _local(step: Local, program: Program) -> str:
    row = step.placed
    makes = ", ".join(f"%{v or '_'}" for v in row.bound.makes)
    reads = ", ".join(f"%{v}" for v in row.bound.reads)
    roles = " ".join(f"{i}={','.join(a)}" for i, a in row.roles)
    way = f" way={row.way}" if row.way else ""
    text = f"    {makes} = {row.bound.operation.name} {reads}{way}{_part(step)}" + (f" {{{roles}}}" if roles else "")
    return f"{text} : {', '.join(typed(program.values[v]) for v in row.bound.makes if v)}"


def _part(step: Local) -> str:
    """` interior`; ` chunk 2/4 of N`."""
    if step.part == "chunk" and (chunks := step.placed.chunks):
        return f" chunk {step.chunk}/{chunks.count} of {chunks.index}"
    return f" {step.part}" * (step.part != "whole")


def _step(m: Moved, chunk: int = 0) -> str:
    c = m.conversion
    how = {"sum": " add", "merge": " merge"}.get(c.reduction or "", "")
    over = f" over={','.join(c.over)}" if c.over else ""
    name, cut = m.step, ""
    if chunk and (chunks := m.placed.chunks):
        name, cut = f"{m.step}:{chunk}", f" chunk {chunk}/{chunks.count} of {chunks.index}"
    return f"    %{name} = {c.kind}{how} %{m.value}{over}{cut} : {c.dst}"
