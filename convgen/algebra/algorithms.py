"""The named algorithms of the papers: shorthands for distributions and roles, and nothing else.

Source: docs/algorithms.md; [CF] 3.1 to 3.4, [SP] III-A, [INT] Eqs. 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Letters of an algorithm's axes, and of those that split each channel dimension; N, D, H and W split their own."""

    letters: str
    x_channels: str
    w_filters: str
    w_channels: str
    y_filters: str


ALGORITHMS = {
    "sample": Algorithm("N", "", "", "", ""),
    "spatial": Algorithm("NDHW", "", "", "", ""),
    "stationary-x": Algorithm("NDHWC", "C", "", "C", "C"),
    "stationary-y": Algorithm("NDHWF", "F", "F", "", "F"),
    "stationary-w": Algorithm("NDHWCF", "CF", "F", "C", "FC"),
    "integrated": Algorithm("NDHWF", "", "F", "", ""),
}


def stored_layouts(name: str, conv: Conv, letter: dict[str, Axes]) -> dict[str, Layout]:
    """How x, w and y are stored under a named algorithm.

    Args:
        letter: for each letter, the grid axes that have it, outermost first. Every algorithm may have G.
    """
    a = ALGORITHMS[name]

    def axes(letters: str) -> Axes:
        return tuple(axis for one in letters for axis in letter.get(one, ()))

    rows = tuple(axes(s) if s in a.letters else () for s in conv.letters)
    of_w = {"C": a.w_channels, "F": a.w_filters}
    outer, inner = (of_w[d.name] for d in conv.dims("w"))
    return {
        "x": Layout("x", (axes("N"), axes("G" + a.x_channels), *rows)),
        "w": Layout("w", (axes("G" + outer), axes(inner))),
        "y": Layout("y", (axes("N"), axes("G" + a.y_filters), *rows)),
    }


def letters_of(grid: Grid) -> dict[str, Axes]:
    """The axes of each letter, for a grid whose axes are named by their letters."""
    return {name: (name,) for name in grid.names}
