"""Measured steps in a machine's file: the list `measured_steps`, read, and written in the place of an older one.

```yaml
measured_steps:
  - {row: conv_forward, extents: {C: 64, F: 64, H: 14, N: 4, W: 28}, flops: 231211008, elements: 238080, type: float32,
     seconds: 4.1e-3, spread: 0.08}
  - {row: max_pool, gradients: [x], extents: {...}, flops: ..., elements: ..., type: float32, seconds: ..., spread: ...}
  - {collective: all_reduce, ranks: 2, links: machine, bytes: 306880, seconds: 7.2e-4, spread: 0.2}
```
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from convgen.cost.file_values import Place, check_keys, mapping, positive, text, whole
from convgen.cost.measured_steps import MeasuredSteps, Seconds, Step, Travel, Work
from convgen.errors import InputError
from convgen.spec.names import did_you_mean
from convgen.spec.text import shown

STEPS = "measured_steps"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
MOST = 4096  # steps that a file may have
_SAID = ("seconds", "spread")
_ROW = ("row", "extents", "flops", "elements", "type", *_SAID)
_TRAVEL = ("collective", "ranks", "links", "bytes", *_SAID)
DIGITS = 4  # of a written number


def read_steps(value: object) -> MeasuredSteps:
    """The measured steps of a file's list.

    Raises:
        InputError: an item is no measurement, or a step stands there twice.
    """
    if not isinstance(value, list):
        raise InputError(f"{STEPS} is no list", (STEPS,), hint="a list of measured steps, or nothing")
    found: dict[Step, Seconds] = {}
    for i, item in enumerate(cast("list[object]", value)):
        place: Place = (STEPS, i)
        step, taken = _step(item, place)
        if step in found:
            raise InputError("the same step is measured twice", place, hint="one of the two")
        found[step] = taken
    if len(found) > MOST:
        raise InputError(f"{len(found)} measured steps", (STEPS,), hint=f"at most {MOST}")
    return MeasuredSteps(tuple(found.items()))


def _step(item: object, place: Place) -> tuple[Step, Seconds]:
    data = mapping(item, place, "a row's keys are " + ", ".join(_ROW) + "; a collective's " + ", ".join(_TRAVEL))
    is_travel = "collective" in data
    check_keys(data, _TRAVEL if is_travel else _ROW, place, () if is_travel else ("gradients",))
    taken = Seconds(*(positive(data[key], (*place, key)) for key in _SAID))
    return (_travel(data, place) if is_travel else _work(data, place)), taken


def _travel(data: dict[str, Any], place: Place) -> Travel:
    kind = data["collective"]
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS, f"one of {', '.join(KINDS)}")
        raise InputError(f"unknown collective {shown(kind)}", (*place, "collective"), hint=hint)
    ranks, sent = (whole(data[key], (*place, key)) for key in ("ranks", "bytes"))
    return Travel(kind, ranks, text(data["links"], (*place, "links")), sent)


def _work(data: dict[str, Any], place: Place) -> Work:
    extents = mapping(data["extents"], (*place, "extents"), "extents of the busiest rank by index")
    sizes = tuple(sorted((name, whole(n, (*place, "extents", name))) for name, n in extents.items()))
    gradients: Any = data.get("gradients", [])
    if not isinstance(gradients, list):
        raise InputError("gradients is no list", (*place, "gradients"), hint="names of operands")
    of = tuple(text(name, (*place, "gradients")) for name in cast("list[object]", gradients))
    counts = [_count(data[key], (*place, key)) for key in ("flops", "elements")]
    dtype = data["type"]
    if not isinstance(dtype, str):
        raise InputError(f"type can't be {shown(dtype)}", (*place, "type"), hint="float32, or another")
    return Work(text(data["row"], (*place, "row")), of, sizes, counts[0], counts[1], dtype)


def _count(value: object, place: Place) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else whole(value, place)


# ---- Written ----


def steps_text(steps: MeasuredSteps) -> str:
    """The list as a file's text."""
    if not steps:
        return ""
    remark = "  # where the model was off, by --correct; spread: (p80 - p20) / median"
    return "\n".join([f"{STEPS}:{remark}", *map(_line, steps.steps), ""])


def _line(one: tuple[Step, Seconds]) -> str:
    step, taken = one
    said = f"seconds: {_number(taken.seconds)}, spread: {_number(taken.spread)}"
    if isinstance(step, Travel):
        what = f"collective: {step.collective}, ranks: {step.ranks}, links: {_quoted(step.links)}"
        return f"  - {{{what}, bytes: {step.sent_bytes}, {said}}}"
    gradients = f"gradients: [{', '.join(map(_quoted, step.gradients))}], " if step.gradients else ""
    extents = ", ".join(f"{_quoted(i)}: {n}" for i, n in step.extents)
    what = f"row: {_quoted(step.row)}, {gradients}extents: {{{extents}}}, flops: {step.flops}, "
    return f"  - {{{what}elements: {step.elements}, type: {_quoted(step.dtype)}, {said}}}"


def _number(value: float) -> str:
    return f"{value:.{DIGITS - 1}e}" if value else "0"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def as_written(steps: MeasuredSteps) -> MeasuredSteps:
    """The steps with as many digits as a file has."""
    return MeasuredSteps(tuple((step, Seconds(*(float(_number(n)) for n in taken))) for step, taken in steps.steps))


def with_steps(content: str, steps: MeasuredSteps) -> str:
    """A file's text with this list in the place of its own, or at the end; every other line stays."""
    kept = "".join(_others(content.splitlines(keepends=True)))
    if kept and not kept.endswith("\n"):
        kept += "\n"
    return kept + steps_text(steps)


def _others(lines: list[str]) -> Iterator[str]:
    """Lines but for those of the list; remarks behind the list are not its own."""
    inside, between = False, list[str]()
    for line in lines:
        if inside and (line.startswith("#") or not line.strip()):
            between.append(line)
            continue
        if inside and line[0] in " -":
            between = []
            continue
        yield from between
        inside, between = line.startswith(f"{STEPS}:"), []
        if not inside:
            yield line
    yield from between


def write_steps(path: Path, steps: MeasuredSteps) -> None:
    """Put measured steps into a machine's file: all or nothing, and only if it reads back as the machine with them.

    Raises:
        InputError: the file can't be written, or its list can't be told from the rest of it.
    """
    from convgen.cost.machine_file import read_machine

    machine, wanted = read_machine(path), as_written(steps)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
            draft = Path(folder, path.name)
            draft.write_text(with_steps(path.read_text(encoding="utf-8"), wanted), encoding="utf-8")
            try:
                again = read_machine(draft)
            except InputError as error:
                again, why = None, f": {error.fact}"
            else:
                why = ""
            if again is None or again.steps != wanted or again != replace(machine, steps=wanted):
                fact = f"{path}: {STEPS} can't be put into it as it is written{why}"
                raise InputError(fact, hint=f"{STEPS} as the last key of the file, a step a line, or none")
            os.replace(draft, path)
    except OSError as error:
        fact = f"cannot write {path}: {error.strerror}"
        raise InputError(fact, hint="a machine file of your own, in a folder you may write to") from error
