"""A network's program as text: values, and a line a step, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from convgen.program.flow import Flow, Local, Start, Wait, backward
from convgen.program.network import Moved, Program, Value


def show(program: Program) -> str:
    """The text; types are those of DESIGN section 3, of each value by its name."""
    lines = [f"network {program.name} on {program.grid} {{"]
    for kind in ("input", "parameter", "buffer", "constant"):
        lines += [f"  {kind} {typed(v)}" for v in program.values.values() if v.kind == kind]
    lines.append("  forward:")
    moved = _by_row(program.forward())
    for i, row in enumerate(program.rows):
        lines += [_step(m) for m in moved.get((i, "fetch"), [])]
        makes = ", ".join(f"%{v or '_'}" for v in row.bound.makes)
        reads = ", ".join(f"%{v}" for v in row.bound.reads)
        roles = " ".join(f"{i}={','.join(a)}" for i, a in row.roles)
        way = f" way={row.way}" if row.way else ""
        text = f"    {makes} = {row.bound.operation.name} {reads}{way}" + (f" {{{roles}}}" if roles else "")
        stored = [typed(program.values[v]) for v in row.bound.makes if v]
        lines.append(f"{text} : {', '.join(stored)}")
        lines += [_step(m) for m in moved.get((i, "store"), [])]
    lines.append("  backward:")
    lines += [text for step in backward(program) for text in _flow(step)]
    lines += [f"  update %{b} = %{v}" for b, v in program.updates]
    lines += [f"  return {n} = %{v}" for n, v in program.outputs]
    return "\n".join([*lines, "}", ""])


def typed(value: Value) -> str:
    axes = ", ".join("*" if not a else a[0] if len(a) == 1 else f"({','.join(a)})" for a in value.stored)
    return f"{value.name}[{axes}]"


def _flow(step: Flow) -> Iterator[str]:
    """What moves, is started and is waited for; what ranks compute stands with the forward pass."""
    match step:
        case Moved():
            yield _step(step)
        case Start():
            kind, over = step.moved[0].conversion.kind, ",".join(step.moved[0].conversion.over)
            of = ", ".join(f"%{m.step}" for m in step.moved)
            yield f"    %{step.name} = start {kind} {of} over={over} lane={step.lane}"
        case Wait():
            yield f"    wait %{step.name}"
        case Local():
            pass


def _by_row(steps: Iterable[Moved]) -> dict[tuple[int, str], list[Moved]]:
    found: dict[tuple[int, str], list[Moved]] = {}
    for m in steps:
        found.setdefault((m.row, m.chain[0]), []).append(m)
    return found


def _step(m: Moved) -> str:
    c = m.conversion
    how = {"sum": " add", "merge": " merge"}.get(c.reduction or "", "")
    over = f" over={','.join(c.over)}" if c.over else ""
    return f"    %{m.step} = {c.kind}{how} %{m.value}{over} : {c.dst}"
