"""Picture: a step of training in time, with a band for ranks that are alike: what they compute, and below it what
travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from convgen.cost.timeline import MAIN, Span, Timeline
from convgen.explain.timeline import milliseconds
from convgen.pictures.canvas import GREY, INK, PALE, Canvas, shortened, text_width
from convgen.spec.text import times_as

WIDTH, LEFT, RIGHT, TOP, BAR = 11.0, 1.6, 0.35, 1.25, 0.26
MOST_BANDS = 4
ALIKE = 0.005  # ranks whose spans begin and end within this share of a step are one band
LONGEST = 8  # how many of the longest spans are named
COLOURS = {"compute": "#dfe9f5", MAIN: "#fbe3d6", "gradients": "#e3f0dc", "halos": "#f3e1f0"}
WORDS = {
    "compute": "what ranks compute", MAIN: "messages that ranks wait for", "gradients": "sums of gradients",
    "halos": "rows of neighbours",
}  # fmt: skip
CRITICAL = "#b3382c"


@dataclass(frozen=True)
class Band:
    """Ranks that are alike; the first stands for them."""

    ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        runs: list[list[int]] = []
        for rank in self.ranks:
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        said = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        return f"rank{'s' * (len(self.ranks) > 1)} {said}"


def draw_timeline(title: str, timeline: Timeline) -> Canvas:
    """The page, as wide as the step is long. Spans on the critical path have a red edge; the longest spans are named.

    Of more than four kinds of ranks it shows first those that the critical path goes through.
    """
    path = timeline.critical_path()
    bands = _bands(timeline, [s.rank for s in path if s.rank >= 0])
    lanes = list(dict.fromkeys(["compute", *(s.lane for s in timeline.spans)]))
    named = _longest(timeline, bands)
    height = len(lanes) * BAR + 0.15
    bottom = TOP + height * len(bands)
    canvas = Canvas(WIDTH, bottom + 0.75 + (len(named) + 1) // 2 * 0.17 + 0.15)
    canvas.text(0.2, 0.27, shortened(title, 11, 0.92 * (WIDTH - 0.4)), 11, bold=True)
    said = f"{milliseconds(timeline.end_s)} a step: {milliseconds(timeline.moving_s)} of messages, "
    canvas.text(0.2, 0.55, f"{said}{timeline.hidden:.1%} of it hidden behind what ranks compute", 9, colour=GREY)
    _draw_legend(canvas, lanes)
    scale = (WIDTH - LEFT - RIGHT) / (timeline.end_s or 1.0)
    critical = {id(s) for s in path}
    _draw_ticks(canvas, timeline, scale, bottom)
    for r, band in enumerate(bands):
        top = TOP + r * height
        canvas.text(0.2, top + BAR / 2, shortened(band.text, 8, 0.72), 8, bold=True)
        for i, lane in enumerate(lanes):
            canvas.text(LEFT - 0.08, top + (i + 0.5) * BAR, lane, 7, align="right", colour=GREY)
            canvas.line(LEFT, top + (i + 1) * BAR, WIDTH - RIGHT, top + (i + 1) * BAR, colour=PALE, line=0.3)
        for span in timeline.spans:
            if span.rank not in (-1, *band.ranks):
                continue
            red = id(span) in critical
            if span.rank in (-1, band.ranks[0]) or red:
                x, y = LEFT + span.start_s * scale, top + lanes.index(span.lane) * BAR + 0.03
                wide, edge = span.seconds * scale, CRITICAL if red else "none"
                canvas.rect(
                    x, y, wide, BAR - 0.06, fill=COLOURS[span.lane], edge=edge, line=0.5 if wide > 0.08 else 0.25
                )
        for n, one in enumerate(named, 1):
            if one.rank in (-1, band.ranks[0]):
                middle = LEFT + (one.start_s + one.seconds / 2) * scale
                canvas.text(middle, top + (lanes.index(one.lane) + 0.5) * BAR, f"{n}", 7, align="center", bold=True)
    _draw_named(canvas, timeline, named, bottom + 0.6)
    return canvas


def _bands(timeline: Timeline, critical: Sequence[int]) -> list[Band]:
    """The groups of ranks that are alike, in order; of many groups, those on the critical path."""
    spans: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.rank >= 0:
            spans.setdefault(span.rank, []).append(span)
    groups: list[list[int]] = []
    for rank in range(timeline.ranks):
        own = spans.get(rank, [])
        for group in groups:
            if _alike(spans.get(group[0], []), own, ALIKE * timeline.end_s):
                group.append(rank)
                break
        else:
            groups.append([rank])
    first = sorted(groups, key=lambda group: not any(rank in group for rank in critical))[:MOST_BANDS]
    return [Band(tuple(group)) for group in sorted(first)]


def _alike(a: Sequence[Span], b: Sequence[Span], off_s: float) -> bool:
    if len(a) != len(b):
        return False
    return all(
        (x.name, x.lane) == (y.name, y.lane) and max(abs(x.start_s - y.start_s), abs(x.end_s - y.end_s)) <= off_s
        for x, y in zip(a, b, strict=True)
    )


def _longest(timeline: Timeline, bands: Sequence[Band]) -> list[Span]:
    """The longest spans into which a number fits; a span that several ranks have counts once."""
    shown = {-1, *(band.ranks[0] for band in bands)}
    least = 0.14 / (WIDTH - LEFT - RIGHT) * timeline.end_s
    found: dict[tuple[str, str], Span] = {}
    for span in sorted(timeline.spans, key=lambda s: -s.seconds):
        if span.rank in shown and span.seconds >= least:
            found.setdefault((span.name, span.lane), span)
    return list(found.values())[:LONGEST]


def _draw_legend(canvas: Canvas, lanes: Sequence[str]) -> None:
    x, y = 0.2, 0.87
    for lane in lanes:
        canvas.rect(x, y - 0.07, 0.28, 0.14, fill=COLOURS[lane])
        text = f"{lane}: {WORDS[lane]}" if lane != "compute" else WORDS[lane]
        canvas.text(x + 0.34, y, text, 8)
        x += 0.34 + text_width(text, 8) + 0.25
    canvas.rect(x, y - 0.07, 0.28, 0.14, edge=CRITICAL, line=0.8)
    canvas.text(x + 0.34, y, "on the critical path", 8)


def _draw_ticks(canvas: Canvas, timeline: Timeline, scale: float, bottom: float) -> None:
    """Draw milliseconds, at steps of 1, 2 or 5, and where backward begins."""
    about = timeline.end_s * 1e3 / 8 or 1.0
    power = 10.0 ** floor(log10(about))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= about)
    for k in range(int(timeline.end_s * 1e3 / step) + 1):
        x = LEFT + k * step / 1e3 * scale
        canvas.line(x, TOP - 0.05, x, bottom, colour=PALE, line=0.4)
        canvas.text(x, bottom + 0.12, f"{k * step:g}" + " ms" * (k == 0), 7, align="center", colour=GREY)
    x = LEFT + timeline.forward_s * scale
    canvas.line(x, TOP - 0.05, x, bottom, colour=INK, line=0.8)
    canvas.text(x - 0.06, TOP - 0.13, "forward", 7, align="right", colour=GREY)
    canvas.text(x + 0.06, TOP - 0.13, "backward", 7, colour=GREY)


def _draw_named(canvas: Canvas, timeline: Timeline, named: Sequence[Span], top: float) -> None:
    """Draw the named spans in two columns: number, name, time and share of the step."""
    canvas.text(0.2, top - 0.2, "the longest", 8, colour=GREY)
    half, wide = (len(named) + 1) // 2, (WIDTH - 0.4) / 2
    for n, span in enumerate(named):
        x, y = 0.2 + n // half * wide, top + n % half * 0.17
        canvas.text(x + 0.12, y, f"{n + 1}", 7.5, align="right", bold=True)
        canvas.text(x + 0.22, y, shortened(span.name, 7.5, 2.7), 7.5)
        canvas.text(x + 3.0, y, span.lane, 7.5, colour=GREY)
        took = f"{milliseconds(span.seconds)}, {times_as(span.seconds, timeline.end_s):.1%}"
        canvas.text(x + 4.6, y, took, 7.5, align="right")
