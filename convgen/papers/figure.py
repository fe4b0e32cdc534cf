"""A figure or table of a paper by convgen's models: series to draw, and values for the paper's statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.pictures.canvas import GREY, Canvas
from convgen.pictures.colours import rank_colour
from convgen.pictures.log_axes import LogAxes
from convgen.resources import PACKAGE
from convgen.spec.text import aligned

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a figure; `published`: the text's numbers at some of its places, drawn as squares."""

    name: str
    points: Points
    published: Points = ()


@dataclass(frozen=True)
class Figure:
    """A figure or table by the models.

    Attributes:
        name: as `convgen papers` takes it.
        x, y: what the axes are, with units.
        found: modelled values by the statement's name, in its unit.
        remarks: what was assumed, and what is missing.
    """

    name: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    found: Mapping[str, float] = field(default_factory=dict[str, float])
    remarks: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        series = [{"name": s.name, "points": s.points, "published": s.published} for s in self.series]
        return {"name": self.name, "title": self.title, "x": self.x, "y": self.y, "series": series,
                "found": dict(self.found), "remarks": list(self.remarks)}  # fmt: skip

    def text(self) -> str:
        """A table with a line for each series and a column for each place."""
        places = sorted({x for s in self.series for x, _ in s.points})
        rows = [["", *(f"{x:g}" for x in places)]]
        for s in self.series:
            at = dict(s.points)
            rows.append([s.name, *(f"{at[x]:.4g}" if x in at else "" for x in places)])
        lines = [self.title, f"{self.y}, over {self.x}", *aligned(rows, range(1, len(places) + 1))]
        return "\n".join([*lines, *self.remarks])

    def page(self) -> Canvas:
        """The figure on a page: both axes logarithmic, series in colours, the text's numbers as squares."""
        xs = [x for s in self.series for x, _ in (*s.points, *s.published)]
        ys = [y for s in self.series for _, y in (*s.points, *s.published)]
        if not xs:
            raise InputError(f"{self.name} has nothing to draw: {' '.join(self.remarks)}")
        height = max(3.6, 0.17 * len(self.series) + 0.4)
        canvas = Canvas(9.6, height + 1.7)
        axes = LogAxes(1.0, 0.8, 5.4, height, (min(xs) / 1.2, max(xs) * 1.2), (min(ys) / 1.3, max(ys) * 1.3))
        axes.draw(canvas, "", self.x, self.y)
        canvas.text(0.3, 0.3, self.title, 10, bold=True)
        if any(s.published for s in self.series):
            canvas.text(0.3, 0.55, "lines: the model; squares: the text", 8, colour=GREY)
        for place, s in enumerate(self.series):
            colour, y = rank_colour(place, len(self.series)), 0.95 + 0.17 * place
            canvas.line(6.6, y, 6.85, y, colour=colour, line=1.8)
            canvas.text(6.92, y, s.name, 7)
            for one, other in pairwise(s.points):
                axes.segment(canvas, one, other, colour)
            for x, value in s.published:
                axes.point(canvas, x, value, colour)
        return canvas


def network_file(name: str) -> Path:
    """The file of a network of the papers.

    Raises:
        InputError: convgen is installed without its examples.
    """
    path = PACKAGE.parent / "examples" / "networks" / f"{name}.yaml"
    if not path.is_file():
        raise InputError(f"{path.name} is no part of an installed convgen", hint="a checkout's examples/networks")
    return path


def said_of(name: str) -> str:
    """A figure's name as papers print it: fig3 is Fig. 3."""
    return name.replace("fig", "Fig. ")
