"""One channel a group: products of single numbers, bound by memory. All phases, any multiplier of filters."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.kernels.config import Config, ceil_div, clamp
from convgen.kernels.families.pointer import MOST_BOXES
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work, summed_pixels
from convgen.spec.target import Target

NAME = "depthwise"
TEMPLATE = "depthwise.py.jinja"
NEEDS = ()
SINGLE_CHANNELS = True


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.epilogue and problem.phase == "backward_data":
        return "steps behind backward-data"
    if problem.channels != 1 or problem.groups == 1:
        return f"{problem.groups} groups of {problem.channels} channels; several of one"
    if problem.rim is not None and problem.rim > MOST_BOXES:
        return f"a halo in {problem.rim} boxes; unpacked, it can"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form; the default first."""
    yield default(problem, target)
    across = clamp(_across(problem), 1, 128)
    for pixels in (16, 32, 64, 128, 256):
        for others in (1, 2, 4, 8, 16, 32, 64, 128):
            for warps in (2, 4, 8):
                if others <= across and 32 * warps <= pixels * others <= 64 * warps * target.warp:
                    for split in _splits(problem, target, pixels, others):
                        yield Config(NAME, (("BP", pixels), ("BG", others)), warps, 2, split)


def _across(problem: Problem) -> int:
    return problem.groups if problem.phase == "backward_data" else problem.groups * problem.filters


def _splits(problem: Problem, target: Target, pixels: int, others: int) -> list[int]:
    if problem.phase != "backward_filter":
        return [1]
    programs = ceil_div(_across(problem), others) * problem.taps
    most = max(1, ceil_div(problem.pixels, 4 * pixels))
    return sorted({max(1, min(most, wave * target.processors // programs)) for wave in (2, 4)} | {1})


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: a tile as wide as memory is contiguous."""
    if problem.channels_last:
        others = clamp(_across(problem), 1, 64)
        pixels = clamp(problem.pixels, 16, max(16, 2048 // others))
    else:
        pixels = clamp(problem.pixels, 16, 256)
        others = clamp(_across(problem), 1, 8)
    return Config(NAME, (("BP", pixels), ("BG", others)), 4, 2, _splits(problem, target, pixels, others)[-1])


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: none."""
    return []


def words(problem: Problem) -> type[Words]:
    return DepthwiseWords


def work(problem: Problem, config: Config) -> Work:
    """The work of a launch: products of single numbers."""
    tile = config.tile
    across, product = ceil_div(_across(problem), tile["BG"]), (tile["BP"], tile["BG"], 1)
    if problem.phase == "backward_filter":
        return Work(
            across * problem.taps * config.split, summed_pixels(problem, config), product, config.split, matrix=False
        )
    return Work(ceil_div(problem.pixels, tile["BP"]) * across, problem.taps, product, matrix=False)


class DepthwiseWords(Words):
    """A channel a group: vectors of groups or filters instead of tiles of a group's channels."""

    def single(self, tensor: str, coordinate: str) -> str:
        """The distance from a pixel's start to a group of x, or to a filter of y."""
        text = self._rows_together(tensor).text(c=coordinate)
        return text if text.isidentifier() else f"({text})"

    def single_element(self, tensor: str, coordinate: str) -> str:
        row = self.along(f"{tensor}_row")
        if self.problem.rim is not None and not self.last:
            return f"{row} + {self.across(coordinate)} * {self.along(f'{tensor}_step')}"
        return f"{row} + {self.across(self.single(tensor, coordinate))}"

    def rows_that_read(self) -> list[str]:
        """Rows of y of which this tap reads rows xh, xw of x; there are none between a stride's."""
        lines, conditions = list[str](), ["made"]
        for d in self.dims:
            tap = f" - {times(d.k, d.dilation)}" if d.taps > 1 else ""
            if d.stride == 1:
                lines.append(f"{d.y} = {d.x} + {d.pad}{tap}")
            else:
                lines.append(f"{d.y} = ({d.x} + {d.pad}{tap}) // {d.stride}")
                conditions.append(f"({d.x} + {d.pad}{tap} == {d.y} * {d.stride})")
        return [*lines, f"inside = {' & '.join([*conditions, self.inside('y')])}"]
