"""The page of a network: its modules from input to output, how each one's result is held, and what moves for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from convgen.errors import InputError
from convgen.explain.network_lines import Line, network_lines
from convgen.explain.program import Step
from convgen.network_compiler import CompiledNetwork
from convgen.pictures.canvas import GREY, INK, Canvas, fitting, shortened, text_width
from convgen.pictures.cells import Bars, bytes_text, draw_bar, draw_cells
from convgen.pictures.colours import rank_colour
from convgen.program.network import Value

MARGIN, HEAD, GAP = 0.4, 1.45, 0.35
ROW, TITLE, SPACE = 0.185, 0.2, 0.07
TALL = 10.5  # the most inches of a column of lines
LANES, NAME, CELL, WEIGHT, BAR, WORDS = 0.34, 1.75, 0.43, 0.4, 0.95, 1.5
SHARES, SHARE_NAME, SHARE_BAR = 12, 2.6, 3.4  # modules that are drawn by their shares; inches of a name, of all bytes
MOST_LINES = 1000
MOVES, SUMS = "#c3cde0", "#e6cf9c"  # activations and their gradients; sums of parameters' gradients


@dataclass(frozen=True)
class Placed:
    """A line and its place: the number of its column, and inches from the column's top."""

    line: Line
    column: int
    y: float


class Columns:
    """Where a column's parts begin, in inches from its left edge."""

    def __init__(self, lines: Sequence[Line]) -> None:
        dims = max(len(one.result.shape) for one in lines)
        self.name = LANES
        self.cells = LANES + NAME
        self.weight = self.cells + dims * CELL + 0.1
        split = any(one.weight and any(one.weight.stored) for one in lines)
        self.forward = self.weight + (2 * WEIGHT + 0.1 if split else 0.0)
        self.backward = self.forward + BAR + WORDS + 0.1
        self.width = self.backward + BAR + WORDS


def draw_network(compiled: CompiledNetwork) -> Canvas:
    """The page, not yet written.

    Raises:
        InputError: no matplotlib, or too many lines.
    """
    lines = [*_inputs(compiled), *network_lines(compiled)]
    if len(lines) > MOST_LINES:
        fact = f"a plot shows up to {MOST_LINES} lines, {compiled.program.name} has {len(lines)}"
        raise InputError(fact, hint="explain without --plot")
    columns = Columns(lines)
    placed, boxes, tall = _placed(lines)
    count = 1 + max(p.column for p in placed)
    shares = _shares(lines, compiled.program.values)
    end = HEAD + 0.35 + tall + 0.3
    below = 0.6 + len(shares) * ROW if shares else 0.0
    canvas = Canvas(max(2 * MARGIN + count * columns.width + (count - 1) * GAP, 8.6), end + below)
    axes = [a for a, n in compiled.program.grid.axes if n > 1]
    colours = {a: rank_colour(i, 8) for i, a in enumerate(axes)} | dict.fromkeys(_single(compiled), "#eeeeee")
    _draw_head(canvas, compiled, lines, colours)
    sizes = [sum(s.total for s in part) for one in lines for part in (one.forward, one.backward)]
    bars = Bars(min(filter(None, sizes), default=1), max(sizes), BAR, WORDS)
    lefts = [MARGIN + c * (columns.width + GAP) for c in range(count)]
    for left in lefts:
        _draw_headings(canvas, columns, bars, left, HEAD + 0.35 + tall + 0.05)
    for name, column, top, bottom in boxes:
        x, y = lefts[column] + columns.name - 0.06, HEAD + 0.35
        canvas.rect(x, y + top, columns.width - columns.name + 0.1, bottom - top, edge="#b0b0b0", line=0.8)
        canvas.text(x + 0.06, y + top + TITLE / 2 + 0.01, shortened(name, 7.5, NAME), 7.5, bold=True)
    outputs = {value: name for name, value in compiled.program.outputs}
    for p in placed:
        _draw_line(canvas, p, columns, bars, lefts[p.column], colours, outputs, compiled.program.values)
    _draw_reads(canvas, placed, lefts)
    if shares:
        _draw_shares(canvas, shares, end)
    return canvas


def _single(compiled: CompiledNetwork) -> list[str]:
    return [a for a, n in compiled.program.grid.axes if n == 1]


def _inputs(compiled: CompiledNetwork) -> list[Line]:
    values = [v for v in compiled.program.values.values() if v.kind == "input"]
    return [Line("", "", v.name, v, None, (), [], [], False, {v.name}) for v in values]


def _placed(lines: Sequence[Line]) -> tuple[list[Placed], list[tuple[str, int, float, float]], float]:
    """Lines, boxes (name, column, top, bottom) and the height of the tallest column."""
    groups: list[list[Line]] = []
    for line in lines:
        if groups and groups[-1][0].box == line.box:
            groups[-1].append(line)
        else:
            groups.append([line])
    heights = [len(g) * ROW + (TITLE if g[0].box else 0.0) + SPACE for g in groups]
    count = max(ceil(sum(heights) / TALL), 1)
    wanted = sum(heights) / count
    placed: list[Placed] = []
    boxes: list[tuple[str, int, float, float]] = []
    column, y, tall = 0, 0.0, 0.0
    for group, height in zip(groups, heights, strict=True):
        if y and y + height / 2 > wanted and height < wanted and column + 1 < count:
            column, y = column + 1, 0.0
        rest, named = group, group[0].box
        while rest:
            top = y
            y += TITLE if named else 0.0
            fits = max(int((wanted + 1.0 - y) / ROW), 1) if height >= wanted else len(rest)
            for line in rest[:fits]:
                placed.append(Placed(line, column, y + ROW / 2))
                y += ROW
            if named:
                boxes.append((named, column, top, y + 0.02))
            rest = rest[fits:]
            y += SPACE
            tall = max(tall, y)
            if rest:
                column, y = column + 1, 0.0
    return placed, boxes, tall


# ---- What stands below ----


@dataclass(frozen=True)
class Share:
    """Bytes that all ranks send for a module in a step: of activations and their gradients, and of sums."""

    name: str
    moves: int
    sums: int

    @property
    def total(self) -> int:
        return self.moves + self.sums


def _shares(lines: Sequence[Line], values: Mapping[str, Value]) -> list[Share]:
    """The modules that send something, those that send most first; many small ones are put together as one."""
    found: dict[str, Share] = {}
    for line in lines:
        steps = (*line.forward, *line.backward)
        sums = sum(s.total for s in steps if _is_parameter(s, values))
        name = ".".join(filter(None, (line.box, line.name)))
        before = found.get(name, Share(name, 0, 0))
        found[name] = Share(name, before.moves + sum(s.total for s in steps) - sums, before.sums + sums)
    ordered = sorted((one for one in found.values() if one.total), key=lambda one: -one.total)
    if len(ordered) <= SHARES:
        return ordered
    rest = ordered[SHARES - 1 :]
    other = Share(f"{len(rest)} others", sum(one.moves for one in rest), sum(one.sums for one in rest))
    return [*ordered[: SHARES - 1], other]


def _draw_shares(canvas: Canvas, shares: Sequence[Share], top: float) -> None:
    """Draw shares on a linear scale; the longest bar is the largest module's part of the step's bytes."""
    whole, most = sum(one.total for one in shares), max(one.total for one in shares)
    x = MARGIN + LANES
    canvas.text(x, top + 0.1, "of all that is sent in a step, by module, the largest first; lengths are shares", 8,
                colour=GREY)  # fmt: skip
    for i, one in enumerate(shares):
        y = top + 0.35 + i * ROW
        length = SHARE_BAR * one.total / most
        canvas.text(x, y, shortened(one.name, 7.5, SHARE_NAME - 0.1), 7.5)
        draw_bar(canvas, x + SHARE_NAME, y, length, ((MOVES, one.moves), (SUMS, one.sums)))
        said = f"{one.total / whole:.1%}   {bytes_text(one.total)}"
        canvas.text(x + SHARE_NAME + length + 0.08, y, said, 7.5)


# ---- What stands above ----


def _draw_head(canvas: Canvas, compiled: CompiledNetwork, lines: Sequence[Line], colours: Mapping[str, str]) -> None:
    program = compiled.program
    forward = [s for one in lines for s in one.forward]
    backward = [s for one in lines for s in one.backward]
    canvas.text(MARGIN, 0.34, program.name, 16, bold=True)
    canvas.text(MARGIN, 0.64, f"on {program.grid}: {program.grid.ranks} ranks, the last axis varies fastest; "
                f"{compiled.graph.batch} samples, {compiled.dtype}", 9.5)  # fmt: skip
    sums = sum(s.total for s in backward if _is_parameter(s, program.values))
    whole = sum(s.total for s in backward)
    text = f"sent by all ranks in a step: forward {bytes_text(sum(s.total for s in forward))}, backward "
    canvas.text(MARGIN, 0.84, f"{text}{bytes_text(whole)}, {bytes_text(sums)} of it sums of parameters' gradients", 9.5)
    x, y = MARGIN, 1.12
    for axis, colour in colours.items():
        canvas.rect(x, y - 0.07, 0.3, 0.14, fill=colour, edge=INK)
        text = f"split over {axis} ({dict(program.grid.axes)[axis]})"
        canvas.text(x + 0.36, y, text, 8)
        x += 0.36 + text_width(text, 8) + 0.2
    canvas.rect(x, y - 0.07, 0.3, 0.14, edge="#c8c8c8")
    canvas.text(x + 0.36, y, "whole", 8)
    x += 0.36 + text_width("whole", 8) + 0.35
    for text, colour in (("activations and their gradients", MOVES), ("sums of parameters' gradients", SUMS)):
        canvas.rect(x, y - 0.07, 0.3, 0.14, fill=colour)
        canvas.text(x + 0.36, y, text, 8)
        x += 0.36 + text_width(text, 8) + 0.2


def _draw_headings(canvas: Canvas, columns: Columns, bars: Bars, left: float, bottom: float) -> None:
    y = HEAD + 0.04
    for x, text in (
        (columns.name, "module"),
        (columns.cells, "what it makes, as held"),
        (columns.forward, "moved forward"),
        (columns.backward, "moved backward"),
    ):
        canvas.text(left + x, y, text, 8, colour=GREY)
    if columns.forward > columns.weight:
        canvas.text(left + columns.weight, y, "weight", 8, colour=GREY)
    for x in (columns.forward, columns.backward):
        bars.draw_scale(canvas, left + x, y + 0.17, bottom)


# ---- A line ----


def _draw_line(
    canvas: Canvas,
    p: Placed,
    columns: Columns,
    bars: Bars,
    left: float,
    colours: Mapping[str, str],
    outputs: Mapping[str, str],
    values: Mapping[str, Value],
) -> None:
    line, y = p.line, HEAD + 0.35 + p.y
    name = line.name + (" (whole)" if line.whole else "")
    shown = next((outputs[m] for m in sorted(line.makes) if m in outputs), "")
    after = "".join(f" + {a}" for a in line.after) + (f" → {shown}" if shown else "")
    size = 7.5
    name = shortened(name, size, NAME - 0.05)
    canvas.text(left + columns.name, y, name, size)
    room = NAME - text_width(name, size) - 0.1
    canvas.text(
        left + columns.name + text_width(name, size) + 0.03, y, fitting((after, " + …"), 7, room), 7, colour=GREY
    )
    draw_cells(canvas, left + columns.cells, y, CELL, line.result.shape, line.result.stored, colours)
    if line.weight and any(line.weight.stored):
        shape, stored = line.weight.shape[:2], line.weight.stored[:2]
        draw_cells(canvas, left + columns.weight, y, WEIGHT, shape, stored, colours)
    for x, several in ((columns.forward, line.forward), (columns.backward, line.backward)):
        sums = sum(s.total for s in several if _is_parameter(s, values))
        total = sum(s.total for s in several)
        kinds = dict.fromkeys(f"{s.collective.replace('_', '-')} {','.join(s.axes)}" for s in several)
        said = f"{bytes_text(total)}  "
        short = said + ", ".join(dict.fromkeys(k.split(" ")[0] for k in kinds))
        texts = (said + ", ".join(kinds), short, shortened(short, 6.5, WORDS - 0.1), said)
        bars.draw(canvas, left + x, y, ((MOVES, total - sums), (SUMS, sums)), texts)


def _is_parameter(step: Step, values: Mapping[str, Value]) -> bool:
    return step.value in values and values[step.value].kind == "parameter"


def _draw_reads(canvas: Canvas, placed: Sequence[Placed], lefts: Sequence[float]) -> None:
    """Draw brackets from a line to the lines below that read it, but not to the next one; across columns, a stub at
    each end."""
    made = {m: i for i, p in enumerate(placed) for m in p.line.makes}
    drawn: list[tuple[int, int, int]] = []  # first line, last line, lane
    for j, p in enumerate(placed):
        for i in sorted({made[r] for r in p.line.reads if r in made and made[r] < j - 1}):
            taken = {lane for a, b, lane in drawn if a < j and i < b}
            lane = next(n for n in range(len(drawn) + 1) if n not in taken)
            drawn.append((i, j, lane))
            _draw_bracket(canvas, placed[i], p, lefts, LANES - 0.12 - 0.05 * (lane % 5))


def _draw_bracket(canvas: Canvas, start: Placed, end: Placed, lefts: Sequence[float], x: float) -> None:
    top, bottom = HEAD + 0.35 + start.y + 0.03, HEAD + 0.35 + end.y - 0.03
    tip = LANES - 0.05
    here, there = lefts[start.column], lefts[end.column]
    if start.column == end.column:
        canvas.line(here + x, top, here + x, bottom, colour=GREY)
    canvas.line(here + x, top, here + tip, top, colour=GREY)
    canvas.line(there + x, bottom, there + tip, bottom, colour=GREY)
    canvas.line(there + tip - 0.03, bottom - 0.025, there + tip, bottom, colour=GREY)
    canvas.line(there + tip - 0.03, bottom + 0.025, there + tip, bottom, colour=GREY)
    if start.column != end.column:
        canvas.text(there, bottom - 0.02, "…", 7, colour=GREY)
