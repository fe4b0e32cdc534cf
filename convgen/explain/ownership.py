"""Picture: which part of a stored tensor each rank holds.

Samples x channels (for w, filters x channels) make a table of cells, and inside each cell stand the blocks
of the spatial dimensions: slices of depth side by side, each a rectangle of rows x columns. So every
rectangle is one block, drawn once, and its number and colour say who holds it; copies make stripes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from convgen.algebra.layout import Layout
from convgen.algebra.notation import axes_text
from convgen.algebra.space import Space
from convgen.explain.words import counted, ranks_text
from convgen.pictures.canvas import GREY, INK, Canvas, shortened, text_width
from convgen.pictures.colours import rank_colour
from convgen.pictures.rulers import Side, draw_ruler, ruler_depth
from convgen.pictures.tracks import Block, Placed, blocks_of, place

Key = tuple[tuple[int, int], ...]
Box = tuple[float, float, float, float]
MOST_STRIPES = 16
HEAD = 0.5


@dataclass(frozen=True, slots=True)
class Leaf:
    """One distinct block: where it is drawn, and the ranks that hold it."""

    x: float
    y: float
    width: float
    height: float
    ranks: tuple[int, ...]


def holders(space: Space, layout: Layout) -> dict[Key, tuple[int, ...]]:
    """The ranks that hold each block; ranks that hold nothing are left out."""
    found: dict[Key, list[int]] = defaultdict(list)
    for rank, box in enumerate(space.held(layout).tolist()):
        if all(lo < hi for lo, hi in box):
            found[tuple((lo, hi) for lo, hi in box)].append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


class _Sides:
    """The rulers around a tensor: which there are, and on which sides.

    Outer dimensions left and below, spatial ones right and on top. Where the spatial ones are split, an outer
    dimension that is not has no ruler; where neither is, the spatial ones take the left and the bottom.
    """

    def __init__(self, space: Space, layout: Layout) -> None:
        self.space, self.layout = space, layout
        self.dims = space.conv.dims(layout.tensor)
        spatial = tuple(range(2, len(layout.axes)))
        self.inner = spatial if any(layout.axes[d] for d in spatial) else ()
        self.outer = tuple(d for d in (0, 1) if layout.axes[d] or not self.inner)
        self.rows_side: Side = "right" if self.outer else "left"
        self.columns_side: Side = "top" if self.outer else "bottom"

    def blocks(self, dim: int) -> tuple[Block, ...]:
        return blocks_of(self.space, self.layout.tensor, dim, self.layout.axes[dim])

    def side(self, dim: int) -> Side:
        if dim < 2:
            return ("left", "bottom")[dim]
        return self.rows_side if self.dims[dim].name == "H" else self.columns_side

    def depth(self, dim: int) -> float:
        placed = tuple(Placed(b, 0.0, 1.0) for b in self.blocks(dim))
        return ruler_depth(self.side(dim), placed, self.layout.axes[dim])

    def margin(self, side: Side) -> float:
        return sum(self.depth(d) for d in (*self.outer, *self.inner) if self.side(d) == side)

    def title(self, dim: int) -> str:
        d, axes = self.dims[dim], self.layout.axes[dim]
        name = d.name + ("o" if self.layout.tensor == "y" and dim >= 2 else "")
        groups = f" in {d.groups} groups" if d.groups > 1 else ""
        how = f"over {axes_text(axes)}" if axes else "not split"
        return f"{name}: {counted(d.extent, d.name)}{groups}, {how}"

    def draw(self, canvas: Canvas, dim: int, edge: float, placed: tuple[Placed, ...]) -> None:
        draw_ruler(canvas, self.side(dim), edge, placed, self.layout.axes[dim], self.title(dim))


def draw_ownership(
    canvas: Canvas, space: Space, layout: Layout, name: str, x: float, y: float, width: float, height: float
) -> bool:
    """Draw one stored tensor in the given box; says whether some rank numbers had no room."""
    sides = _Sides(space, layout)
    dims = space.conv.dims(layout.tensor)
    extents = " x ".join(str(d.extent) for d in dims)
    taps = "" if layout.tensor != "w" else f", each {'x'.join(str(s.kernel) for s in space.conv.spatial)} taps"
    canvas.text(x, y + 0.1, name, 12, bold=True)
    canvas.text(x + text_width(name, 13) + 0.12, y + 0.11, f"{extents}{taps}", 8.5, colour=GREY)
    note = _note(space, layout, sides)
    canvas.text(x, y + 0.3, shortened(note, 8, width), 8, colour=GREY)

    left, right, above, below = (sides.margin(side) for side in ("left", "right", "top", "bottom"))
    x0, y0 = x + left, y + HEAD + above
    rows = place(sides.blocks(0), y0, height - HEAD - above - below, 0.06)
    columns = place(sides.blocks(1), x0, width - left - right, 0.06)
    if 0 in sides.outer:
        sides.draw(canvas, 0, x0, rows)
    if 1 in sides.outer:
        sides.draw(canvas, 1, rows[-1].end, columns)
    leaves: list[Leaf] = []
    owners = holders(space, layout)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            key = ((row.block.lo, row.block.hi), (column.block.lo, column.block.hi))
            corner = i == 0 and j == len(columns) - 1
            for inner, box in _inside(canvas, sides, row, column, corner):
                leaves.append(Leaf(*box, owners.get((*key, *inner), ())))
    _draw_leaves(canvas, leaves, space.grid.ranks)
    return _label(canvas, leaves)


def _note(space: Space, layout: Layout, sides: _Sides) -> str:
    """A note on what the picture can't show."""
    owners = holders(space, layout)
    copies = max(len(r) for r in owners.values())
    said = [f"{copies} copies of each block" if copies > 1 else "no copies"]
    if copies > MOST_STRIPES:
        said[0] += f" (colours of {MOST_STRIPES})"
    drawn = {*sides.outer, *sides.inner}
    whole = [counted(d.extent, d.name) for i, d in enumerate(sides.dims) if i not in drawn]
    if whole:
        said.append(f"each block has all {' x '.join(whole)}")
    if idle := space.grid.ranks - sum(map(len, owners.values())):
        said.append(f"{idle} ranks hold nothing" if idle > 1 else "1 rank holds nothing")
    return "; ".join(said)


def _inside(canvas: Canvas, sides: _Sides, row: Placed, column: Placed, corner: bool) -> Iterator[tuple[Key, Box]]:
    """The spatial blocks of one cell; the top right cell gets the rulers."""
    wide, high = column.end - column.start, row.end - row.start
    if not sides.inner:
        yield tuple((0, d.extent) for d in sides.dims[2:]), (column.start, row.start, wide, high)
        return
    canvas.rect(column.start, row.start, wide, high, edge=GREY, line=0.9)
    pad = min(0.04, high / 12, wide / 12)
    by_name = {sides.dims[d].name: d for d in sides.inner}

    def placed(name: str, start: float, length: float, gap: float) -> tuple[Placed, ...]:
        if name not in by_name:
            return (Placed(Block(0, 0), start, start + length),)
        return place(sides.blocks(by_name[name]), start, length, gap)

    slices = placed("D", column.start + pad, wide - 2 * pad, 0.09)
    lines = placed("H", row.start + pad, high - 2 * pad, 0.03)
    for s in slices:
        cells = placed("W", s.start, s.end - s.start, 0.03)
        for line in lines:
            for cell in cells:
                parts = {"D": s.block, "H": line.block, "W": cell.block}
                inner = tuple((parts[n].lo, parts[n].hi) for n in by_name)
                yield inner, (cell.start, line.start, cell.end - cell.start, line.end - line.start)
        if corner and s is slices[0]:
            up = sides.columns_side == "top"
            edge = row.start if up else row.end
            sides.draw(canvas, by_name["W"], edge, cells)
            if "D" in by_name:
                depth = sides.depth(by_name["W"])
                sides.draw(canvas, by_name["D"], edge - depth if up else edge + depth, slices)
    if corner and "H" in by_name:
        sides.draw(canvas, by_name["H"], column.end if sides.rows_side == "right" else column.start, lines)


def _draw_leaves(canvas: Canvas, leaves: list[Leaf], ranks: int) -> None:
    """Draw blocks with stripes in the colours of all holders; with very many, of a sample."""
    for leaf in leaves:
        count = len(leaf.ranks)
        most = min(count, MOST_STRIPES)
        shown = [leaf.ranks[i * (count - 1) // max(most - 1, 1)] for i in range(most)]
        for i, rank in enumerate(shown):
            width = leaf.width / len(shown)
            canvas.rect(leaf.x + i * width, leaf.y, width, leaf.height, fill=rank_colour(rank, ranks))
        canvas.rect(
            leaf.x, leaf.y, leaf.width, leaf.height, edge=INK, line=0.7 if min(leaf.width, leaf.height) > 0.08 else 0.2
        )


def _label(canvas: Canvas, leaves: list[Leaf]) -> bool:
    """Write each block's ranks where there is room; says whether some had none."""
    texts = [ranks_text(leaf.ranks) for leaf in leaves]
    for size in (10.0, 8.5, 7.0, 6.0):
        if all(
            text_width(text, size) + 0.04 < leaf.width and size / 72 < leaf.height
            for text, leaf in zip(texts, leaves, strict=True)
        ):
            for text, leaf in zip(texts, leaves, strict=True):
                centre = leaf.x + leaf.width / 2, leaf.y + leaf.height / 2
                canvas.text(*centre, text, size, align="center", boxed=len(leaf.ranks) > 1)
            return False
    taken: list[Box] = []
    for text, leaf in zip(texts, leaves, strict=True):
        wide, high = text_width(text, 6.0) + 0.1, 0.14
        x, y = leaf.x + leaf.width / 2, leaf.y + leaf.height / 2
        if all(abs(x - a) > (wide + w) / 2 or abs(y - b) > (high + h) / 2 for a, b, w, h in taken):
            taken.append((x, y, wide, high))
            canvas.text(x, y, text, 6.0, align="center", boxed=True)
    return len(taken) < len(leaves)
