"""What stands on a page, as boxes: for tests of what may lie over what."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from convgen.pictures.canvas import Canvas


def boxes_of(page: Canvas) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """What stands on a page, in pixels: words and filled rectangles, each with its bounding box."""
    figure = page._figure
    renderer = figure.canvas.get_renderer()
    words = [(t.get_text(), t.get_window_extent(renderer)) for t in page._axes.texts]
    filled = [(to_hex(p.get_facecolor()), p.get_window_extent()) for p in page._axes.artists + page._axes.patches
              if isinstance(p, Rectangle) and p.get_facecolor()[3]]  # fmt: skip
    return words, filled


def meet(a: Any, b: Any) -> bool:
    """Whether two boxes share more than a pixel each way."""
    wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(wide > 1 and high > 1)
