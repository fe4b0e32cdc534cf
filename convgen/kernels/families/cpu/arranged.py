"""ATen's convolution of operands in another arrangement: memory format, channels padded to a multiple, pieces of the
samples, or of the channels that are made, one after the other. What that copies is part of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.families import aten
from convgen.kernels.problem import Problem
from convgen.kernels.work import CpuWork
from convgen.operations.convolution import MAKES, READS
from convgen.spec.target import Target

NAME = "arranged"
TEMPLATE, HELPERS, RATE = "cpu_arranged.py.jinja", ("pieces", "fills"), 0.6
MULTIPLES = (1, 4, 8, 16, 32)
SIMD_BYTES = 64
MOST_PADDING = 4  # padding makes at most so many times the channels


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
    return plain(problem)


def plain(problem: Problem) -> Config:
    """ATen's plain call."""
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


def printed(problem: Problem, config: Config) -> Config:
    """The configuration that the template is told."""
    return config


def work(problem: Problem, config: Config) -> CpuWork:
    """The work of the calls, and of the copies around them."""
    made, tile = MAKES[problem.phase], config.tile
    channels, filters, pieces = _padded(problem, tile)
    one = called(problem, tile)
    copies = 2 * problem.elements[made] * _grown(problem, channels, filters)[made]
    if problem.phase == "backward_filter" and pieces > 1:
        copies += 2 * problem.elements["w"] * pieces
    return CpuWork(one.flops, one.calls + 3 * pieces, one.copied_bytes + copies * problem.element_bytes)


def called(p: Problem, tile: Mapping[str, int]) -> CpuWork:
    """The work of one call of ATen with operands of some arrangement."""
    lanes, own, n = SIMD_BYTES // p.element_bytes, int(p.channels_last), p.elements
    last = tile.get("last", own)
    channels, filters, _ = _padded(p, tile)
    products = p.flops / (p.channels * p.filters) * channels * filters
    # Vectors run over channels of what is made, and what is left of the last one is idle; contiguous tensors go
    # through blocks of both kinds of channels.
    cut_filters = ceil_div(filters, tile.get("cut", 1)) if p.phase != "backward_data" else filters
    idle_c, idle_f = (ceil_div(count, lanes) * lanes / count for count in (channels, cut_filters))
    idle = idle_c * idle_f if not last else idle_c if p.phase == "backward_data" else idle_f
    grown = _grown(p, channels, filters)
    copies = sum(2 * n[o] * grown[o] for o in READS[p.phase] if last != own or grown[o] > 1)
    if not last:  # oneDNN brings contiguous tensors into blocks of channels and back
        copies += sum(n[o] * grown[o] for o in ("x", "y"))
    return CpuWork(products * min(idle, 6.0), 1, copies * p.element_bytes)


def _padded(p: Problem, tile: Mapping[str, int]) -> tuple[int, int, int]:
    """Channels and filters with those that pad them, and pieces of the work."""
    c, f = tile.get("C", 1), tile.get("F", 1)
    pieces = ceil_div(p.batch, tile.get("samples") or p.batch) * tile.get("cut", 1)
    return ceil_div(p.channels, c) * c, ceil_div(p.filters, f) * f, pieces


def _grown(p: Problem, channels: int, filters: int) -> dict[str, float]:
    """How much longer padding makes each operand."""
    return {"x": channels / p.channels, "y": filters / p.filters, "w": channels * filters / (p.channels * p.filters)}
