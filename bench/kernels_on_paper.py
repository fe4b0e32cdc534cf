"""Kernels on paper: of networks partitioned 2, 4 and 8 ways, the least time of each rank's convolutions, the bound and
the model's time of the best family's default, by what the least time is made of.

    python bench/kernels_on_paper.py [--dtype bfloat16] [--networks resnet50,vgg16,wrn50_2] [--ways 2,4,8]
    python bench/kernels_on_paper.py --published

Nothing is timed, and nothing compiled: the bound is bound.py's by the closed forms of estimate.py, instructions,
products and shared memory of a step, without waiting and L2, which the model's time has. Regimes: the least time is
that of the products at the peak (compute), of the operands' bytes (memory), or of a launch (floor), by
tuning/machines/cuda.yaml. `bound` and `model` are shares of it, geometric means. `for 1.5x`: the share that a library
may reach at most so that the model's time is 1.5 times as fast. `--published`: the same times beside those that others
measured on an H200, forward, in fp16, of kernels of their own. No constant here is fitted to them. The model is right
where its time is 0.7 to 1.4 of what was measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import click

from convgen.kernels.bound import around_s
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.estimate import adding_s, data_sheet, estimated_s, step_cycles
from convgen.kernels.families import FAMILIES, of_gpu
from convgen.kernels.partition import SPLITS, local_problem
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.rates import RATES
from convgen.kernels.work import Work, whole_bytes, whole_products
from convgen.program.nodes import Phase
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target

NETWORKS = ("resnet50", "vgg16", "wrn50_2")
WAYS = (2, 4, 8)
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")
TARGET = read_target("cuda:sm_90").known()
REGIMES = ("compute", "memory", "floor")
NEAR = (0.7, 1.4)  # of a measured time: the model's is right


class Published(NamedTuple):
    """One sample or more of a layer, and what somebody measured of it on an H200, in microseconds.

    Attributes:
        rows: of y, by dimension.
    """

    what: str
    batch: int
    channels: int
    filters: int
    rows: tuple[int, ...]
    kernel: int
    stride: int
    dilation: int
    measured_us: float
    source: str

    @property
    def problem(self) -> Problem:
        """Forward, padded so that y has x's rows over the stride."""
        reach = self.dilation * (self.kernel - 1) // 2
        dims = tuple(
            LocalDim(name, n * self.stride, n, self.kernel, self.stride, self.dilation, reach)
            for name, n in zip("DHW"[-len(self.rows) :], self.rows, strict=True)
        )
        return Problem(
            phase="forward",
            batch=self.batch,
            channels=self.channels,
            filters=self.filters,
            dims=dims,
            dtype="float16",
            memory_format="channels_last",
        )


TILEOPS = "tile-ai/TileOPs issues 656, 1568, 1998, 1999, 2057"  # where each of these is
PUBLISHED = (
    Published("3x3, 112x112", 1, 256, 512, (112, 112), 3, 1, 1, 64.5, "TileLang"),
    Published("3x3, 56x56", 2, 64, 64, (56, 56), 3, 1, 1, 8.9, "TileLang"),
    Published("3x3, 56x56, stride 2", 1, 128, 256, (28, 28), 3, 2, 1, 12.3, "TileLang"),
    Published("5x5, 56x56, stride 2", 1, 128, 256, (28, 28), 5, 2, 1, 23.4, "TileLang"),
    Published("3x3x3, 8x16x16, dilation 6", 1, 256, 256, (8, 16, 16), 3, 1, 6, 25.3, "cuDNN, its GEMM alone"),
)


def problems(networks: Sequence[str], ways: Sequence[int], dtype: str) -> Iterator[tuple[str, int, Problem]]:
    """Network, ways, and what the rank with most to do convolves in a phase, for every layer and split."""
    for network in networks:
        layers = read_csv(data_file("tuning", "layers", f"{network}.csv"), grid={"N": 1}, algorithm="sample")
        for count, layer, split, phase in product(ways, layers, SPLITS, PHASES):
            p = local_problem(layer.conv, split, count, phase, dtype)
            if p is not None and p.flops:
                yield network, count, p


def best(p: Problem) -> tuple[Config, float]:
    """The family's default of the least estimated time, and its seconds."""
    device = data_sheet(TARGET, p.dtype)
    able = [made.default(p, TARGET) for made in FAMILIES if made.refusal(p, TARGET) is None]
    works = [(config, of_gpu(config).work(p, config)) for config in able]
    seconds = [(config, estimated_s(p, config, w, TARGET, device)) for config, w in works if w is not None]
    return min(seconds, key=lambda pair: pair[1])


def least_us(p: Problem) -> dict[str, float]:
    device = data_sheet(TARGET, p.dtype)
    return {
        "compute": 2 * whole_products(p) / device.flops_per_s * 1e6,
        "memory": whole_bytes(p) / device.bytes_per_s * 1e6,
        "floor": device.floor_s * 1e6,
    }


def bound_us(p: Problem, config: Config) -> float:
    """What the launches can't be faster than."""
    device, w = data_sheet(TARGET, p.dtype), work_of(p, config)
    cycles = step_cycles(p, config, w, TARGET) if w.matrix else {"L2": 0.0}
    step = max((n for what, n in cycles.items() if what != "L2"), default=0.0)
    loop = ceil_div(w.programs, TARGET.processors) * w.steps * step / RATES[TARGET.arch].clock_hz + adding_s(w, TARGET)
    around = around_s(p, w, device.bytes_per_s, device.floor_s)
    return (max(loop, whole_bytes(p) / device.bytes_per_s, device.floor_s) + around) * 1e6


def work_of(p: Problem, config: Config) -> Work:
    found = of_gpu(config).work(p, config)
    assert found is not None
    return found


@cache
def counted(p: Problem) -> tuple[str, float, float, float]:
    """Regime, and microseconds: the least, of the bound, of the model."""
    config, seconds = best(p)
    least = least_us(p)
    regime = max(least, key=lambda n: least[n])
    return regime, least[regime], bound_us(p, config), seconds * 1e6


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(networks: Sequence[str], ways: Sequence[int], dtype: str) -> Iterator[str]:
    yield "network   ways regime   kernels   least us   bound  model   for 1.5x"
    groups: dict[tuple[str, int, str], list[tuple[float, float, float]]] = defaultdict(list)
    for network, count, p in problems(networks, ways, dtype):
        regime, *times = counted(p)
        groups[network, count, regime].append((times[0], times[1], times[2]))
    order = sorted(groups.items(), key=lambda g: (networks.index(g[0][0]), g[0][1], REGIMES.index(g[0][2])))
    for (network, count, regime), found in order:
        least = mean([t for t, _, _ in found])
        of_bound, of_model = (mean([min(1.0, t[0] / t[i]) for t in found]) for i in (1, 2))
        yield (
            f"{network:9} {count:4} {regime:8} {len(found):7}  {least:9.1f}  {of_bound:6.2f} {of_model:6.2f}"
            f"  {of_model / 1.5:9.2f}"
        )


def beside() -> Iterator[str]:
    """Each published time, the bound and the model's."""
    yield f"{'layer':<27} {'N':>2} {'C':>4} {'F':>4}  measured us  bound us  model us  model/measured  family  whose"
    right = 0
    for one in PUBLISHED:
        config, seconds = best(one.problem)
        ratio = seconds * 1e6 / one.measured_us
        right += NEAR[0] <= ratio <= NEAR[1]
        yield (
            f"{one.what:<27} {one.batch:>2} {one.channels:>4} {one.filters:>4}  {one.measured_us:>11.1f}"
            f"  {bound_us(one.problem, config):>8.1f}  {seconds * 1e6:>8.1f}  {ratio:>14.2f}  {config.family:<6}"
            f"  {one.source}"
        )
    yield f"{right} of {len(PUBLISHED)} within {NEAR[0]} to {NEAR[1]}; measured: {TILEOPS}"


@click.command(help=__doc__)
@click.option("--networks", default=",".join(NETWORKS))
@click.option("--ways", default=",".join(map(str, WAYS)))
@click.option("--dtype", default="bfloat16")
@click.option("--published", is_flag=True)
def main(networks: str, ways: str, dtype: str, published: bool) -> None:
    lines = beside() if published else table(networks.split(","), [int(n) for n in ways.split(",")], dtype)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
