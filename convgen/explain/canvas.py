"""A page to draw on, in inches from its top left corner: the only module that knows matplotlib.

Drawing is deterministic: no clock, no random identifiers, and no state outside the page.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from convgen.errors import InputError

FORMATS = ("png", "svg", "pdf")
INK, GREY, PALE = "#1a1a1a", "#666666", "#c8c8c8"
_FONT = "DejaVu Sans"  # comes with matplotlib
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "convgen",
    "svg.fonttype": "none",  # text stays text: it can be searched, and tests read it
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.7,
}
# No dates and no version of the tool in the file.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

Align = Literal["left", "center", "right"]


def plot_format(path: Path) -> str:
    """The format that a file's suffix asks for.

    Raises:
        InputError: a suffix that can't be drawn.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        said = f"'.{suffix}'" if suffix else "no suffix"
        raise InputError(
            f"cannot draw {path.name}: {said} names no format of a plot", hint="a file that ends in .png, .svg or .pdf"
        )
    return suffix


def _matplotlib() -> Any:
    try:
        for module in ("backends.backend_agg", "figure", "font_manager", "lines", "patches", "textpath"):
            import_module(f"matplotlib.{module}")
        return import_module("matplotlib")
    except ImportError:
        raise InputError("a plot needs matplotlib", hint="pip install 'convgen[plot]'") from None


@contextmanager
def _settings(mpl: Any) -> Generator[None]:
    """Ours and matplotlib's defaults, whatever the user's own configuration says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Inches that a line of text takes at a font size in points."""
    mpl = _matplotlib()
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
        self._mpl = _matplotlib()
        with _settings(self._mpl):
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
        kind = plot_format(path)
        try:
            with _settings(self._mpl), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a font without some character is no reason to fail
                self._figure.savefig(path, format=kind, dpi=dpi, metadata=_METADATA[kind])
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror}", hint="a file in a folder you may write to"
            ) from None
