"""Labels along one side of a drawn tensor: its blocks' intervals, a bracket per grid axis, and its name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from convgen.algebra.layout import Axes
from convgen.pictures.canvas import GREY, Canvas, fitting, shortened, text_width
from convgen.pictures.tracks import Placed

Side = Literal["left", "right", "top", "bottom"]
SMALL = 7.0
LONGEST = 1.8  # inches that a title may take beside a short side
INTERVAL, BRACKET, TITLE = 0.15, 0.17, 0.18  # depth in inches of a line of each kind


def interval_depth(side: Side, placed: Sequence[Placed]) -> float:
    """Depth of the line that says each block's interval; on the left and right the widest text counts."""
    if side in ("top", "bottom"):
        return INTERVAL
    return max(text_width(_interval(p), SMALL) for p in placed) + 0.07


def ruler_depth(side: Side, placed: Sequence[Placed], axes: Axes) -> float:
    """Inches that `draw_ruler` takes away from the tensor's side."""
    return TITLE + (interval_depth(side, placed) + BRACKET * len(axes) if axes else 0.0)


def _interval(p: Placed) -> str:
    return f"{p.block.lo}:{p.block.hi}"


def draw_ruler(canvas: Canvas, side: Side, edge: float, placed: Sequence[Placed], axes: Axes, title: str) -> None:
    """Draw outwards from the tensor's side at `edge`: intervals, innermost to outermost axis, title.

    Brackets show nesting: an outer axis's bracket spans the blocks that share its coordinate.
    """
    across = side in ("top", "bottom")
    sign = -1.0 if side in ("left", "top") else 1.0
    at = edge
    if axes:
        depth = interval_depth(side, placed)
        _draw_intervals(canvas, side, at, placed)
        at += sign * depth
        for level in range(len(axes) - 1, -1, -1):
            for _, run in groupby(placed, key=lambda p: p.block.at[: level + 1]):
                blocks = list(run)
                start, end = blocks[0].start, blocks[-1].end
                index = blocks[0].block.at[level]
                label = fitting((f"{axes[level]}={index}", f"{index}"), SMALL, end - start - 0.05)
                if not label:
                    continue
                if across:
                    canvas.line(start + 0.02, at, end - 0.02, at)
                else:
                    canvas.line(at, start + 0.02, at, end - 0.02)
                _write(canvas, side, at + sign * BRACKET / 2, (start + end) / 2, label)
            at += sign * BRACKET
    start, end = placed[0].start, placed[-1].end
    text = shortened(title, 8, max(end - start, LONGEST))
    half = text_width(text, 8) / 2
    middle = (start + end) / 2
    if half > (end - start) / 2:  # a title longer than the side ends, or begins, where the side does
        middle = end - half if across else start + half
    _write(canvas, side, at + sign * TITLE / 2, middle, text, size=8)


def _write(canvas: Canvas, side: Side, depth: float, along: float, text: str, size: float = SMALL) -> None:
    if side in ("top", "bottom"):
        canvas.text(along, depth, text, size, align="center")
    else:
        canvas.text(depth, along, text, size, align="center", upright=True)


def _draw_intervals(canvas: Canvas, side: Side, edge: float, placed: Sequence[Placed]) -> None:
    """Draw as many intervals as have room, from the first on."""
    free = float("-inf")
    for p in placed:
        text = _interval(p)
        wide = text_width(text, SMALL) + 0.06 if side in ("top", "bottom") else 0.12
        if p.middle - wide / 2 < free:
            continue
        free = p.middle + wide / 2
        if side in ("top", "bottom"):
            sign = -1 if side == "top" else 1
            canvas.text(p.middle, edge + sign * INTERVAL / 2, text, SMALL, align="center", colour=GREY)
        else:
            align = "right" if side == "left" else "left"
            canvas.text(edge + (-0.04 if side == "left" else 0.04), p.middle, text, SMALL, align=align, colour=GREY)
