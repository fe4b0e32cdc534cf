"""A frame of logarithmic axes on a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from convgen.pictures.canvas import GREY, INK, PALE, Align, Canvas


@dataclass(frozen=True, slots=True)
class LogAxes:
    """A frame of logarithmic axes on a page, in inches from the top left."""

    x: float
    y: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = math.log(x / self.x_range[0]) / math.log(self.x_range[1] / self.x_range[0])
        up = math.log(y / self.y_range[0]) / math.log(self.y_range[1] / self.y_range[0])
        return self.x + across * self.width, self.y + (1 - up) * self.height

    def draw(self, canvas: Canvas, title: str, x_name: str, y_name: str) -> None:
        """Draw the frame, ticks at 1, 2 and 5 times powers of ten, and names."""
        canvas.rect(self.x, self.y, self.width, self.height, edge=GREY)
        canvas.text(self.x, self.y - 0.16, title, 9, bold=True)
        canvas.text(self.x + self.width / 2, self.y + self.height + 0.38, x_name, 8, align="center")
        canvas.text(self.x - 0.52, self.y + self.height / 2, y_name, 8, align="center", upright=True)
        for value in ticks(self.x_range):
            px, _ = self.at(value, self.y_range[0])
            canvas.line(px, self.y, px, self.y + self.height, colour=PALE)
            canvas.text(px, self.y + self.height + 0.14, f"{value:g}", 7, align="center", colour=GREY)
        for value in ticks(self.y_range):
            _, py = self.at(self.x_range[0], value)
            canvas.line(self.x, py, self.x + self.width, py, colour=PALE)
            canvas.text(self.x - 0.08, py, f"{value:g}", 7, align="right", colour=GREY)

    def point(self, canvas: Canvas, x: float, y: float, colour: str, name: str = "", align: Align = "left") -> None:
        px, py = self.at(x, y)
        canvas.rect(px - 0.035, py - 0.035, 0.07, 0.07, fill=colour, edge=INK, line=0.4)
        canvas.text(px + (0.07 if align == "left" else -0.07), py - 0.06, name, 6, align=align, colour=INK)

    def segment(self, canvas: Canvas, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        canvas.line(*self.at(*start), *self.at(*end), colour=colour, line=1.2)


def ticks(bounds: tuple[float, float]) -> list[float]:
    """1, 2 and 5 times powers of ten inside the bounds."""
    low, high = (math.floor(math.log10(bound)) for bound in bounds)
    every = [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    return [value for value in every if bounds[0] <= value <= bounds[1]]
