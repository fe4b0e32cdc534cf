"""The picture of a compiled network's step, row by row, forward and backward, as [SW] Figs. 8 and 9 have layers'."""

from __future__ import annotations

from convgen.pictures.canvas import GREY, Canvas
from convgen.sw26010.network.account import seconds_of
from convgen.sw26010.network.tasks import Task
from convgen.sw26010.training.compiled import CompiledStep

COLOURS = {"forward": "#77aadd", "backward": "#ee8866", "update": "#44bb99", "all-reduce": "#bbcc33"}
LEAST = 0.004  # of the step, below which a row is drawn with the others
OTHERS = "the others"


def step_page(step: CompiledStep) -> Canvas:
    """Bars of milliseconds by row, in the order of forward; rows that take little are one."""
    rows: dict[str, dict[str, list[Task]]] = {}
    for (label, part), tasks in step.parts.items():
        rows.setdefault(label.removesuffix("_sum").removesuffix(".grad"), {}).setdefault(part, []).extend(tasks)
    least = LEAST * sum(map(seconds_of, step.parts.values()))
    shown: dict[str, dict[str, list[Task]]] = {}
    for label, parts in rows.items():
        named = label if sum(map(seconds_of, parts.values())) >= least else OTHERS
        for part, tasks in parts.items():
            shown.setdefault(named, {}).setdefault(part, []).extend(tasks)
    others = shown.pop(OTHERS, {})
    shown |= {OTHERS: others} if others else {}
    canvas = Canvas(7.6, 1.2 + 0.24 * len(shown))
    canvas.text(0.3, 0.25, f"{step.name} on {step.grid}: ms of a step of rank {step.rank}, modelled", 11, bold=True)
    for place, (part, colour) in enumerate(COLOURS.items()):
        canvas.rect(0.3 + 1.5 * place, 0.46, 0.12, 0.12, fill=colour)
        canvas.text(0.47 + 1.5 * place, 0.53, part, 8, colour=GREY)
    most = max(sum(map(seconds_of, parts.values())) for parts in shown.values())
    for line, (label, parts) in enumerate(shown.items()):
        y, x = 0.85 + 0.24 * line, 2.2
        canvas.text(2.1, y + 0.08, label, 7, align="right")
        for part, colour in COLOURS.items():
            width = 4.6 * seconds_of(parts.get(part, [])) / most
            canvas.rect(x, y, width, 0.16, fill=colour)
            x += width
        canvas.text(x + 0.05, y + 0.08, f"{sum(map(seconds_of, parts.values())) * 1e3:.3f}", 7, colour=GREY)
    return canvas
