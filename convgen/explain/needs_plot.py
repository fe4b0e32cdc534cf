"""Picture: what one rank reads and makes in a phase, drawn over which rank stores it. Widths are not to scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convgen.algebra.space import Space
from convgen.explain.needs import Part, owner, panels, reference, segments
from convgen.explain.words import INDEX_WORDS, plural, ranks_text
from convgen.pictures.canvas import GREY, INK, PALE, Canvas, shortened, text_width, wrapped
from convgen.pictures.colours import faded, rank_colour
from convgen.pictures.tracks import Block, Placed, stretch

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
        panel = _Panel(canvas, space, part, rank, pair, reference(part))
        panel.draw(x + i * each + LEFT, y + HEAD, each - LEFT - 0.08, height - HEAD - BELOW - CAPTION)
    for i, line in enumerate(wrapped(_caption(space, part), 7.5, width)[:2]):
        canvas.text(x, y + height - CAPTION + 0.12 + 0.15 * i, line, 7.5)


def name_of(space: Space, part: Part, dim: int) -> str:
    d = space.conv.dims(part.stored.tensor)[dim]
    return d.name + ("o" if part.stored.tensor == "y" and dim >= 2 else "")


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


@dataclass(frozen=True)
class _Panel:
    """Two dimensions of a part, `pair` = (rows, columns), with the others held at `point`; -1 is no dimension."""

    canvas: Canvas
    space: Space
    part: Part
    rank: int
    pair: tuple[int, int]
    point: tuple[int, ...]

    def draw(self, x: float, y: float, width: float, height: float) -> None:
        canvas, (down, across) = self.canvas, self.pair
        rows = _axis(self.space, self.part, down, y, height, 0.15)
        columns = _axis(self.space, self.part, across, x, width, 0.23)
        for row in rows:
            for column in columns:
                self._draw_cell(row, column)
        self._outline(self.part.frame, rows, columns, line=1.3, dashed=True)
        self._outline(self.part.own, rows, columns, line=2.2, dashed=False)
        _ticks(canvas, rows, columns, down)
        canvas.text(x + width / 2, y + height + 0.27, _axis_title(self.space, self.part, across), 7.5, align="center")
        if down >= 0:
            title = _axis_title(self.space, self.part, down)
            canvas.text(x - LEFT + 0.09, y + height / 2, title, 7.5, align="center", upright=True)

    def _holds(self, spans: Sequence[tuple[int, int]], at: Sequence[int]) -> bool:
        return all(lo <= i < hi for i, (lo, hi) in zip(at, spans, strict=True))

    def _draw_cell(self, row: Placed, column: Placed) -> None:
        canvas, part, box = self.canvas, self.part, _box(row, column)
        at = list(self.point)
        for dim, placed in zip(self.pair, (row, column), strict=True):
            if dim >= 0:
                at[dim] = placed.block.lo
        if not self._holds([(0, d.extent) for d in self.space.conv.dims(part.stored.tensor)], at):
            if self._holds(part.frame, at):
                canvas.rect(*box, fill="white", edge="#999999", hatch=PADDING, line=0.4)
            return
        if row.block.at or column.block.at:
            canvas.rect(*box, fill="white", edge=PALE)
            canvas.text(column.middle, row.middle, "…", 8, align="center", colour=GREY)
            return
        used, holder = self._holds(part.used, at), owner(self.space, part, self.rank, at)
        colour = "#ffffff" if holder is None else rank_colour(holder, self.space.grid.ranks)
        foreign = used and holder != self.rank
        if foreign:
            canvas.rect(*box, fill=colour, edge="#444444", hatch=FOREIGN, line=0.5)
        elif used:
            canvas.rect(*box, fill=colour, edge=INK, line=0.5)
        else:
            canvas.rect(*box, fill=faded(colour), edge="#ffffff", line=0.8)
        sign = "Σ " if used and part.partial else ""
        label = "" if holder is None else f"{sign}{holder}"
        size, ink = (8.5, INK) if used else (7.0, GREY)
        if text_width(label, size) + 0.05 < box[2] and size / 72 < box[3]:
            canvas.text(column.middle, row.middle, label, size, align="center", bold=used, boxed=foreign, colour=ink)

    def _outline(
        self,
        spans: Sequence[tuple[int, int]],
        rows: Sequence[Placed],
        columns: Sequence[Placed],
        *,
        line: float,
        dashed: bool,
    ) -> None:
        edges: list[tuple[float, float]] = []
        for dim, placed in zip(self.pair, (rows, columns), strict=True):
            lo, hi = (0, 1) if dim < 0 else spans[dim]
            inside = [p for p in placed if lo <= p.block.lo and p.block.hi <= hi]
            if not inside or any(a >= b for a, b in spans):
                return
            edges.append((inside[0].start, inside[-1].end))
        (top, bottom), (left, right) = edges
        self.canvas.rect(left, top, right - left, bottom - top, edge=INK, line=line, dashed=dashed)


def _box(row: Placed, column: Placed) -> tuple[float, float, float, float]:
    return column.start, row.start, column.end - column.start, row.end - row.start


def _axis_title(space: Space, part: Part, dim: int) -> str:
    name = name_of(space, part, dim)
    return f"{name} ({INDEX_WORDS[name[0]]})"


def _axis(space: Space, part: Part, dim: int, start: float, length: float, least: float) -> tuple[Placed, ...]:
    blocks = (Block(0, 1),) if dim < 0 else segments(space, part, dim)
    return stretch(blocks, start, length, least)


def _ticks(canvas: Canvas, rows: Sequence[Placed], columns: Sequence[Placed], down: int) -> None:
    """Draw numbers at the cuts, where they have room; those at both ends come first."""
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
