"""Picture: what one rank reads and makes in a phase, over who stores it. Widths are not to scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from convgen.algebra.space import Space
from convgen.explain.canvas import GREY, INK, PALE, Canvas, shortened, text_width, wrapped
from convgen.explain.colours import faded, rank_colour
from convgen.explain.needs import Part, owner, panels, reference, segments
from convgen.explain.tracks import Block, Placed, stretch
from convgen.explain.words import INDEX_WORDS, plural, ranks_text

TICK, FOREIGN, PADDING = 6.5, "////", "...."
LEFT, BELOW, HEAD, CAPTION = 0.5, 0.36, 0.28, 0.36


def draw_part(
    canvas: Canvas, space: Space, part: Part, rank: int, spatial: bool, box: tuple[float, float, float, float]
) -> None:
    """One tensor in a box `(x, y, width, height)`: title, a panel for each pair of dimensions, and a caption."""
    x, y, width, height = box
    canvas.text(x, y + 0.1, part.name, 11, bold=True)
    verb = "made" if part.is_result else "read"
    remark = f"{verb}: {_spans_text(space, part)}"
    start = text_width(part.name, 12) + 0.14
    canvas.text(x + start, y + 0.105, shortened(remark, 7.5, width - start), 7.5, colour=GREY)
    pairs = panels(space, part, spatial)
    each = width / len(pairs)
    for i, pair in enumerate(pairs):
        panel = (x + i * each + LEFT, y + HEAD, each - LEFT - 0.08, height - HEAD - BELOW - CAPTION)
        _draw_panel(canvas, space, part, rank, pair, panel)
    for i, line in enumerate(wrapped(_caption(space, part), 7.5, width)[:2]):
        canvas.text(x, y + height - CAPTION + 0.12 + 0.15 * i, line, 7.5)


def name_of(space: Space, part: Part, dim: int) -> str:
    d = space.conv.dims(part.stored.tensor)[dim]
    return d.name + ("o" if part.stored.tensor == "y" and d.spatial is not None else "")


def _spans_text(space: Space, part: Part) -> str:
    if any(lo >= hi for lo, hi in part.used):
        return "nothing"
    return " ".join(f"{name_of(space, part, d)} {lo}:{hi}" for d, (lo, hi) in enumerate(part.used))


def _caption(space: Space, part: Part) -> str:
    others = f"{'rank' if len(part.others) == 1 else 'ranks'} {ranks_text(part.others, 8)}"
    if not part.is_result:
        if not part.others:
            return "All of it is stored here: nothing to fetch."
        count = part.foreign_elements * space.weight(part.stored.tensor)
        return f"Of it, {plural(count, 'element')} come{'s' if count == 1 else ''} from {others}."
    said: list[str] = []
    if part.partial:
        said.append(f"Addends (Σ) only: they are summed over {', '.join(part.partial)}.")
    if part.others:
        said.append(f"The hatched part goes to {others}.")
    elif part.used != part.own:
        said.append("The rest of what it stores comes from other ranks.")
    return " ".join(said) or "All of it is stored here: nothing to send."


def _draw_panel(
    canvas: Canvas, space: Space, part: Part, rank: int, pair: tuple[int, int], box: tuple[float, float, float, float]
) -> None:
    x, y, width, height = box
    down, across = pair
    rows = _axis(space, part, down, y, height, 0.15)
    columns = _axis(space, part, across, x, width, 0.23)
    point = reference(part)
    for row in rows:
        for column in columns:
            _draw_cell(canvas, space, part, rank, pair, point, row, column)
    _outline(canvas, pair, part.frame, rows, columns, line=1.3, dashed=True)
    _outline(canvas, pair, part.own, rows, columns, line=2.2, dashed=False)
    _ticks(canvas, rows, columns, down)
    canvas.text(x + width / 2, y + height + 0.27, _axis_title(space, part, across), 7.5, align="center")
    if down >= 0:
        canvas.text(x - LEFT + 0.09, y + height / 2, _axis_title(space, part, down), 7.5, align="center", upright=True)


def _axis_title(space: Space, part: Part, dim: int) -> str:
    name = name_of(space, part, dim)
    return f"{name} ({INDEX_WORDS[name[0]]})"


def _axis(space: Space, part: Part, dim: int, start: float, length: float, least: float) -> tuple[Placed, ...]:
    blocks = (Block(0, 1),) if dim < 0 else segments(space, part, dim)
    return stretch(blocks, start, length, least)


def _draw_cell(
    canvas: Canvas,
    space: Space,
    part: Part,
    rank: int,
    pair: tuple[int, int],
    point: Sequence[int],
    row: Placed,
    column: Placed,
) -> None:
    at = list(point)
    inside = framed = used = own = True
    merged = False
    for dim, placed in zip(pair, (row, column), strict=True):
        if dim < 0:
            continue
        lo = placed.block.lo
        at[dim] = lo
        merged = merged or bool(placed.block.at)
        inside = inside and 0 <= lo < space.conv.dims(part.stored.tensor)[dim].extent
        framed = framed and _within(lo, part.frame[dim])
        used = used and _within(lo, part.used[dim])
        own = own and _within(lo, part.own[dim])
    hidden = [d for d in range(len(at)) if d not in pair]
    used = used and all(_within(at[d], part.used[d]) for d in hidden)
    box = (column.start, row.start, column.end - column.start, row.end - row.start)
    if not inside:
        if framed:
            canvas.rect(*box, fill="white", edge="#999999", hatch=PADDING, line=0.4)
        return
    if merged:
        canvas.rect(*box, fill="white", edge=PALE)
        canvas.text(column.middle, row.middle, "…", 8, align="center", colour=GREY)
        return
    holder = owner(space, part, rank, at)
    colour = "#ffffff" if holder is None else rank_colour(holder, space.grid.ranks)
    if used and holder == rank:
        canvas.rect(*box, fill=colour, edge=INK, line=0.5)
    elif used:
        canvas.rect(*box, fill=colour, edge="#444444", hatch=FOREIGN, line=0.5)
    else:
        canvas.rect(*box, fill=faded(colour), edge="#ffffff", line=0.8)
    sign = "Σ " if used and part.partial else ""
    label = "" if holder is None else f"{sign}{holder}"
    size = 8.5 if used else 7
    if text_width(label, size) + 0.05 < box[2] and size / 72 < box[3]:
        foreign = used and holder != rank
        canvas.text(
            column.middle, row.middle, label, size, align="center", bold=used, boxed=foreign,
            colour=INK if used else GREY,
        )  # fmt: skip


def _within(index: int, span: tuple[int, int]) -> bool:
    return span[0] <= index < span[1]


def _outline(
    canvas: Canvas,
    pair: tuple[int, int],
    spans: Sequence[tuple[int, int]],
    rows: Sequence[Placed],
    columns: Sequence[Placed],
    *,
    line: float,
    dashed: bool,
) -> None:
    edges: list[float] = []
    for dim, placed in zip(pair, (rows, columns), strict=True):
        span = (0, 1) if dim < 0 else spans[dim]
        inside = [p for p in placed if span[0] <= p.block.lo and p.block.hi <= span[1]]
        if not inside or any(lo >= hi for lo, hi in spans):
            return
        edges += [inside[0].start, inside[-1].end]
    top, bottom, left, right = edges
    canvas.rect(left, top, right - left, bottom - top, edge=INK, line=line, dashed=dashed)


def _ticks(canvas: Canvas, rows: Sequence[Placed], columns: Sequence[Placed], down: int) -> None:
    """Numbers at the cuts, where they have room; those at both ends come first."""
    bottom, left = rows[-1].end, columns[0].start
    marks = [(p.start, p.block.lo) for p in columns] + [(columns[-1].end, columns[-1].block.hi)]
    for at, value in _roomy(marks, _tick_width):
        canvas.line(at, bottom, at, bottom + 0.03)
        canvas.text(at, bottom + 0.1, str(value), TICK, align="center", colour=GREY)
    if down >= 0:
        marks = [(p.start, p.block.lo) for p in rows] + [(rows[-1].end, rows[-1].block.hi)]
        for at, value in _roomy(marks, _tick_height):
            canvas.line(left - 0.03, at, left, at)
            canvas.text(left - 0.05, at, str(value), TICK, align="right", colour=GREY)


def _roomy(marks: Sequence[tuple[float, int]], room: Callable[[int], float]) -> list[tuple[float, int]]:
    kept: list[tuple[float, int]] = []
    for at, value in (marks[0], marks[-1], *marks[1:-1]):
        if all(abs(at - other) >= (room(value) + room(number)) / 2 for other, number in kept):
            kept.append((at, value))
    return kept


def _tick_width(value: int) -> float:
    return text_width(str(value), TICK) + 0.05


def _tick_height(value: int) -> float:
    return 0.105
