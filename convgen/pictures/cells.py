"""Small pictures of a line: how a tensor is split, as a cell a dimension, and bytes as a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

from convgen.pictures.canvas import GREY, INK, PALE, Canvas, fitting

HEIGHT = 0.145


def draw_cells(
    canvas: Canvas,
    x: float,
    y: float,
    wide: float,
    shape: Sequence[int],
    stored: Sequence[Sequence[str]],
    colours: Mapping[str, str],
) -> None:
    """Draw a cell for each dimension, centred on y: in the colours of the axes that split it, white where none does."""
    for n, axes in zip(shape, stored, strict=True):
        for i, axis in enumerate(axes):
            part = wide / len(axes)
            canvas.rect(x + i * part, y - HEIGHT / 2, part, HEIGHT, fill=colours[axis])
        canvas.rect(x, y - HEIGHT / 2, wide, HEIGHT, edge=INK if axes else PALE, line=0.6)
        said = fitting((f"{n}/{'.'.join(axes)}" if axes else str(n), str(n)), 6.5, wide - 0.02)
        canvas.text(x + wide / 2, y, said, 6.5, align="center", colour=INK if axes else GREY)
        x += wide


LABEL = 0.42  # inches that a scale's widest label takes, "100 kB", with a gap
WORDS = 6.5  # font size of words beside a bar, in points


class Bars:
    """Bars of bytes on one logarithmic scale, and words beside them, which no bar runs under.

    Args:
        least, most: bytes of the shortest and the longest bar.
        length: inches of the longest bar.
        words: inches for the words beside it.
    """

    def __init__(self, least: int, most: int, length: float, words: float) -> None:
        self.low, self.high = int(log10(max(least, 1))), max(log10(max(most, 10)), int(log10(max(least, 1))) + 1)
        self.length, self.words = length, words

    def at(self, size: float) -> float:
        """Inches of a bar for so many bytes, at least 0.04."""
        return max(self.length * (log10(max(size, 1)) - self.low) / (self.high - self.low), 0.04)

    def draw_scale(self, canvas: Canvas, x: float, y: float, bottom: float) -> None:
        """Decades, as faint lines down to `bottom`, with bytes above."""
        decade = self.length / (self.high - self.low)
        step = next(n for n in range(1, 100) if n * decade >= LABEL)
        for power in range(self.low, int(self.high + 0.8), step):
            here = x + self.length * (power - self.low) / (self.high - self.low)
            canvas.line(here, y + 0.07, here, bottom, colour="#e4e4e4", line=0.5)
            canvas.text(here, y, bytes_text(10**power), 6, align="center", colour=GREY)

    def draw(
        self, canvas: Canvas, x: float, y: float, parts: Sequence[tuple[str, int]], texts: tuple[str, ...]
    ) -> None:
        """Draw a bar for the sum of its parts, coloured by their shares, and the first text that fits beside it."""
        total = sum(size for _, size in parts)
        if total:
            draw_bar(canvas, x, y, self.at(total), parts)
            canvas.text(x + self.length + 0.06, y, fitting(texts, WORDS, self.words - 0.08), WORDS)


def draw_bar(canvas: Canvas, x: float, y: float, length: float, parts: Sequence[tuple[str, int]]) -> None:
    """Draw a bar, centred on y, in the colours of its parts, with lengths in proportion to their sizes."""
    total = sum(size for _, size in parts)
    for colour, size in parts:
        if size:
            canvas.rect(x, y - HEIGHT / 2, length * size / total, HEIGHT, fill=colour)
            x += length * size / total


def bytes_text(size: float) -> str:
    """Three digits and a unit: 65.5 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
