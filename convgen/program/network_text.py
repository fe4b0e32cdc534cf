"""A network's program as text: values, and a line a step, forward and backward.

network NAME on grid(N=2, H=2) {
  input x[N, *, H, *]
  parameter conv.weight[*, *, *, *]
  forward:
    %conv.x = start exchange %x over=H : x[N, *, H+(1,1), *]
    %conv = conv_forward %x, %conv.weight interior {N=N H=H} : conv[N, *, H, *]
    wait %conv.x
    %conv = conv_forward %x, %conv.weight boundary {N=N H=H} : conv[N, *, H, *]
  backward:
    %bucket_1 = start all_reduce %conv.dw over=N,H
    wait %bucket_1
  return output = %conv
}

It holds all that the program says, and plan/program/edited.py reads it back. Its lines are the steps that ranks run, in
their order (lower.py), without steps of evaluation and steps that only hand tensors on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from convgen.algebra.notation import entry_text, roles_text
from convgen.operations.bound import Bound
from convgen.program.flow import Flow, Local, Start, Wait, never_asked
from convgen.program.lower import lower
from convgen.program.network import Moved, Program, Value
from convgen.program.steps import Step

PRODUCTS = "  products: tfloat32"  # of float32, on a GPU
KINDS = ("input", "parameter", "buffer", "constant")
FORWARD, BACKWARD, OF_INPUTS, NEVER = SECTIONS = ("forward:", "backward:", "backward of inputs:", "never asked for:")


def show(program: Program) -> str:
    """The program's text. A value's type is its name and layout (docs/design.md, A program)."""
    lines = [f"network {program.name} on {program.grid} {{"]
    lines += [f"  statistics: {program.statistics}"] * (program.statistics != "global")
    lines += [f"  reduce_dtype: {program.reduce_dtype}"] * bool(program.reduce_dtype)
    lines += [f"  autocast: {program.autocast}"] * bool(program.autocast)
    lines += [PRODUCTS] * program.tf32
    lines += [f"  again: {', '.join(dict.fromkeys(s.path for s in program.again))}"] * bool(program.again)
    lines += [f"  {kind} {typed(v)}" for kind in KINDS for v in program.values.values() if v.kind == kind]
    whole, without = lower(program), lower(program, of_inputs=False)
    texts = {
        FORWARD: steps_texts(whole.forward, program),
        BACKWARD: steps_texts(without.backward, program),
        OF_INPUTS: steps_texts(whole.backward, program),
        NEVER: texts_of(never_asked(program), program),
    }
    said: Counter[str] = Counter(texts[BACKWARD])
    for section in (OF_INPUTS, NEVER):
        texts[section] = _beside(said, texts[section])
    for section, steps in texts.items():
        lines += [f"  {section}"] * (section in (FORWARD, BACKWARD) or bool(steps))
        lines += [f"    {step}" for step in steps]
    lines += [f"  update %{b} = %{v}" for b, v in program.updates]
    lines += [f"  return {n} = %{v}" for n, v in program.outputs]
    return "\n".join([*lines, "}", ""])


def typed(value: Value) -> str:
    return f"{value.name}[{', '.join(map(entry_text, value.stored))}]"


def head(bound: Bound) -> str:
    """The beginning of a row's line: what the row makes, its operation, and what it reads."""
    makes = ", ".join(f"%{v or '_'}" for v in bound.makes)
    return f"{makes} = {bound.operation.name} {', '.join(f'%{v}' for v in bound.reads)}".rstrip()


def _beside(said: Counter[str], steps: list[str]) -> list[str]:
    """The steps that `said` lacks; they are added to it."""
    left, found = said.copy(), list[str]()
    for step in steps:
        left[step] -= 1
        found += [step] * (left[step] < 0)
    said |= Counter(steps)
    return found


def steps_texts(steps: Iterable[Step], program: Program) -> list[str]:
    """Lines of what ranks run: rows, gradients, sums of gradients, and what moves."""
    found: list[str] = []
    for step in steps:
        if step.flow is not None:
            found += texts_of([step.flow], program, rows=True)
        elif step.kind == "add":
            found.append(f"%{step.makes[0]} = add {', '.join(f'%{r}' for r in step.reads)}")
    return found


def texts_of(steps: Iterable[Flow], program: Program, *, rows: bool = False) -> list[str]:
    """Lines of steps.

    Args:
        rows: whether rows that are computed whole have a line.
    """
    return [text for step in steps for text in _flow(step, program, rows)]


def _flow(step: Flow, program: Program, rows: bool) -> Iterator[str]:
    match step:
        case Moved():
            yield _step(step)
        case Start():
            if step.bucket is None:
                yield _step(step.moved[0], step.chunk).replace(" = ", " = start ", 1)
            else:
                of = ", ".join(f"%{m.step}" for m in step.moved)
                yield f"%{step.name} = start all_reduce {of} over={','.join(step.bucket.over)}"
        case Wait():
            yield f"wait %{step.name}"
        case Local():
            yield from _local(step, program, rows)


def _local(step: Local, program: Program, rows: bool) -> Iterator[str]:
    """The line of a gradient's row, of a piece or a chunk of a vjp or a row, or with `rows` of any row."""
    row, whole = step.placed, program.rows[step.row]
    way = f" way={row.way}" if row.way else ""
    roles = f" {{{roles_text(row.roles)}}}" if row.roles else ""
    if step.operands:
        yield f"%{step.name} = {row.bound.operation.name} vjp{_part(step)}"
    elif row is not whole:
        yield f"%{step.name} = {row.bound.operation.name} gradient{way}{_part(step)}{roles}"
    elif rows or step.part != "whole":
        types = ", ".join(typed(program.values[v]) for v in row.bound.makes if v)
        yield f"{head(row.bound)}{way}{_part(step)}{roles} : {types}".rstrip()


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
    form = f" as={c.form}" * (c.form != "whole")
    return f"%{name} = {c.kind}{how} %{m.value}{over}{cut}{form} : {c.dst}"
