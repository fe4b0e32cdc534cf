"""The parameters of the tests that DistConv publishes, and the layers that it gets wrong without an error.

`python bench/distconv_published.py` says whose they are, and checks them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from networks_on_ranks import Errors, check, draw_parameters, imported, random_input
from torch import nn

LETTERS = {1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True)
class Case:
    """A layer on a grid."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    grid: Mapping[str, int]
    channels_last: bool = False

    def check(self) -> Errors:
        module, x = self.module.to(torch.float64), random_input(self.shape)
        draw_parameters(module)
        if self.channels_last:
            form = FORMATS[len(self.shape) - 2]
            module, x = module.to(memory_format=form), x.contiguous(memory_format=form)
        return check(imported(module, x), self.grid)


class Around(nn.Module):
    """Circular padding before a layer that has none of its own."""

    def __init__(self, pad: int, layer: nn.Module, dims: int) -> None:
        super().__init__()
        self.pad, self.layer = (pad, pad) * dims, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.pad(x, self.pad, mode="circular"))


def conv(dims: int, k: int | tuple[int, ...], *, padding: Any = None, **settings: Any) -> nn.Module:
    if padding is None:
        padding = k // 2 if isinstance(k, int) else tuple(n // 2 for n in k)
    return getattr(nn, f"Conv{dims}d")(4, 8, k, padding=padding, **settings)


def shape(dims: int, cube: int, samples: int = 1) -> tuple[int, ...]:
    return (samples, 4, *[cube if dims == 3 else 64] * dims)


def basic(cube: int) -> Iterator[Case]:
    for dims, k, ranks in product((1, 2, 3), (1, 3, 5), (1, 4)):
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k}", conv(dims, k), shape(dims, cube), {a: ranks})


def strides(cube: int) -> Iterator[Case]:
    for dims, k, s in product((1, 2, 3), (1, 2, 3), (2, 4)):
        layer = conv(dims, k, padding=int(k == 3), stride=s)
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k} s{s}", layer, shape(dims, cube), {a: 4})


def splitting(cube: int) -> Iterator[Case]:
    for dims, k, s, mode in product((2, 3), (1, 3, 5), (1, 2, 4), ("zeros", "circular")):
        layer, name = conv(dims, k, stride=s, padding_mode=mode), f"{dims}-D k{k} s{s} {mode}"
        for a, b in permutations(LETTERS[dims], 2):
            yield Case(name, layer, shape(dims, cube), {a: 2, b: 2})
        yield Case(name, layer, shape(dims, cube), {LETTERS[dims][0]: 3, LETTERS[dims][1]: 3})
        if dims == 3:
            yield Case(name, layer, shape(dims, cube), dict.fromkeys("DHW", 2))


def unlike(cube: int) -> Iterator[Case]:
    for k, mode, s in product(((3, 5), (5, 3), (1, 3), (3, 1)), ("zeros", "circular"), (1, 2)):
        layer = conv(2, k, stride=s, padding_mode=mode)
        for grid in ({"H": 2, "W": 2}, {"H": 4}, {"H": 3, "W": 3}):
            yield Case(f"k{k} s{s} {mode}", layer, shape(2, cube), grid)
    for k in ((3, 5, 7), (1, 3, 5), (7, 3, 1), (5, 3, 1)):
        for grid in (dict.fromkeys("DHW", 2), {"D": 4}):
            yield Case(f"k{k}", conv(3, k), shape(3, cube), grid)


def periodic(cube: int) -> Iterator[Case]:
    for dims, k, s, ranks in product((1, 2, 3), (1, 3, 5), (1, 2), (2, 4)):
        layer = conv(dims, k, stride=s, bias=False, padding_mode="circular")
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k} s{s}", layer, shape(dims, cube), {a: ranks})


def transposed(cube: int) -> Iterator[Case]:
    for dims, k, s in product((1, 2, 3), (1, 3, 5), (1, 2, 4)):
        make, pad = getattr(nn, f"ConvTranspose{dims}d"), k // 2
        plain = make(4, 8, k, s, padding=(k - 1) // 2, output_padding=s - 1)
        round_ = Around(pad, make(4, 8, k, s, padding=(k + 2 * pad * s - 1) // 2, output_padding=s - 1), dims)
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k} s{s}", plain, shape(dims, cube), {a: 4})
            yield Case(f"{dims}-D k{k} s{s} circular", round_, shape(dims, cube), {a: 4})


def channels_last(cube: int) -> Iterator[Case]:
    for dims, k, mode in product((2, 3), (1, 3, 5), ("zeros", "circular")):
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k} {mode}", conv(dims, k, padding_mode=mode), shape(dims, cube), {a: 4}, True)


def with_ddp(cube: int) -> Iterator[Case]:
    for dims, k in product((1, 2, 3), (1, 3, 5)):
        for a in LETTERS[dims]:
            yield Case(f"{dims}-D k{k}", conv(dims, k), shape(dims, cube, 2), {"N": 2, a: 2})


def wrong(cube: int) -> Iterator[Case]:
    """Also ragged, with blocks that some ranks have none of, and on grids that split samples and channels."""
    for dims in (1, 2, 3):
        made = {
            "max pooling k3 s2 p1": getattr(nn, f"MaxPool{dims}d")(3, 2, 1),
            "average pooling k3 s1 p1": getattr(nn, f"AvgPool{dims}d")(3, 1, 1),
            "batch norm in training": getattr(nn, f"BatchNorm{dims}d")(4),
            "group norm": nn.GroupNorm(2, 4),
            "linear upsampling": nn.Upsample(scale_factor=2, mode=("linear", "bilinear", "trilinear")[dims - 1]),
            "global pooling": getattr(nn, f"AdaptiveAvgPool{dims}d")(1),
            "transposed k3 s1 p1": getattr(nn, f"ConvTranspose{dims}d")(4, 8, 3, 1, 1),
        }
        first, last = LETTERS[dims][0], LETTERS[dims][-1]
        grids = [{first: 4}, {last: 3}, {"N": 2, first: 2}, {"C": 2, last: 2}]
        grids += [{"H": 2, "W": 2}] * (dims > 1) + [dict.fromkeys("DHW", 2)] * (dims > 2)
        for (name, layer), grid in product(made.items(), grids):
            yield Case(f"{dims}-D {name}", layer, shape(dims, cube, 2), grid)
            yield Case(f"{dims}-D {name}, ragged", layer, (3, 4, *[7, 5, 6][:dims]), grid)


KINDS = {
    f.__name__: f for f in (basic, strides, splitting, unlike, periodic, transposed, channels_last, with_ddp, wrong)
}
