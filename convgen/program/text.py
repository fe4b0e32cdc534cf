"""The schedule's text: one step a line, printed and read back.

schedule NAME on grid(a=2, b=2) {
  stored: x[a, b, *, *] w[*, b] y[a, b, *, *]
  roles forward: N=a C=b
  forward:
    %y_partial = conv_forward %x, %w                      : y[a, *, *, *] partial(b)
    %y = reduce_scatter %y_partial dim=F over=b           : y[a, b, *, *]    # comment
}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from convgen.algebra.conv import SPATIAL_NAMES
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.notation import axes_of, roles_of
from convgen.algebra.redistribute import COLLECTIVES, FORMS, Form
from convgen.algebra.roles import ORDER, Roles
from convgen.errors import InputError
from convgen.operations.layer import WAYS
from convgen.program.nodes import PHASES, Compute, Convert, Schedule, Step, reads
from convgen.spec.placement import build_grid
from convgen.spec.text import grid_size, shown

CHANNEL_NAMES = {"x": ("N", "C"), "y": ("N", "F"), "w": ("F", "C"), "bias": ("F",)}

KNOWN_WAYS = tuple(dict.fromkeys(way for ways in WAYS.values() for way in ways))


def dim_names(layout: Layout, *, transposed: bool = False) -> tuple[str, ...]:
    """Names of a tensor's dimensions; a transposed convolution's w has its own the other way round."""
    head = CHANNEL_NAMES[layout.tensor]
    head = head[::-1] if transposed and layout.tensor == "w" else head
    spatial = len(layout.axes) - len(head)
    return head + (SPATIAL_NAMES[spatial] if spatial else ())


def changed_dims(before: Layout, after: Layout, *, transposed: bool = False) -> tuple[str, ...]:
    """Names of the dimensions that a conversion changes."""
    names = dim_names(after, transposed=transposed)
    return tuple(
        n for i, n in enumerate(names) if before.axes[i] != after.axes[i] or before.windows[i] != after.windows[i]
    )


def describe(step: Step, types: Mapping[str, Layout], *, transposed: bool = False) -> str:
    """A step without its type: `%y = reduce_scatter %y_partial dim=F over=b`.

    Args:
        transposed: whether the schedule is a transposed convolution's.
    """
    values = ", ".join(f"%{v}" for v in reads(step))
    match step:
        case Compute():
            values = ", ".join(f"%{v}" for v in step.inputs)
            way = f" {step.way}" if step.way else ""
            own = f" own={','.join(step.own)}" if step.own else ""
            return f"%{step.result} = {step.operation} {values}{way}{own}{_form(step)}"
        case Convert():
            dims = ",".join(changed_dims(types[step.source], step.type, transposed=transposed))
            words = [f"%{step.result} = {step.kind} {values}"]
            words += [f"dim={dims}"] if dims else []
            words += [f"over={','.join(step.over)}"] if step.over else []
            return " ".join(words) + _form(step)


def _form(step: Step) -> str:
    return f" as={step.form}" if step.form != "whole" else ""


def show(schedule: Schedule, comments: Mapping[str, str] | None = None) -> str:
    """The schedule as text; `comments` has a remark by the name of a step's result."""
    types = schedule.types()
    notes = comments or {}
    lines = [f"schedule {schedule.name} on {schedule.grid} {{"]
    lines.append("  stored: " + " ".join(str(layout) for _, layout in schedule.stored))
    lines += [f"  roles {phase}: {roles}" for phase, roles in schedule.roles]
    if schedule.hold_x != "gathered":
        lines.append(f"  hold_x: {schedule.hold_x}")
    texts = {step.result: describe(step, types, transposed=schedule.transposed) for _, step in schedule.steps()}
    kinds = {step.result: str(step.type) for _, step in schedule.steps()}
    wide = max(map(len, texts.values()))
    widest = max(map(len, kinds.values()))
    for phase in PHASES:
        lines.append(f"  {phase}:")
        for step in schedule.section(phase):
            line = f"    {texts[step.result]:<{wide}} : {kinds[step.result]:<{widest}}"
            line += f"  # {notes[step.result]}" if step.result in notes else ""
            lines.append(line.rstrip())
    return "\n".join([*lines, "}", ""])


_LAYOUT = re.compile(r"(x|w|y|bias)\[(.*?)\](?: partial\(([\w,]+)\))?")
_ENTRY = re.compile(r"(\*|\w+|\([\w,]+\))(?:\+\((-?\d+),(-?\d+)\))?")
_HEAD = re.compile(r"schedule (\w+) on grid\((.*)\) \{")
_STEP = re.compile(r"%(\w+) = (\w+) ((?:%\w+(?:, )?)+)((?: [a-z]+=[\w,]+)*)\s*: (.*)")


def parse(text: str) -> Schedule:
    """Read a schedule's text back; comments are dropped.

    Raises:
        InputError: with the line that can't be read.
    """
    state: dict[str, list[Step]] = {phase: [] for phase in PHASES}
    roles: dict[str, Roles] = {}
    stored: list[tuple[str, Layout]] = []
    name, grid, hold, phase, closed = "", Grid(()), "gathered", "", False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        if closed:
            raise _bad(number, raw, "nothing after the closing brace")
        if match := _HEAD.fullmatch(line):
            name, grid = match[1], grid_of(match[2], number, raw)
        elif not name:
            raise _bad(number, raw, "schedule NAME on grid(axis=ranks, ...) {")
        elif line.startswith("stored: "):
            stored = [(layout.tensor, layout) for layout in _layouts(line[8:], number, raw)]
        elif line.startswith("roles "):
            key, _, rest = line[6:].partition(": ")
            if key not in PHASES or key in roles:
                raise _bad(number, raw, f"roles of {', '.join(PHASES)}, each once")
            roles[key] = _roles(rest, number, raw)
        elif line.startswith("hold_x: "):
            hold = line[8:]
            if hold not in ("gathered", "stored"):
                raise _bad(number, raw, "hold_x: gathered, or hold_x: stored")
        elif line[:-1] in PHASES and line.endswith(":"):
            phase = line[:-1]
        elif line == "}":
            closed = True
        elif phase and (match := _STEP.fullmatch(line)):
            state[phase].append(_step(match, number, raw))
        else:
            raise _bad(number, raw, "a section or a step `%name = op %value : type`")
    missing = [f"a line 'roles {phase}: ...'" for phase in PHASES if phase not in roles]
    missing += [] if closed else ["the closing brace"]
    if missing:
        hint = "stored types, roles of three phases, their steps, and a closing brace"
        raise InputError(
            f"schedule text, line {len(text.splitlines())}: it ends without {', '.join(missing)}", hint=hint
        )
    return Schedule(
        name=name,
        grid=grid,
        stored=tuple(stored),
        roles=tuple((p, roles[p]) for p in PHASES),
        forward=tuple(state["forward"]),
        backward_data=tuple(state["backward_data"]),
        backward_filter=tuple(state["backward_filter"]),
        hold_x="stored" if hold == "stored" else "gathered",
    )


def _bad(number: int, line: str, expected: str) -> InputError:
    return InputError(f"schedule text, line {number}: cannot read {shown(line.strip(), 300)}", hint=expected)


def grid_of(text: str, number: int, raw: str) -> Grid:
    axes: list[tuple[str, int]] = []
    for part in filter(None, text.split(", ")):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not (ranks := grid_size(size)):
            raise _bad(number, raw, "grid(axis=ranks, ...)")
        axes.append((axis, ranks))
    if len(dict(axes)) == len(axes):
        try:
            return build_grid(dict(axes)) if axes else Grid(())
        except InputError as error:
            raise InputError(f"line {number}: {error.fact}", hint=error.hint) from None
    return Grid(tuple(axes))


def _layouts(text: str, number: int, raw: str) -> list[Layout]:
    found: list[Layout] = []
    rest = text
    for match in _LAYOUT.finditer(text):
        entries = [_ENTRY.fullmatch(e) for e in re.split(r", ", match[2])]
        axes: list[Axes] = []
        windows: list[Window | None] = []
        for e in entries:
            if e is None:
                raise _bad(number, raw, "x[axis, *, (outer,inner), axis+(lo,hi)]")
            axes.append(() if e[1] == "*" else axes_of(e[1]))
            windows.append(Window(int(e[2]), int(e[3])) if e[2] else None)
        found.append(Layout(match[1], tuple(axes), tuple(windows), axes_of(match[3] or "")))
        rest = rest.replace(match[0], "", 1)
    if rest.strip() or not found:
        raise _bad(number, raw, "types such as y[N, (F,C), *, *] partial(a)")
    return found


def _roles(text: str, number: int, raw: str) -> Roles:
    rows = "input" if text.endswith("rows=input") else "output"
    said = text.removesuffix("rows=input").strip()
    nests = () if said == "none" else roles_of(said)
    if nests is None or any(role not in ORDER for role, _ in nests):
        raise _bad(number, raw, "role=axis or role=(outer,inner)")
    return Roles(nests, rows)


def _read_form(options: Mapping[str, str], number: int, raw: str) -> Form:
    for form in FORMS:
        if options.get("as", "whole") == form:
            return form
    raise _bad(number, raw, "as=parts or as=rim")


def _step(match: re.Match[str], number: int, raw: str) -> Step:
    result, op, type_ = match[1], match[2], _layouts(match[5], number, raw)[0]
    values = tuple(v.strip().removeprefix("%") for v in match[3].split(","))
    options = dict(word.split("=") for word in match[4].split())
    if op in WAYS:
        way = " ".join(word for word in match[4].split() if word.split("=")[0] not in ("own", "as"))
        if way not in KNOWN_WAYS:
            raise _bad(number, raw, " or ".join(filter(None, KNOWN_WAYS)))
        own = axes_of(options.get("own", ""))
        form = _read_form(options, number, raw)
        return Compute(result=result, type=type_, operation=op, inputs=values, way=way, own=own, form=form)
    for kind in ("slice", *COLLECTIVES):
        if kind == op and len(values) == 1:
            over = axes_of(options.get("over", ""))
            form = _read_form(options, number, raw)
            return Convert(result=result, type=type_, kind=kind, source=values[0], over=over, form=form)  # type: ignore[arg-type]
    raise _bad(number, raw, "slice, a collective, " + " or ".join(WAYS))
