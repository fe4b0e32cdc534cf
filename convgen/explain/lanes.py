"""Picture: the steps of a phase as bars in two lanes, local work and communication, in the order they run."""

from __future__ import annotations

from collections.abc import Mapping

from convgen.cost.model import StepCost
from convgen.cost.schedule import kind_of
from convgen.explain.words import bytes_text, seconds_text
from convgen.pictures.canvas import GREY, INK, PALE, Canvas, shortened, text_width
from convgen.program.nodes import Convert, Phase, Schedule, Step, reads
from convgen.program.text import changed_dims

LANES = ("local work", "communication")
WORK, TALK = "#dfe9f5", "#fbe3d6"
BAR = 0.62
HEIGHT = 2 * BAR + 0.3


def is_communication(step: Step) -> bool:
    return isinstance(step, Convert) and step.kind != "slice"


def bar_lines(schedule: Schedule, step: Step, numbers: StepCost | None) -> list[str]:
    """A bar's lines of text: values, what changes over which axes, and how much."""
    lines = [f"{', '.join(reads(step))} → {step.result}"]
    if isinstance(step, Convert):
        before = schedule.types()[step.source]
        dims = ", ".join(changed_dims(before, step.type, transposed=schedule.transposed))
        words = [f"dim {dims}" if dims else "", f"over {', '.join(step.over)}" if step.over else ""]
        lines.append("; ".join(filter(None, words)))
    if numbers is not None:
        sent = [bytes_text(numbers.sent_bytes)] if is_communication(step) else []
        lines.append(", ".join([*sent, seconds_text(numbers.seconds)]))
    return lines


def draw_lanes(
    canvas: Canvas,
    schedule: Schedule,
    phase: Phase,
    numbers: Mapping[str, StepCost],
    x: float,
    y: float,
    width: float,
) -> None:
    """Draw a phase's bars, as wide as their labels need, and wider the longer they take."""
    steps = schedule.section(phase)
    head = 1.05
    for i, name in enumerate(LANES):
        top = y + i * (BAR + 0.08)
        canvas.rect(x, top, width, BAR, fill="#f6f6f6")
        canvas.text(x + 0.08, top + BAR / 2, name, 8, colour=GREY)
    if not any(is_communication(s) for s in steps):
        canvas.text(x + head + 0.1, y + 1.5 * BAR + 0.08, "nothing to send", 8, colour=GREY)
    start = x + head
    room = width - head - 0.05
    times = [numbers[s.result].seconds if s.result in numbers else 0.0 for s in steps]
    total = sum(times)
    least = room / len(steps) * (1.0 if total == 0 else 0.55 if len(steps) < 5 else 0.75)
    for i, (step, time) in enumerate(zip(steps, times, strict=True)):
        share = time / total if total > 0 else 0.0
        bar = least + (room - least * len(steps)) * share
        talk = is_communication(step)
        top = y + (BAR + 0.08 if talk else 0.0)
        canvas.rect(start + 0.02, top + 0.02, bar - 0.04, BAR - 0.04, fill=TALK if talk else WORK, edge=INK, line=0.8)
        _label(canvas, schedule, step, numbers.get(step.result), i + 1, (start + 0.07, top + 0.02, bar - 0.14))
        start += bar
        if i + 1 < len(steps):
            canvas.line(start, y, start, y + 2 * BAR + 0.08, colour=PALE)
    arrow = y + 2 * BAR + 0.17
    remark = f"{seconds_text(total)} modelled, each step as slow as its slowest rank; widths are not to scale"
    canvas.line(x + head, arrow, x + width - 0.05, arrow)
    canvas.text(x + width - 0.02, arrow, "▸", 8, align="right", colour=GREY)
    canvas.text(x + head + 0.02, arrow + 0.11, remark, 7, colour=GREY)


def _label(
    canvas: Canvas,
    schedule: Schedule,
    step: Step,
    numbers: StepCost | None,
    index: int,
    place: tuple[float, float, float],
) -> None:
    x, top, width = place
    lines = bar_lines(schedule, step, numbers)
    title = f"{index} {kind_of(step)}"
    bold_width = width / 1.12  # bold letters are about 1.12 times as wide
    size = 8.5 if text_width(title, 8.5) <= bold_width else 7.0
    canvas.text(x, top + 0.1, shortened(title, size, bold_width), size, bold=True)
    for i, text in enumerate(lines):
        size = 7.5 if text_width(text, 7.5) <= width else 6.5
        canvas.text(x, top + 0.235 + 0.135 * i, shortened(text, size, width), size)
