"""Picture: a step of training in time, a rank a band: what it computes above, what travels for it below."""

from __future__ import annotations

from convgen.cost.timeline import MAIN, Timeline
from convgen.pictures.canvas import GREY, INK, PALE, Canvas, shortened

WIDTH, LEFT, BAR = 16.0, 1.5, 0.26
MOST_RANKS = 4
COLOURS = {"compute": "#dfe9f5", MAIN: "#fbe3d6", "gradients": "#e3f0dc", "halos": "#f3e1f0"}
CRITICAL = "#b3382c"


def draw_timeline(title: str, timeline: Timeline) -> Canvas:
    """A page as wide as the step is long; bars on the critical path have a red edge.

    Of more than four ranks: those that the critical path comes through, first.
    """
    path = timeline.critical_path()
    ranks = sorted([*dict.fromkeys([*(s.rank for s in path if s.rank >= 0), *range(timeline.ranks)])][:MOST_RANKS])
    lanes = list(dict.fromkeys(["compute", *(s.lane for s in timeline.spans)]))
    band = len(lanes) * BAR + 0.15
    canvas = Canvas(WIDTH, 1.0 + band * len(ranks) + 0.35)
    canvas.text(0.2, 0.25, title, 11, bold=True)
    said = f"{timeline.end_s * 1e3:.3f} ms a step, {timeline.hidden:.1%} of {timeline.moving_s * 1e3:.3f} ms hidden"
    canvas.text(0.2, 0.5, f"{said}; red edges: the critical path", 9, colour=GREY)
    scale = (WIDTH - LEFT - 0.3) / (timeline.end_s or 1.0)
    critical = {id(s) for s in path}
    for r, rank in enumerate(ranks):
        top = 0.8 + r * band
        canvas.text(0.2, top + BAR / 2, f"rank {rank}", 8, bold=True)
        for i, lane in enumerate(lanes):
            canvas.text(LEFT - 0.08, top + (i + 0.5) * BAR, lane, 7, align="right", colour=GREY)
            canvas.line(LEFT, top + (i + 1) * BAR, WIDTH - 0.3, top + (i + 1) * BAR, colour=PALE, line=0.3)
        for span in timeline.spans:
            if span.rank in (-1, rank):
                x, y = LEFT + span.start_s * scale, top + lanes.index(span.lane) * BAR + 0.02
                edge = CRITICAL if id(span) in critical else "none"
                canvas.rect(x, y, span.seconds * scale, BAR - 0.04, fill=COLOURS[span.lane], edge=edge, line=0.4)
                if span.seconds * scale > 0.4:
                    text = shortened(span.name, 5.5, span.seconds * scale - 0.04)
                    canvas.text(x + 0.02, y + BAR / 2 - 0.02, text, 5.5, colour=INK)
    bottom = 0.8 + band * len(ranks)
    for part, name in ((0.0, "0"), (timeline.forward_s, "backward"), (timeline.end_s, "end")):
        x = LEFT + part * scale
        canvas.line(x, 0.75, x, bottom, colour=GREY, line=0.5)
        align = "right" if name == "end" else "center"
        canvas.text(x, bottom + 0.12, f"{name} {part * 1e3:.2f} ms" if part else name, 7, align=align, colour=GREY)
    return canvas
