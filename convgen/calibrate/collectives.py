# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (parts of torch, and modules, have no types)
"""Collectives as modules run them, packing and adding included, beside what the model gives for the measured links.

Layers of a few algorithms and sizes are compiled for groups of ranks, and their steps run forward and backward; the
module notes when conversions are entered and left. The rest of a step's seconds is what a module and autograd take
around local work, which is next to nothing: the smallest layers' rest gives the cost of launching a local operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from types import ModuleType
from typing import Any

import torch

from convgen.algebra.redistribute import Kind
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.team import Call, Team
from convgen.compiler import Compiled, compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Misfit
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.kernels.load import load_text
from convgen.program.nodes import Convert
from convgen.spec.build import layer_from_dict

KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
FUNCTIONS = ("all_gather", "reduce_scatter", "all_reduce", "rearrange")  # of a module; each takes its step's name first
# Bytes to each other rank, on both sides of 64 and of 128 KiB: blocks of at most 64 KiB go from rank to rank of a
# machine another way (templates/runtime/transport.py), and a gather's block is half as large.
EDGES = (7 << 13, 9 << 13, 7 << 14, 9 << 14)
SIZES = (1 << 12, 1 << 15, *EDGES, 1 << 18, 1 << 21, 1 << 23)  # bytes that a rank sends, about: 4 KiB to 8 MiB
LEAST_LAPS, MOST_LAPS, WARM = 5, 40, 2
KINDS_OF_LAYERS = 4
SMALL = 8  # conversions count that send at least 1/SMALL of their layer's size
LOCAL_STEPS = 3  # local convolutions of a layer's step
Layers = dict[str, Any]
Span = tuple[float, float]  # when it was entered and left, by the node's clock, in seconds


@dataclass(frozen=True, slots=True)
class Collective:
    """One conversion among groups of so many ranks.

    Attributes:
        sent_bytes: bytes that each rank sends.
        modelled_s: seconds by the measured links.
    """

    kind: Kind
    ranks: int
    sent_bytes: int
    measured_s: float
    modelled_s: float

    @property
    def ratio(self) -> float:
        return self.modelled_s / self.measured_s


@dataclass
class Watched:
    """A layer that ran on this rank: for each lap when conversions, by their results, were entered and left, and the
    seconds of the rest of the step.

    Attributes:
        size: bytes, about, that a rank sends in the conversions that the layer is made for.
    """

    compiled: Compiled
    ranks: int
    size: int
    spans: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    rest: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Ran:
    """A layer that ran on all ranks: seconds of each conversion, from the last rank's entering to the last one's
    leaving, and of the rest of a step on the slowest rank."""

    compiled: Compiled
    ranks: int
    size: int
    conversions: dict[str, list[float]]
    rest: list[float]


def measure_collectives(team: Team, seconds: float, target: str, beside: Sequence[Call] = ()) -> list[Watched]:
    """Run layers of growing size, as many as there is time for, on groups of 2, 4, ... and of all ranks; the same on
    every rank. Steps run in turn, as a network's layers do: each finds caches and memory as others have left them.

    Args:
        target: what modules are compiled for.
        beside: further calls that take their turn.
    """
    groups = sorted({g for g in (2, 4, 8, 16, 32, 64, team.size) if team.size % g == 0 and g <= team.size})
    start, found, lap_s = time.perf_counter(), list[tuple[Watched, Call]](), 0.0
    for i, size in enumerate(SIZES):
        ahead = lap_s * size / SIZES[i - 1] if i else 0.0
        if i and team.agree(time.perf_counter() - start + WARM * ahead + LEAST_LAPS * (lap_s + ahead) > seconds):
            break
        for ranks in groups:
            sent = size * (ranks - 1) if size in EDGES else size
            for name, layer in _layers(ranks, sent).items():
                given = {"name": f"calibrate_{name}_{ranks}_{sent}", "target": target, **layer}
                ran = Watched(compile_layer(layer_from_dict(given)), ranks, sent)
                step = team.communicate(_step(team, ran))
                taken = [_seconds(step) for _ in range(WARM)]
                lap_s += taken[-1]
                found.append((ran, step))
    for ran, _ in found:
        ran.spans.clear()
        ran.rest.clear()
    turns = [*(step for _, step in found), *beside]
    for lap in range(MOST_LAPS):
        if team.agree(lap >= LEAST_LAPS and time.perf_counter() - start > seconds):
            break
        for k in range(len(turns)):
            turns[(k + lap) % len(turns)]()
    return [ran for ran, _ in found]


def _layers(ranks: int, size: int) -> dict[str, Layers]:
    """Layers whose conversions send about `size` bytes a rank; all but "rows" are 1x1, so that local work is small."""
    values = max(size // 4, ranks)
    rows = max(1, round((values / 64) ** 0.5))  # rows of 64 filters, for a reduce-scatter and an all-gather
    wide = max(ranks, round(values**0.5))  # channels and filters of dw, for an all-reduce
    image = {"layer": "conv2d", "kernel_size": 1}
    swapped = {"a": ranks}
    return {
        "channels": image | {"input": [1, ranks, rows, rows], "out_channels": 64 // ranks * ranks or ranks,
                             "grid": {"C": ranks}, "algorithm": "stationary-x"},
        "samples": image | {"input": [ranks, wide, 2, 2], "out_channels": wide, "grid": {"N": ranks},
                            "algorithm": "sample"},
        "rows": {"layer": "conv2d", "kernel_size": 3, "padding": 1, "input": [1, 16, 4 * ranks, max(4, values // 16)],
                 "out_channels": 1, "grid": {"H": ranks}, "algorithm": "spatial"},
        "swapped": image | {"input": [ranks, 16 * ranks, rows, 4 * rows], "out_channels": ranks, "grid": swapped,
                            "distribution": {"x": ["*", "a", "*", "*"], "w": ["*", "*"], "y": ["a", "*", "*", "*"]},
                            "roles": {p: {"a": "N"} for p in ("forward", "backward_data", "backward_filter")}},
    }  # fmt: skip


def _step(team: Team, ran: Watched) -> Call:
    """A step of a layer, on all groups at once, which notes its seconds in `ran`."""
    module, conv = load_text(ran.compiled.module()), ran.compiled.layer.conv
    first = team.rank // ran.ranks * ran.ranks
    mesh = module.init_mesh(team.device.type, ranks=range(first, first + ran.ranks))
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": conv.shape("x"), "w": conv.shape("w"), "dy": conv.shape("y")}
    x, w, dy = (
        module.scatter(n, torch.randn(shape, generator=generator).to(team.device), mesh).requires_grad_(n != "dy")
        for n, shape in shapes.items()
    )
    spans: dict[str, Span] = {}
    _watch(module, spans, team)

    def step() -> None:
        spans.clear()
        team.barrier()
        start = time.perf_counter()
        torch.autograd.grad(module.conv(x, w, mesh=mesh), (x, w), dy)
        team.sync()
        whole = time.perf_counter() - start
        for name, span in spans.items():
            ran.spans.setdefault(name, []).append(span)
        ran.rest.append(whole - sum(left - entered for entered, left in spans.values()))

    return step


def _seconds(step: Call) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _watch(module: ModuleType, spans: dict[str, Span], team: Team) -> None:
    """Have a module's conversions note in `spans` when they are entered and left."""

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(name: str, *rest: Any) -> Any:
            team.sync()
            start = time.perf_counter()
            result = run(name, *rest)
            team.sync()
            spans[name] = (start, time.perf_counter())
            return result

        return timed

    for name in FUNCTIONS:
        if name in vars(module):
            vars(module)[name] = watched(vars(module)[name])


def gathered(team: Team, nodes: Nodes, found: Sequence[Watched]) -> list[Ran]:
    """The layers with seconds of all ranks, the same on every rank."""
    everyone = team.gather([(ran.spans, ran.rest) for ran in found])
    made: list[Ran] = []
    for i, ran in enumerate(found):
        conversions: dict[str, list[float]] = {}
        for name in ran.spans:
            laps = zip(*(one[i][0][name] for one in everyone), strict=True)
            conversions[name] = [together(lap, ran.ranks, nodes.ranks) for lap in laps]
        rest = [max(lap) for lap in zip(*(one[i][1] for one in everyone), strict=True)]
        made.append(Ran(ran.compiled, ran.ranks, ran.size, conversions, rest))
    return made


def together(spans: Sequence[Span], group: int, node: int) -> float:
    """Seconds of a collective that all groups run at once: from the last rank's entering, as early ranks wait, to the
    last one's leaving, as ranks may share a link. Only ranks of a node share a clock; over nodes, or groups, the mean
    counts.

    Args:
        spans: by rank, when it entered and left.
        group: how many ranks a group has.
        node: how many ranks a node has.

    Example:
        >>> together([(0.0, 3.0), (1.0, 5.0)], group=2, node=2), together([(0.0, 3.0), (1.0, 5.0)], group=2, node=1)
        (4.0, 3.5)
    """
    sharing: dict[tuple[int, int], list[Span]] = {}
    for rank, span in enumerate(spans):
        sharing.setdefault((rank // group, rank // node), []).append(span)
    return fmean(max(left for _, left in one) - max(entered for entered, _ in one) for one in sharing.values())


def launch_s(team: Team, found: Sequence[Ran]) -> float:
    """Seconds around a local convolution: what a step of the smallest layers takes beside its conversions, over 3."""
    return median(team.typical(ran.rest) for ran in found[:KINDS_OF_LAYERS]) / LOCAL_STEPS


def beside_model(team: Team, machine: Machine, found: Sequence[Ran]) -> list[Collective]:
    """What conversions took, and what the machine's links give for them, without those that are small beside their
    layer: there ranks wait for others' local work."""
    made: list[Collective] = []
    for ran in found:
        one = ran.compiled
        steps = {s.result: s for s in schedule_cost(one.schedule, Model(one.space, machine, one.layer.dtype)).steps}
        for step in _conversions(one):
            cost = steps[step.result].cost
            if step.result in ran.conversions and SMALL * cost.sent_bytes >= ran.size:
                taken = team.typical(ran.conversions[step.result])
                made.append(Collective(step.kind, ran.ranks, cost.sent_bytes, taken, cost.seconds))
    return sorted(made, key=lambda c: (KINDS.index(c.kind), c.ranks, c.sent_bytes))


def _conversions(one: Compiled) -> Iterator[Convert]:
    return (step for _, step in one.schedule.steps() if isinstance(step, Convert) and step.kind != "slice")


def misfits_of(found: Sequence[Collective], rounded: Callable[[float], float]) -> tuple[Misfit, ...]:
    """Measured over modelled seconds for a machine file; of conversions that send equal bytes, the geometric mean."""
    made: list[Misfit] = []
    for kind in KINDS:
        for ranks in sorted({c.ranks for c in found if c.kind == kind}):
            by_bytes: dict[int, list[float]] = {}
            for c in found:
                if (c.kind, c.ranks) == (kind, ranks):
                    by_bytes.setdefault(c.sent_bytes, []).append(c.measured_s / c.modelled_s)
            over = _geometric_means(by_bytes)
            made.append(
                Misfit(
                    kind=kind,
                    ranks=ranks,
                    bytes=tuple(float(n) for n in over),
                    over_model=tuple(rounded(f) for f in over.values()),
                )
            )
    return tuple(made)


def _geometric_means(by_bytes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for size, ratios in sorted(by_bytes.items()):
        product = 1.0
        for ratio in ratios:
            product *= ratio
        found[size] = product ** (1 / len(ratios))
    return found
