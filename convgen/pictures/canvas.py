"""A page to draw on, in inches from its top left corner: drawn by matplotlib.

Drawing is deterministic: no clock, no random identifiers, and no state outside the page.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from convgen.pictures.figures import matplotlib, save_figure, settings

INK, GREY, PALE = "#1a1a1a", "#666666", "#c8c8c8"
_FONT = "DejaVu Sans"  # comes with matplotlib
Align = Literal["left", "center", "right"]


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Inches that a line of text takes at a font size in points."""
    mpl = matplotlib()
    font = mpl.font_manager.FontProperties(family=_FONT, size=size)
    return float(mpl.textpath.text_to_path.get_text_width_height_descent(text, font, False)[0]) / 72


def fitting(choices: tuple[str, ...], size: float, width: float) -> str:
    """The first of the texts that is no wider than `width` inches; nothing if none is."""
    return next((text for text in choices if text_width(text, size) <= width), "")


def shortened(text: str, size: float, width: float) -> str:
    """A text cut, with an ellipsis, to `width` inches."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, size: float, width: float) -> list[str]:
    """A text in lines of at most `width` inches, broken at spaces."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, size, width))
    return lines


class Canvas:
    """One page, `width` by `height` inches; y grows downwards."""

    def __init__(self, width: float, height: float) -> None:
        self._mpl = matplotlib()
        with settings(self._mpl):
            figure = self._mpl.figure.Figure(figsize=(width, height), facecolor="white")
            self._mpl.backends.backend_agg.FigureCanvasAgg(figure)
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set_xlim(0, width)
            axes.set_ylim(height, 0)
            axes.set_axis_off()
        self._figure: Any = figure
        self._axes: Any = axes

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        edge: str = "none",
        line: float = 0.6,
        hatch: str = "",
        dashed: bool = False,
    ) -> None:
        """A rectangle; a hatch has the colour of the edge."""
        self._axes.add_artist(
            self._mpl.patches.Rectangle(
                (x, y),
                width,
                height,
                facecolor=fill,
                edgecolor=edge,
                linewidth=line,
                hatch=hatch or None,
                linestyle=(0, (3, 2)) if dashed else "solid",
            )
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, *, colour: str = GREY, line: float = 0.6) -> None:
        self._axes.add_artist(
            self._mpl.lines.Line2D((x0, x1), (y0, y1), color=colour, linewidth=line, solid_capstyle="butt")
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        align: Align = "left",
        colour: str = INK,
        bold: bool = False,
        upright: bool = False,
        boxed: bool = False,
    ) -> None:
        """A line of text, centred vertically on y; `upright` turns it a quarter, `boxed` puts white behind it."""
        if text:
            self._axes.text(
                x,
                y,
                text,
                fontsize=size,
                fontfamily=_FONT,
                ha=align,
                va="center",
                color=colour,
                fontweight="bold" if bold else "normal",
                rotation=90 if upright else 0,
                parse_math=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85} if boxed else None,
            )

    def save(self, path: Path, dpi: int = 110) -> None:
        """Write the page in the format that the suffix names; the same page gives the same bytes.

        Raises:
            InputError: the file can't be written.
        """
        save_figure(self._figure, path, dpi)
