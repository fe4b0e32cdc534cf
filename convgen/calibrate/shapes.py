# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (parts of torch have no types)
"""Convolutions of a few dozen shapes, all ranks at once: what share of the peak each phase reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convgen.calibrate.race import Case, race, tried
from convgen.calibrate.team import Team
from convgen.cost.machine_measured import PHASES
from convgen.tune.baseline import accuracy

COLD_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}  # bytes of operands that are taken in turn: more than caches have
MOST_SETS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution padded by half its kernel: `channels` and `filters` of one group, `rows` and columns of x."""

    channels: int
    filters: int
    kernel: int
    rows: int
    samples: int = 2
    stride: int = 1
    groups: int = 1

    @property
    def pixels(self) -> int:
        """Pixels of y, of all samples."""
        out = (self.rows + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1
        return self.samples * out * out

    @property
    def flops(self) -> int:
        return 2 * self.pixels * self.groups * self.channels * self.filters * self.kernel**2


# From the first layers of networks to the last, and what splitting leaves of them; most telling first.
SHAPES = (
    Shape(64, 64, 3, 28), Shape(64, 256, 1, 28), Shape(256, 256, 3, 14), Shape(3, 64, 7, 112, stride=2),
    Shape(16, 16, 3, 56), Shape(32, 32, 3, 362, samples=1), Shape(256, 64, 1, 28), Shape(512, 512, 3, 7),
    Shape(8, 8, 3, 28), Shape(32, 32, 1, 14),
    Shape(1, 1, 3, 28, groups=64), Shape(128, 128, 3, 14), Shape(64, 64, 3, 7), Shape(256, 1024, 1, 14),
    Shape(16, 128, 3, 28), Shape(128, 16, 3, 28), Shape(3, 64, 3, 56), Shape(64, 16, 1, 56), Shape(16, 64, 1, 56),
    Shape(32, 32, 5, 28), Shape(96, 256, 5, 27), Shape(512, 128, 1, 14), Shape(128, 128, 3, 56, samples=1),
    Shape(3, 96, 11, 115, stride=4), Shape(512, 512, 1, 7), Shape(32, 32, 3, 112, samples=1), Shape(4, 4, 1, 28),
    Shape(64, 64, 3, 14, stride=2), Shape(24, 40, 3, 20),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reached:
    """flop/s of a shape's phases, in the order of PHASES, on the slowest rank."""

    shape: Shape
    flops_per_s: tuple[float, float, float]


def measure_shapes(team: Team, seconds: float, shapes: Sequence[Shape] = SHAPES) -> list[Reached]:
    """Rates in float32 of as many shapes as there is time to try; all that were tried are timed in turn."""
    start, ready = time.perf_counter(), list[list[Case]]()
    with torch.no_grad(), accuracy("float32"):
        for shape in shapes:
            late = time.perf_counter() - start > 0.5 * seconds
            if team.agree(late and len(ready) > 0):
                break
            once = team.device.type == "cpu"  # a GPU's launches are shorter than it takes to begin and end a repeat
            cases = [Case(f"{i}", shape.flops, run, once=once) for i, run in enumerate(_runs(team, shape))]
            ready.append([tried(team, case) for case in cases])
        timings = race(team, [c for cases in ready for c in cases], 0.5 * seconds)
    found: list[Reached] = []
    for i, shape in enumerate(shapes[: len(ready)]):
        rates = [shape.flops / t.seconds for t in timings[3 * i : 3 * i + 3]]
        found.append(Reached(shape, (rates[0], rates[1], rates[2])))
    return found


def _runs(team: Team, s: Shape) -> list[Callable[[], object]]:
    """Calls of the phases by ATen, as an untuned module makes them, with other operands each time."""
    pad, none = [s.kernel // 2] * 2, [0, 0]
    settings = ([s.stride] * 2, pad, [1, 1], False, none, s.groups)
    channels, filters = s.channels * s.groups, s.filters * s.groups
    image, taps = (s.samples, channels, s.rows, s.rows), (filters, s.channels, s.kernel, s.kernel)
    elements = s.samples * channels * s.rows**2 + s.pixels * filters
    count = max(1, min(MOST_SETS, COLD_BYTES[team.device.type] // (4 * elements)))
    xs, ws = ([torch.randn(n, device=team.device) for _ in range(count)] for n in (image, taps))
    dys = [torch.ops.aten.convolution(x, w, None, *settings) for x, w in zip(xs, ws, strict=True)]
    turn = [0]

    def run(phase: str) -> object:
        turn[0] = (turn[0] + 1) % count
        x, w, dy = xs[turn[0]], ws[turn[0]], dys[turn[0]]
        if phase == "forward":
            return torch.ops.aten.convolution(x, w, None, *settings)
        wanted = [phase == "backward_data", phase == "backward_filter", False]
        return torch.ops.aten.convolution_backward(dy, x, w, None, *settings, wanted)

    return [lambda phase=phase: run(phase) for phase in PHASES]
