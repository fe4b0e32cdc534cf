"""ATen's convolution of operands in another arrangement: memory format, channels padded to a multiple, pieces of the
samples, or of the channels that are made, one after the other. What that copies is part of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from convgen.kernels.config import Config
from convgen.kernels.families import aten
from convgen.kernels.problem import Problem
from convgen.spec.target import Target

NAME = "arranged"
MULTIPLES = (1, 4, 8, 16, 32)
MOST_PADDING = 4  # times the channels that there are


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    return aten.refusal(problem, target)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Every combination that differs from the others in what it does, but ATen's plain call."""
    own = int(problem.channels_last)
    formats = (own,) if len(problem.dims) == 1 else (own, 1 - own)
    grouped = problem.groups > 1
    channels, filters = ((1,), (1,)) if grouped else (_multiples(problem.channels), _multiples(problem.filters))
    for last, c, f, samples, cut in product(formats, channels, filters, _samples(problem), _cuts(problem)):
        if (last, c, f, samples, cut) != (own, 1, 1, 0, 1):
            yield _config(last, c, f, samples, cut)


def default(problem: Problem, target: Target) -> Config:
    """The layer's own arrangement: the plain call."""
    return _config(int(problem.channels_last), 1, 1, 0, 1)


def _config(last: int, channels: int, filters: int, samples: int, cut: int) -> Config:
    tiles = (("last", last), ("C", channels), ("F", filters), ("samples", samples), ("cut", cut))
    return Config(NAME, tiles, warps=0, stages=0)


def _multiples(count: int) -> tuple[int, ...]:
    """Multiples that give different counts of channels."""
    padded = {-(-count // m) * m: m for m in reversed(MULTIPLES)}
    return tuple(sorted(m for n, m in padded.items() if n <= max(MOST_PADDING * count, 8)))


def _samples(problem: Problem) -> tuple[int, ...]:
    """Samples of a piece; 0 is all. Sums of pieces would round twice in 16-bit types."""
    if problem.phase == "backward_filter" and problem.element_bytes == 2:
        return (0,)
    return (0, *(n for n in (1, 2, 4, 8, 16, 32, 64) if n < problem.batch))


def _cuts(problem: Problem) -> tuple[int, ...]:
    """Pieces of the channels that are made: filters in forward and backward-filter, else channels."""
    made = problem.channels if problem.phase == "backward_data" else problem.filters
    return (1,) if problem.groups > 1 else tuple(n for n in (1, 2, 4, 8) if n == 1 or made >= 8 * n)
