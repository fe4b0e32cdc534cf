"""A kernel's configuration, and the arithmetic of tiles that families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from convgen.errors import InputError
from convgen.kernels.problem import Problem


@dataclass(frozen=True, slots=True)
class Config:
    """Which family makes a kernel, and how.

    Attributes:
        tiles: extents of a program's tile by the name they have in the kernel: BP pixels, BF filters, BC channels.
        warps, stages: of a GPU's program; 0 where ATen convolves.
        split: how many pieces the sum is cut into, each summed by programs of its own: backward-filter's pixels are
            cut, and for the family by boxes the steps of a tile.
    """

    family: str
    tiles: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 3
    split: int = 1

    @property
    def tile(self) -> dict[str, int]:
        return dict(self.tiles)

    def __str__(self) -> str:
        """`pointer BP=64 BF=64 BC=32 warps=4 stages=3 split=2`; zeros, and a split of 1, are left out."""
        rest = (("warps", self.warps), ("stages", self.stages), ("split", self.split if self.split > 1 else 0))
        words = [f"{n}={v}" for n, v in self.tiles] + [f"{n}={v}" for n, v in rest if v]
        return " ".join([self.family, *words])

    def as_dict(self) -> dict[str, int]:
        return {**self.tile, "warps": self.warps, "stages": self.stages, "split": self.split}


def parse_config(text: str) -> Config:
    """The configuration that prints as this text.

    Raises:
        InputError: no configuration prints as this text.
    """
    family, *words = text.split() or [""]
    if not family:
        raise InputError(f"{text!r} is no kernel", hint="a family and NAME=NUMBER words, as tune prints them")
    values: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if not name.isidentifier() or not number.isdecimal() or name in values:
            raise InputError(
                f"{text!r} is no kernel: {word!r}", hint="a family and NAME=NUMBER words, as tune prints them"
            )
        values[name] = int(number)
    warps, stages, split = (values.pop(n, d) for n, d in (("warps", 0), ("stages", 0), ("split", 1)))
    return Config(family, tuple(values.items()), warps, stages, split)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def clamp(n: int, lo: int, hi: int) -> int:
    """A tile's extent for n elements: a power of two between lo and hi."""
    return max(lo, min(hi, power_of_two(n)))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def largest(problems: Sequence[Problem]) -> Problem:
    """The rank with most to do: kernels are sized for it."""
    return max(problems, key=lambda p: (p.flops, p.channels, p.filters))


def even(problems: Sequence[Problem], config: Config) -> frozenset[str]:
    """The ones of "c" and "f" whose tiles divide their extent on every rank."""
    tiles = config.tile
    extents = {"c": ("BC", [p.channels for p in problems]), "f": ("BF", [p.filters for p in problems])}
    return frozenset(
        v for v, (tile, counts) in extents.items() if tile in tiles and all(n % tiles[tile] == 0 for n in counts)
    )


def alignment(problems: Sequence[Problem], tensor: str) -> int:
    """The number of elements, 16 bytes at most, at a multiple of which every pixel of x or y begins."""
    if not problems[0].channels_last:
        return 1
    return problems[0].vector(*(p.channels if tensor == "x" else p.filters for p in problems))


def rows_alignment(problems: Sequence[Problem], tensor: str) -> int:
    """The number of elements, 16 bytes at most, of which a sample's rows of x or y are a multiple where they lie side
    by side."""
    if problems[0].channels_last:
        return 1
    return problems[0].vector(*(prod(d.x if tensor == "x" else d.y for d in p.dims) for p in problems))
