"""A network as lines for people: a line for each module of the source, in boxes for the modules around it.

Rows of one module that follow each other (a batch norm's moments, coefficients and centred values) are one line. A line
that moves nothing and keeps its operand's layout is named beside the line before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from convgen.explain.program import Step, steps
from convgen.network_compiler import CompiledNetwork
from convgen.program.network import Value
from convgen.program.rows import PlacedRow

NORM = frozenset({"moments", "running_statistics", "coefficients", "centred"})  # rows of one batch norm


@dataclass
class Line:
    """Rows of one module of the source.

    Attributes:
        name: the name within its box, with the names of lines that stand beside it.
        result: its result, as it is stored; None if that is no activation.
        weight: the largest parameter of its rows.
        reads: the activations that it reads of other lines.
        whole: the operator that every rank runs whole, if it is one.
    """

    module: str
    box: str
    name: str
    result: Value
    weight: Value | None
    reads: tuple[str, ...]
    forward: list[Step]
    backward: list[Step]
    whole: bool
    makes: set[str] = field(default_factory=set[str])
    after: list[str] = field(default_factory=list[str])

    @property
    def is_silent(self) -> bool:
        return not self.forward and not self.backward


def network_lines(compiled: CompiledNetwork) -> list[Line]:
    """The lines of a network, from input to output."""
    return _boxed(_folded(_merged(_each(compiled))))


def _each(compiled: CompiledNetwork) -> Iterator[Line]:
    """A line for each row that makes an activation."""
    program, described = compiled.program, compiled.described
    forward, backward = steps(program, program.forward()), steps(program, program.backward())
    common = _common([row.bound.module for row in program.rows])
    state = {n for n, v in program.values.items() if v.kind in ("buffer", "constant", "parameter")}
    for i, row in enumerate(program.rows):
        there, back = [s for s in forward if s.row == i], [s for s in backward if s.row == i]
        made = [m for m in row.bound.makes if m]
        if not made or (not there and not back and all(r in state for r in row.bound.reads)):
            continue
        module = row.bound.module[len(common) :].lstrip(".")
        held = [v for r in row.bound.reads if (v := program.values[r]).kind == "parameter"]
        weight = max(held, key=lambda v: (len(v.shape), v.shape), default=None)
        reads = tuple(dict.fromkeys(r for r in row.bound.reads if r not in state))
        result = program.values[made[0]]
        whole = compiled.calls[i] in described.whole
        yield Line(module, "", _name(row), result, weight, reads, there, back, whole, set(made))


def _name(row: PlacedRow) -> str:
    return row.bound.operation.name.removesuffix("_forward")


def _common(modules: Sequence[str]) -> str:
    """The innermost module around all of these."""
    parts = [m.split(".") for m in modules if m]
    if not parts:
        return ""
    shared: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared if all(len(p) > len(shared) for p in parts) else shared[:-1])


def _merged(lines: Iterator[Line]) -> list[Line]:
    """The lines, with rows of one module that read each other as one line, named by the rest of the module's path."""
    found: list[Line] = []
    for line in lines:
        last = found[-1] if found else None
        leaf = bool(line.weight) or line.name in NORM or (last is not None and last.name in NORM)
        if last is not None and last.module == line.module and leaf and set(line.reads) & last.makes:
            last.forward += line.forward
            last.backward += line.backward
            last.makes |= line.makes
            last.result, last.whole = line.result, last.whole or line.whole
            if line.weight and (last.weight is None or len(line.weight.shape) > len(last.weight.shape)):
                last.weight = line.weight
            last.reads = tuple(dict.fromkeys((*last.reads, *(r for r in line.reads if r not in last.makes))))
        else:
            found.append(line)
    return found


def _folded(lines: list[Line]) -> list[Line]:
    """The lines, with a line that moves nothing and keeps its operand's layout beside the line that makes the
    operand."""
    found: list[Line] = []
    for line in lines:
        last = found[-1] if found else None
        if last is not None and _follows(line, last):
            last.after.append(line.name)
            last.makes |= line.makes
        else:
            found.append(line)
    return found


def _follows(line: Line, last: Line) -> bool:
    """Whether a line reads the last line's result alone, moves nothing, and makes a value in the same layout."""
    if line.whole or line.weight is not None or not line.is_silent:
        return False
    alike = (line.result.stored, line.result.shape) == (last.result.stored, last.result.shape)
    return alike and len(line.reads) == 1 and line.reads[0] in last.makes


def _boxed(lines: list[Line]) -> list[Line]:
    """The lines with their boxes: the module around a line's own, or an outer one that the line before is in."""
    box = ""
    for line in lines:
        around = line.module.rpartition(".")[0]
        own = line.module if not line.weight and _has_lines(lines, line.module) else around
        if not (box and (own == box or own.startswith(f"{box}."))):
            box = own
        line.box = box
        inside = line.module[len(box) :].lstrip(".")
        line.name = inside or line.name
    return lines


def _has_lines(lines: Sequence[Line], module: str) -> bool:
    return bool(module) and any(one.module.startswith(f"{module}.") for one in lines)
