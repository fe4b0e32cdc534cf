"""A layer's algorithm in words and numbers: `convgen explain` and `--emit cost`.

Elements and bytes are those of the rank that sends most; a step takes as long as its slowest rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from convgen.cost.model import StepCost
from convgen.cost.schedule import CostedStep
from convgen.cost.symbolic import formulas
from convgen.explain.formula import formula_text
from convgen.explain.words import (
    PHASE_TITLE,
    layer_line,
    output_line,
    plural,
    roles_words,
    seconds_text,
    splits_text,
)
from convgen.program.nodes import PHASES, Schedule
from convgen.program.text import show

if TYPE_CHECKING:
    from convgen.compiler import Compiled

FORMULA_NOTE = (
    "formula: elements that a rank with neighbours on all sides sends, or its flops, where extents divide; "
    "|a| is the ranks of axis a"
)


def explain_text(compiled: Compiled) -> str:
    """Roles, storage, the schedule with what each step sends, and the table of costs."""
    schedule = compiled.schedule
    stored = dict(schedule.stored)
    lines = [*_heading(compiled), "", "stored"]
    for tensor, gradient in (("x", "dx"), ("w", "dw"), ("y", "dy"), ("bias", "db")):
        if tensor in stored:
            layout = stored[tensor]
            lines.append(f"  {tensor + ', ' + gradient:<8}  {splits_text(layout, schedule)}")
    lines += ["", "roles"]
    lines += [f"  {PHASE_TITLE[phase]:<15}  {roles_words(roles)}" for phase, roles in schedule.roles]
    lines += ["", show(schedule, _comments(compiled.cost.steps)).rstrip(), ""]
    lines += [_held_line(schedule), "", _table(compiled)]
    return "\n".join(lines)


def cost_text(compiled: Compiled) -> str:
    """The table of costs, below a line on the layer and one on its layout."""
    return "\n".join([*_heading(compiled), "", _table(compiled)])


def cost_json(compiled: Compiled) -> dict[str, Any]:
    """The same numbers for programs: seconds, bytes and flops of every step, by phase, and in all."""
    layer, schedule, choice = compiled.layer, compiled.schedule, compiled.choice
    of_steps, cost = _formulas(compiled), compiled.cost
    return {
        "layer": layer.name,
        "problem": layer_line(layer),
        "grid": layer.grid.plain,
        "target": layer.target.text,
        "machine": compiled.machine.name,
        "layout": choice.label,
        "explanation": list(choice.explanation),
        "stored": {tensor: str(layout) for tensor, layout in schedule.stored},
        "roles": {phase: str(roles) for phase, roles in schedule.roles},
        "steps": [
            {
                "phase": s.phase,
                "step": s.result,
                "kind": s.kind,
                "axes": list(s.over),
                **_plain(s.cost),
                "formula": of_steps[s.result],
            }
            for s in cost.steps
        ],
        "totals": {**{phase: _plain(cost.total(phase)) for phase in PHASES}, "all": _plain(cost.total())},
    }


def _plain(cost: StepCost) -> dict[str, Any]:
    return {
        "elements": cost.elements, "sent_bytes": cost.sent_bytes, "flops": cost.flops, "seconds": cost.seconds
    }  # fmt: skip


def _formulas(compiled: Compiled) -> dict[str, str]:
    """By step, the elements that it sends, or the flops of a local operation, for an interior rank where extents
    divide."""
    layer, schedule = compiled.layer, compiled.schedule
    padding = compiled.space.virtual_padding
    known = formulas(schedule, layer.conv, layer.element_bytes, virtual_padding=padding)
    return {result: formula_text(one, schedule.grid) for result, one in known.items()}


def _heading(compiled: Compiled) -> list[str]:
    layer, choice = compiled.layer, compiled.choice
    told = "; ".join(choice.explanation)
    how = told if told.startswith(choice.label) else f"{choice.label}: {told}" if told else choice.label
    return [
        f"{layer.name}: {layer_line(layer)} ({output_line(layer.conv)})",
        f"{layer.grid}, {plural(layer.grid.ranks, 'rank')}; layout {how}",
        f"target {layer.target.text}, modelled on machine {compiled.machine.name}",
    ]


def _comments(steps: Sequence[CostedStep]) -> dict[str, str]:
    return {s.result: f"{plural(s.cost.elements, 'element')} sent" for s in steps if s.over}


def _held_line(schedule: Schedule) -> str:
    held = ", ".join(schedule.held())
    return f"held from forward to backward, besides x and w: {held or 'nothing'}"


_COLUMNS = ("phase", "step", "operation", "elements sent", "bytes sent", "flops", "time", "formula")
_FORMULA_WIDTH = 24  # in a terminal that is too narrow the formula folds; numbers are never cut


def _table(compiled: Compiled) -> str:
    """The table of steps by phase, each phase with its sum; as wide as a terminal, elsewhere unfolded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells: list[tuple[str, ...]] = []
    of_steps, cost = _formulas(compiled), compiled.cost
    for phase in PHASES:
        steps = [s for s in cost.steps if s.phase == phase]
        for i, s in enumerate(steps):
            operation = s.kind + (f" over {','.join(s.over)}" if s.over else "")
            title = PHASE_TITLE[phase] if i == 0 else ""
            cells.append((title, s.result, operation, *_numbers(s.cost), of_steps[s.result]))
        if len(steps) > 1:
            cells.append(("", "", "sum", *_numbers(cost.total(phase)), ""))
    cells.append(("all phases", "", "sum", *_numbers(cost.total()), ""))

    widths = [max(len(row[i]) for row in (_COLUMNS, *cells)) for i in range(len(_COLUMNS))]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, (name, width) in enumerate(zip(_COLUMNS[:-1], widths, strict=False)):
        shown.add_column(name, justify="right" if i > 2 else "left", min_width=width)
    shown.add_column(_COLUMNS[-1], overflow="fold")
    for row in cells:
        shown.add_row(*(Text(cell) for cell in row))
    least = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _FORMULA_WIDTH)
    width = max(get_terminal_size().columns, least) if sys.stdout.isatty() else sum(widths) + 2 * len(widths)
    out = StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join([*(line.rstrip() for line in out.getvalue().splitlines()), "", FORMULA_NOTE])


def _numbers(cost: StepCost) -> tuple[str, str, str, str]:
    return (f"{cost.elements:,}", f"{cost.sent_bytes:,}", f"{cost.flops:,}", seconds_text(cost.seconds, "us"))
