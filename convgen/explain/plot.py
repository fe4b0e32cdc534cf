"""The page: who stores what, what one rank reads and makes in each phase, and the steps as lanes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from convgen.algebra.space import Space
from convgen.cost.model import StepCost
from convgen.errors import InputError
from convgen.explain.lanes import HEIGHT, draw_lanes
from convgen.explain.needs import interior_rank, panels, parts_of
from convgen.explain.needs_plot import FOREIGN, PADDING, draw_part
from convgen.explain.ownership import draw_ownership
from convgen.explain.words import PHASE_TITLE, layer_line, output_line, roles_words, splits_text
from convgen.pictures.canvas import GREY, INK, Canvas, shortened, text_width
from convgen.pictures.colours import faded, rank_colour
from convgen.pictures.figures import plot_format
from convgen.program.nodes import PHASES, Phase, Schedule, reads

if TYPE_CHECKING:
    from convgen.compiler import Compiled

WIDTH, MARGIN = 15.0, 0.45
MOST_RANKS = 512
HEAD, OWN, PARTS = 1.72, 4.3, 2.72
PHASE = PARTS + HEIGHT + 0.36
LINES = 6  # the most lines of the list of ranks


def plot(compiled: Compiled, path: Path | str) -> None:
    """Draw a layer's algorithm on one page, as PNG, SVG or PDF by the file's suffix.

    Raises:
        InputError: another suffix, no matplotlib, too many ranks to draw, or a file that can't be written.
    """
    path = Path(path)
    plot_format(path)
    check_plot(compiled)
    draw(compiled).save(path)


def check_plot(compiled: Compiled) -> None:
    """Refuse more ranks than can be drawn.

    Raises:
        InputError: the grid has more; it says how many, and the most.
    """
    ranks = compiled.layer.grid.ranks
    if ranks > MOST_RANKS:
        raise InputError(
            f"a plot shows up to {MOST_RANKS} ranks, the grid has {ranks}",
            path=("grid",),
            hint="a smaller grid of the same axes, or explain without --plot",
        )


def draw(compiled: Compiled) -> Canvas:
    """The page, not yet written."""
    schedule, space = compiled.schedule, compiled.space
    canvas = Canvas(WIDTH, HEAD + OWN + 0.42 + PHASE * len(PHASES))
    _draw_title(canvas, compiled)
    top = HEAD
    _draw_stored(canvas, schedule, space, top)
    top += OWN
    rank = interior_rank(schedule, space)
    _draw_legend(canvas, space, rank, top)
    top += 0.42
    numbers = {s.result: s.cost for s in compiled.cost.steps}
    for phase in PHASES:
        _draw_phase(canvas, schedule, space, phase, rank, numbers, top)
        top += PHASE
    return canvas


def _draw_title(canvas: Canvas, compiled: Compiled) -> None:
    layer, schedule = compiled.layer, compiled.schedule
    wide = (WIDTH - 2 * MARGIN) * 0.6
    canvas.text(MARGIN, 0.34, shortened(layer.name, 17, wide), 17, bold=True)
    how = layer.algorithm or "explicit layout"
    axes = str(layer.grid)[5:-1]
    lines = [
        (10.5, f"{layer_line(layer)}  ({output_line(layer.conv)})"),
        (9.5, f"grid {axes}: {layer.grid.ranks} ranks   ·   algorithm: {how}   ·   machine: {compiled.machine.name}"),
        *((9, f"{PHASE_TITLE[phase]}: {roles_words(roles)}") for phase, roles in schedule.roles),
    ]
    y = 0.66
    for size, text in lines:
        size = size if text_width(text, size) <= wide else 8.0
        canvas.text(MARGIN, y, shortened(text, size, wide), size)
        y += 0.215 if size > 9 else 0.185
    _draw_ranks(canvas, compiled.space, MARGIN + wide + 0.3, 0.5, wide / 0.6 * 0.4 - 0.3)


def _draw_ranks(canvas: Canvas, space: Space, x: float, y: float, width: float) -> None:
    """Draw each rank's colour and coordinates; with very many ranks, those of a sample."""
    count = space.grid.ranks
    names = ", ".join(space.grid.names)
    heading = f"ranks and their coordinates ({names}); the last axis varies fastest"
    canvas.text(x, y - 0.19, shortened(heading, 8, width), 8, colour=GREY)
    texts = [f"rank {r} at ({', '.join(map(str, space.grid.at(r).values()))})" for r in range(min(count, 4 * LINES))]
    last = f"… rank {count - 1} at ({', '.join(map(str, space.grid.at(count - 1).values()))})"
    columns = max(1, min(4, int(width / (text_width(last, 7.5) + 0.3))))
    shown = list(range(min(count, columns * LINES)))
    if len(shown) < count:
        texts[len(shown) - 1] = last
        shown[-1] = count - 1
    lines = min(LINES, max(1, -(-len(shown) // columns)))
    for i, rank in enumerate(shown):
        left, top = x + i // lines * width / columns, y + 0.18 * (i % lines)
        canvas.rect(left, top - 0.06, 0.13, 0.12, fill=rank_colour(rank, count), edge=INK, line=0.5)
        canvas.text(left + 0.18, top, shortened(texts[i], 7.5, width / columns - 0.2), 7.5)


def _draw_stored(canvas: Canvas, schedule: Schedule, space: Space, top: float) -> None:
    _heading(canvas, top, "Who stores what", "each rectangle is one block; its number and colour are the rank that "
             "holds it, several where it is copied; widths follow the elements")  # fmt: skip
    stored = dict(schedule.stored)
    gap = 0.3
    x_wide = any(stored["x"].axes[2:]) or any(stored["y"].axes[2:])
    shares = (0.38, 0.24, 0.38) if x_wide else (0.34, 0.32, 0.34)
    room = WIDTH - 2 * MARGIN - 2 * gap
    left, skipped = MARGIN, False
    for tensor, share in zip(("x", "w", "y"), shares, strict=True):
        layout = stored[tensor]
        width = room * share
        name = {"x": "x, dx", "w": "w, dw", "y": "y, dy"}[tensor]
        skipped |= draw_ownership(canvas, space, layout, name, left, top + 0.28, width, OWN - 0.85)
        text = splits_text(layout, schedule)
        canvas.text(left, top + OWN - 0.42, shortened(text, 8.5, width), 8.5)
        left += width + gap
    notes: list[str] = []
    if "bias" in stored:
        notes.append("bias and db are split as y's filters are, and copied elsewhere.")
    if skipped:
        notes.append("Only a sample of the ranks is numbered: the others had no room.")
    canvas.text(MARGIN, top + OWN - 0.22, " ".join(notes), 8, colour=GREY)


def _heading(canvas: Canvas, y: float, title: str, remark: str) -> None:
    canvas.line(MARGIN, y - 0.02, WIDTH - MARGIN, y - 0.02, colour=INK, line=1.0)
    canvas.text(MARGIN, y + 0.14, title, 12, bold=True)
    start = MARGIN + text_width(title, 13.2) + 0.2
    canvas.text(start, y + 0.15, shortened(remark, 8.5, WIDTH - MARGIN - start), 8.5, colour=GREY)


def _draw_legend(canvas: Canvas, space: Space, rank: int, y: float) -> None:
    at = ", ".join(f"{name}={value}" for name, value in space.grid.at(rank).items())
    _heading(
        canvas,
        y,
        f"What rank {rank} reads and makes",
        f"the rank at {at}; numbers say who stores a part; widths are not to scale",
    )
    colour = rank_colour(rank, space.grid.ranks)
    entries: tuple[tuple[str, dict[str, Any]], ...] = (
        ("thick frame: stored here", {"fill": "white", "edge": INK, "line": 2.2}),
        ("dashed frame: read or made here", {"fill": "white", "edge": INK, "line": 1.3, "dashed": True}),
        ("solid: its own", {"fill": colour, "edge": INK}),
        ("hatched: comes from, or goes to, its colour's rank", {"fill": "#ddd", "edge": "#444", "hatch": FOREIGN}),
        ("pale: not used here", {"fill": faded(colour), "edge": "#ffffff"}),
        ("dotted: zero padding", {"fill": "white", "edge": "#999999", "hatch": PADDING}),
    )  # fmt: skip
    x = MARGIN
    for text, style in entries:
        canvas.rect(x, y + 0.31, 0.24, 0.15, **style)
        canvas.text(x + 0.3, y + 0.385, text, 8)
        x += 0.3 + text_width(text, 8) + 0.24
    canvas.text(x, y + 0.385, "Σ: an addend of a sum", 8)


def _draw_phase(
    canvas: Canvas,
    schedule: Schedule,
    space: Space,
    phase: Phase,
    rank: int,
    numbers: dict[str, StepCost],
    top: float,
) -> None:
    top += 0.14
    roles = dict(schedule.roles)[phase]
    title = PHASE_TITLE[phase]
    canvas.text(MARGIN, top + 0.12, title, 11, bold=True)
    remark = roles_words(roles) + _held_text(schedule, phase)
    start = MARGIN + text_width(title, 12.1) + 0.2
    canvas.text(start, top + 0.125, shortened(remark, 8.5, WIDTH - MARGIN - start), 8.5, colour=GREY)
    parts = parts_of(schedule, space, phase, rank)
    spatial = _is_spatial(schedule)
    signs = ("∗", "=")
    gap = 0.42
    shares = [len(panels(space, part, spatial)) for part in parts]
    room = WIDTH - 2 * MARGIN - gap * (len(parts) - 1)
    left = MARGIN
    for i, part in enumerate(parts):
        width = room * shares[i] / sum(shares)
        draw_part(canvas, space, part, rank, spatial, (left, top + 0.28, width, PARTS - 0.35))
        left += width
        if i < len(signs):
            canvas.text(left + gap / 2, top + 0.28 + (PARTS - 0.9) / 2, signs[i], 15, align="center")
        left += gap
    draw_lanes(canvas, schedule, phase, numbers, MARGIN, top + PARTS, WIDTH - 2 * MARGIN)


def _is_spatial(schedule: Schedule) -> bool:
    stored = dict(schedule.stored)
    held = any(axes for tensor in ("x", "y") for axes in stored[tensor].axes[2:])
    return held or any(role in "DHW" for _, roles in schedule.roles for role, _ in roles.nests)


def _held_text(schedule: Schedule, phase: Phase) -> str:
    made = schedule.defined_in()
    used = dict.fromkeys(v for step in schedule.section(phase) for v in reads(step))
    kept = [v for v in used if v in made and made[v] != phase]
    return f"   ·   uses {', '.join(kept)}, made before" if kept else ""
