"""A schedule that a person has edited: read, compared with its layer, verified; refused with the line that is wrong.

What lowering and the passes make is right by construction: a fault there is the compiler's. Here a fault is the
person's, so it names the file's line, and what no module can say is refused as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convgen.algebra.layout import Layout
from convgen.algebra.space import Space
from convgen.errors import InputError, Note
from convgen.free_memory import check_memory
from convgen.program.nodes import GIVEN, RESULTS, TENSOR_OF, Convert, Schedule, reads
from convgen.program.text import describe, parse, show
from convgen.program.verify import faults
from convgen.spec.target import Target
from convgen.spec.text import shown

HINT = "convgen compile FILE --emit schedule prints one that is right"
# Values become variables and constants of the module, where nothing else has a name that begins with a tensor's.
NAME = re.compile(r"(x|w|y|dx|dw|dy|db)(_[a-z0-9]+)+")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the layer says of its schedule.

    Attributes:
        stored: layouts that the layer file fixes; None where they are searched.
    """

    name: str
    space: Space
    target: Target
    bias: bool
    stored: Mapping[str, Layout] | None


def read_edited(text: str, file: str, expected: Expected) -> Schedule:
    """A schedule from its text, right for the layer.

    Raises:
        InputError: the text can't be read, is about another layer, or is wrong: with the check, the line and numbers.
    """
    try:
        schedule = parse(text)
    except InputError as error:
        error.where = file
        raise
    lines = _Lines(text, file)
    for wrong in (_other_layer, _misshapen, _unread_forms):
        for where, said in wrong(schedule, expected):
            raise InputError(said, where=lines.where(where), hint=HINT)
    _refuse_unread(schedule, lines)
    ranks = expected.space.grid.ranks
    check_memory(64 * ranks * ranks, f"verifying a schedule on {ranks} ranks", "a smaller grid")
    types = schedule.types()
    for fault in faults(schedule, expected.space):
        step = fault.step
        notes = ()
        if step is not None:
            text = describe(step, types, transposed=expected.space.conv.transposed)
            notes = (Note("step", f"{text} : {step.type}"),)
        notes = (*notes, Note("check", f"{fault.check.replace('_', ' ')}, with {fault.batch} samples"))
        where = lines.where(f"%{step.result} =" if step is not None else "")
        raise InputError(f"the schedule is wrong: {fault.text}", notes=notes, where=where, hint=HINT)
    for where, said in _unprintable(schedule, expected):
        raise InputError(said, where=lines.where(where), hint=HINT)
    return schedule


class _Lines:
    """The lines of the file, as they are compared: without comments and without the spaces that align them."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        every = ((number, _plain(line)) for number, line in enumerate(text.splitlines(), 1))
        self.known = [(number, line) for number, line in every if line]

    def where(self, start: str) -> str:
        """`file:line` of the last line that starts so; the file alone where none is named."""
        numbers = [number for number, line in self.known if start and line.startswith(start)]
        return f"{self.file}:{numbers[-1]}" if numbers else self.file


def _plain(line: str) -> str:
    return " ".join(line.split("#")[0].split())


def _refuse_unread(schedule: Schedule, lines: _Lines) -> None:
    """Refuse words that reading has passed over: what is read, printed again, has every line of the file."""
    printed = Counter(map(_plain, show(schedule).splitlines()))
    for number, line in lines.known:
        if not printed[line]:
            near = [p for p in printed if p.split("=")[0] == line.split("=")[0] and p]
            hint = f"as printed: {near[0]}" if near else HINT
            raise InputError(f"cannot read {shown(line, 300)}", where=f"{lines.file}:{number}", hint=hint)
        printed[line] -= 1


def _other_layer(schedule: Schedule, expected: Expected) -> Iterator[tuple[str, str]]:
    """Places where the schedule is about another layer, each with a message."""
    grid = expected.space.grid
    if schedule.name != expected.name:
        yield "schedule ", f"a schedule of {schedule.name}, and the layer is {expected.name}"
    if schedule.grid != grid:
        yield "schedule ", f"a schedule on {schedule.grid}, and the layer is on {grid}"
    tensors = ["x", "w", "y"] + ["bias"] * expected.bias
    stored = [layout.tensor for _, layout in schedule.stored]
    if stored != tensors:
        yield "stored:", f"stored are {', '.join(stored)}, and the layer has {', '.join(tensors)}"
    for tensor, layout in schedule.stored:
        said = None if expected.stored is None else expected.stored.get(tensor)
        if said is not None and layout.without(grid.single) != said.without(grid.single):
            yield "stored:", f"{layout} is stored, and the layer file says {said}"


def _misshapen(schedule: Schedule, expected: Expected) -> Iterator[tuple[str, str]]:
    """What no check could look at: axes and dimensions that don't exist, and values that nothing makes."""
    grid, conv = expected.space.grid, expected.space.conv
    typed = [("stored:", layout) for _, layout in schedule.stored]
    typed += [(f"%{step.result} =", step.type) for _, step in schedule.steps()]
    for where, layout in typed:
        dims = len(conv.dims(layout.tensor))
        if len(layout.axes) != dims:
            yield where, f"{layout} has {len(layout.axes)} entries, {layout.tensor} {dims} dimensions"
        if layout.tensor == "bias" and not expected.bias:
            yield where, f"{layout}, and the layer has no bias"
    named = [(where, a) for where, layout in typed for axes in (*layout.axes, layout.partial) for a in axes]
    named += [(f"%{s.result} =", a) for _, s in schedule.steps() if isinstance(s, Convert) for a in s.over]
    named += [(f"roles {phase}:", a) for phase, roles in schedule.roles for _, axes in roles.nests for a in axes]
    for where, axis in named:
        if axis not in grid.sizes:
            yield where, f"{axis} is no axis of {grid}"
        elif grid.sizes[axis] == 1:
            yield where, f"{axis} has one rank: it splits nothing, and no schedule names it"
    made = {step.result: step.type.tensor for _, step in schedule.steps()}
    for result in ("y", "dx", "dw", *(["db"] if expected.bias else [])):
        if result not in made:
            yield "", f"no step makes %{result}"
    made |= {name: TENSOR_OF[name] for name in GIVEN}
    known = {name for name in GIVEN if name != "bias" or expected.bias}
    for phase, step in schedule.steps():
        where = f"%{step.result} ="
        for value in reads(step):
            if value not in known or (value == "dy" and phase == "forward"):
                yield where, f"%{step.result} in {phase} reads %{value}, which no step before it makes"
        if isinstance(step, Convert) and made.get(step.source) != step.type.tensor:
            yield where, f"%{step.source} is a layout of {made.get(step.source)}, and can't become {step.type}"
        if step.result in known:
            yield where, f"%{step.result} is defined twice"
        known.add(step.result)


def _unread_forms(schedule: Schedule, expected: Expected) -> Iterator[tuple[str, str]]:
    """Values in parts or with a rim, where the target's kernels take whole tensors only."""
    for _, step in schedule.steps():
        if step.form != "whole" and not expected.target.reads_parts:
            said = f"local kernels of target {expected.target.text} take whole tensors"
            yield f"%{step.result} =", f"%{step.result} comes as {step.form}: {said}"


def _unprintable(schedule: Schedule, expected: Expected) -> Iterator[tuple[str, str]]:
    """What is right but no module can say: names that mean something else there, and values that it can't keep."""
    held = schedule.held()
    for _, step in schedule.steps():
        where = f"%{step.result} ="
        if step.result not in RESULTS and not NAME.fullmatch(step.result):
            yield where, f"no value can be called %{step.result}: its name starts with a tensor's, as in %y_sum"
        if isinstance(step, Convert) and step.kind == "slice" and step.result in held:
            yield where, f"backward reads %{step.result}, a view that can't be kept: cut it again there"
