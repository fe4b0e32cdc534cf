"""Implicit GEMM by boxes: a tile's pixels are a box of samples and rows, which the copy engine fetches as one, zeros
outside included. Forward, and backward-data, where all strides are 1 and channels are last. [KERNELS: 5.1 A]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from convgen.kernels.config import Config, ceil_div, clamp, power_of_two
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work, product_work, rows_made
from convgen.spec.target import Target

NAME = "box"
TEMPLATE = "box.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS, MATRIX_UNITS, WHOLE_LINES = False, True, True


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if target.kind != "cuda" or target.arch not in (90, 100, 120):
        return f"{target} has no copy engine for boxes"
    if not problem.channels_last or problem.phase == "backward_filter":
        return "channels last, forward and backward_data"
    if any(d.stride != 1 for d in problem.dims):
        return "a stride"
    if problem.groups > 1 or problem.rim is not None:
        return "groups and halos in boxes"
    if not problem.channels or not problem.filters or problem.dtype == "float64":
        return "no channels, or float64"
    if problem.channels * problem.element_bytes % 16 or problem.filters * problem.element_bytes % 16:
        return f"{problem.channels} channels and {problem.filters} filters are no multiples of 16 bytes"
    return None


def tiles(problem: Problem, pixels: int) -> list[dict[str, int]]:
    """Boxes of so many pixels, those that waste least first; an operand in parts is cut sample by sample."""
    made = "x" if problem.phase == "backward_data" else "y"
    parts = problem.x_parts > 1 or problem.y_parts > 1
    rows = [d.x if made == "x" else d.y for d in problem.dims]
    powers = [1 << i for i in range(pixels.bit_length())]
    found: list[tuple[int, dict[str, int]]] = []
    for shape in product(*([t for t in powers if t <= power_of_two(r)] for r in rows)):
        samples, rest = divmod(pixels, prod(shape))
        if rest or not samples or samples > (1 if parts else power_of_two(problem.batch)):
            continue
        covered = ceil_div(problem.batch, samples) * prod(ceil_div(r, t) * t for r, t in zip(rows, shape, strict=True))
        names = ("TN", *(f"T{d.name}" for d in problem.dims))
        found.append((covered * samples, dict(zip(names, (samples, *shape), strict=True))))
    found.sort(key=lambda pair: (pair[0], pair[1]["TN"]))  # of a sample's rows, taps read some again
    return [tile for _, tile in found]


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form; the default first."""
    yield default(problem, target)
    made, summed = _sides(problem)
    for pixels, across, depth, warps, stages in product(
        (64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64), (4, 8), (2, 3, 4)
    ):
        shared = (pixels + across) * depth * problem.element_bytes * stages
        fits = across <= clamp(made, 16, 256) and depth <= clamp(summed, 16, 64) and shared <= target.shared_bytes
        if fits and pixels * across <= 128 * warps * target.warp:
            for tile in tiles(problem, pixels)[:3]:
                yield _config(problem, tile, across, depth, warps, stages)


def default(problem: Problem, target: Target) -> Config:
    """What an untuned problem gets."""
    made, summed = _sides(problem)
    across = clamp(made, 16, 64 if problem.element_bytes == 4 else 128)
    depth = clamp(summed, 16, 64 if problem.element_bytes == 2 else 32)
    few = problem.pixels * made < 128 * across * target.processors
    fitting = tiles(problem, 64 if few else 128) or tiles(problem, 64)
    if not fitting:  # fewer pixels than a tile: what is left over lies outside of the tensor
        rows = problem.dims if len(problem.dims) == 1 else problem.dims[-1:]
        fitting = [{"TN": 1, **{f"T{d.name}": 1 for d in problem.dims}, f"T{rows[-1].name}": 64}]
    pixels = prod(fitting[0].values())
    return _config(problem, fitting[0], across, depth, 8 if pixels * across >= 8192 else 4, 3)


def _sides(problem: Problem) -> tuple[int, int]:
    """Channels that are made, and that are summed."""
    pair = (problem.filters, problem.channels)
    return pair if problem.phase == "forward" else (pair[1], pair[0])


def _config(problem: Problem, tile: dict[str, int], across: int, depth: int, warps: int, stages: int) -> Config:
    names = ("BF", "BC") if problem.phase == "forward" else ("BC", "BF")
    return Config(NAME, (*tile.items(), (names[0], across), (names[1], depth)), warps, stages)


def words(problem: Problem) -> type[Words]:
    return BoxWords


def work(problem: Problem, config: Config) -> Work:
    """What a launch does: boxes cover samples and rows."""
    tile = config.tile
    extents = [tile[f"T{d.name}"] for d in problem.dims]
    covered = prod(ceil_div(r, e) for r, e in zip(rows_made(problem), extents, strict=True))
    return product_work(problem, config, tile["TN"] * prod(extents), ceil_div(problem.batch, tile["TN"]) * covered)


class BoxWords(Words):
    """Boxes of memory, named by their corner; parts of an operand follow each other as samples do."""

    @property
    def box_pixels(self) -> str:
        return " * ".join(["TN", *(f"T{d.letter.upper()}" for d in self.dims)])

    @property
    def box_extents(self) -> str:
        return ", ".join(f"T{d.letter.upper()}" for d in self.dims)

    def box_tile(self, config: Config) -> str:
        return "(" + "".join(f"{config.tile[f'T{d.letter.upper()}']}, " for d in self.dims) + ")"

    def box_place(self, tensor: str, *, made: bool = False) -> str:
        """Sample and rows of the corner of what is made, or of what a tap reads for it."""
        words = [f"{tensor}_part * N + n" if self.parts(tensor) > 1 else "n"]
        for d in self.dims:
            tap = times(d.k, d.dilation) if d.taps > 1 else ""
            if made:
                words.append(getattr(d, tensor))
            elif tensor == "x":
                words.append(f"{d.y} - {d.pad}" + (f" + {tap}" if tap else ""))
            else:
                words.append(f"{d.x} + {d.pad}" + (f" - {tap}" if tap else ""))
        return ", ".join(words)

    @property
    def box_weights(self) -> str:
        """Corner of a box of w: part and number of the filter, tap, part and number of the channel."""
        parts = ["y_part" if self.parts("y") > 1 else "0", "f", "tap" if self.problem.taps > 1 else "0"]
        return ", ".join([*parts, "x_part" if self.parts("x") > 1 else "0", "c"])

    def box_descriptors(self, config: Config) -> list[tuple[str, str, str]]:
        """For each tensor of the launch its shape and box as text; none for bias, which is read by pointers."""
        p, tile = self.problem, config.tile
        box = ", ".join(str(tile[n]) for n in ("TN", *(f"T{d.letter.upper()}" for d in self.dims)))

        def activation(tensor: str, channels: str) -> tuple[str, str]:
            n = times("s.n", self.parts(tensor))
            name = "channels" if tensor == "x" else "filters"
            return f"({n}, *s.{tensor}, s.{name})", f"[{box}, {tile[channels]}]"

        w = f"({p.y_parts}, s.filters, {p.taps}, {p.x_parts}, s.channels)", f"[1, {tile['BF']}, 1, 1, {tile['BC']}]"
        texts = {"x": activation("x", "BC"), "dx": activation("x", "BC"), "w": w}
        texts |= {"y": activation("y", "BF"), "dy": activation("y", "BF"), "bias": ("", "")}
        return [(name, *texts[name]) for name in self.tensors(1)]
