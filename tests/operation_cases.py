"""Random operations, a function a kind: extents are ragged, small, and some are 1."""

from __future__ import annotations

from math import prod
from random import Random

import torch

from convgen.algebra.conv import SPATIAL_NAMES, Conv, Spatial
from convgen.algebra.relations import Taps
from convgen.operations.convolution import Convolution
from convgen.operations.pooling import MaxPool
from convgen.operations.row import Operation


def spatial(draw: Random, dims: int) -> tuple[Spatial, ...]:
    found: list[Spatial] = []
    for name in SPATIAL_NAMES[dims]:
        while True:
            pads = (draw.randint(0, 3), draw.randint(0, 3))
            s = Spatial(name, draw.randint(1, 11), draw.randint(1, 4), draw.randint(1, 3), *pads, draw.randint(1, 2))
            if s.out >= 1:
                break
        found.append(s)
    return tuple(found)


def convolution(draw: Random) -> Operation:
    groups = draw.choice((1, 1, 2, 3, 4))
    conv = Conv(
        draw.randint(1, 4),
        groups * draw.randint(1, 3),
        groups * draw.randint(1, 3),
        spatial(draw, draw.choice((1, 1, 2))),
        groups,
    )
    return Convolution(draw.choice(("forward", "backward_data", "backward_filter")), conv)


def max_pool(draw: Random) -> Operation:
    dims = spatial(draw, draw.choice((1, 2)))
    taps = tuple(Taps(s.kernel, s.stride, min(s.pad_lo, s.kernel // 2), s.dilation) for s in dims)
    out = tuple((s.extent + 2 * t.pad - t.reach - 1) // t.stride + 1 for s, t in zip(dims, taps, strict=True))
    if min(out) < 1:
        return max_pool(draw)
    return MaxPool((draw.randint(1, 4), draw.randint(1, 4), *(s.extent for s in dims)), taps, out)


CASES = {"convolution": convolution, "max_pool": max_pool}


def operands(draw: Random, operation: Operation) -> list[torch.Tensor]:
    """Whole numbers, so that sums are exact in whatever order, and no two alike, so that a maximum has one place."""
    make = torch.Generator().manual_seed(draw.randrange(2**31))
    shapes = [i.shape for i in operation.signatures[0].inputs]
    return [(torch.randperm(prod(s), generator=make) - prod(s) // 2).reshape(s).double() for s in shapes]
