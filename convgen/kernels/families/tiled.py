"""TF32's filter gradient where dy is laid out by tiles first: pixels of a box side by side, a row a filter.

Matrix instructions want TF32 by what is summed, here pixels, and a tensor whose channels are last has channels there.
Of a product's sides one may come from registers; a first launch gives dy, the other one, the order in which it is read,
so that none is read from shared memory and written back. [KERNELS: 5.3]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convgen.kernels.box_tiles import taps_together, tile_pixels
from convgen.kernels.config import Config
from convgen.kernels.families import box
from convgen.kernels.inner import InnerWords
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work
from convgen.spec.target import Target

NAME = "tiled"
TEMPLATE = "tiled.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS = False


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.phase != "backward_filter" or problem.dtype != "tfloat32":
        return "it is for TF32's filter gradients"
    if problem.rim is not None or problem.channels < 64 or box.deepest(problem) < 64:
        return f"a halo, or {problem.channels} channels, fewer than 64 or, with a stride, no multiple of it"
    return box.refusal(problem, target)


def _fits(config: Config) -> bool:
    """Channels are the product's rows; a box has whole rows of 16 bytes."""
    return config.tile["BC"] >= 64 and config.tile["BF"] >= 16


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: those of boxes, the default first."""
    yield default(problem, target)
    yield from (replace(c, family=NAME) for c in box.configs(problem, target) if _fits(c))


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: of the sizes of boxes, the one of the least estimated time."""
    sizes = [replace(c, family=NAME) for c in box.sizes(problem, target) if _fits(c)]
    return box.least(problem, target, sizes, work)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: those of boxes."""
    return box.conditions(problem)


def words(problem: Problem) -> type[Words]:
    return TiledWords


def work(problem: Problem, config: Config) -> Work:
    """The work of the launch of products; dy is also read and written once before."""
    w = box.work(problem, config)
    rows, columns = config.tile["BC"] * taps_together(problem, config), config.tile["BF"]
    tiled = box.count_boxes(problem, config.tile) * tile_pixels(problem, config) * problem.filters * problem.y_parts
    moved = (problem.elements["y"] * problem.y_parts + tiled) * problem.element_bytes
    return replace(w, tile=(rows, columns, w.tile[2]), rewrites=False, launches=1, more_bytes=moved)


class TiledWords(InnerWords):
    """Boxes of x, and tiles of dy that lie behind each other."""

    def is_turned(self, config: Config) -> bool:
        return True

    def read_dy(self, config: Config) -> str:
        part = "y_part * F + f" if self.problem.y_parts > 1 else "f"
        return f"dy.load([{part}, box * ({self.box_pixels})]).T"

    def view_of_y(self, config: Config) -> list[str]:
        pixels, filters = tile_pixels(self.problem, config), times("s.filters", self.problem.y_parts)
        return [f"({filters}, {self.host_boxes(config)} * {pixels})", f"[{config.tile['BF']}, {pixels}]"]

    @property
    def rows_made(self) -> str:
        return self.extent(self.extents("y"))

    @property
    def tile_names(self) -> list[str]:
        """Extents of a box, in pixels."""
        return ["TN", *(f"T{d.letter.upper()}" for d in self.dims)]

    def pixels_of(self, config: Config) -> int:
        return tile_pixels(self.problem, config)
