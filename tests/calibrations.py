"""A machine that was calibrated nowhere: what its messages, its shapes and its collectives took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convgen.calibrate.collectives import Collective, misfits_of
from convgen.calibrate.fit import Fit, fit_line
from convgen.calibrate.links import SIZES, Messages, patterns
from convgen.calibrate.local import Local
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.race import Case, Timing, race
from convgen.calibrate.result import Calibration, assumed, machine_of, rounded
from convgen.calibrate.shapes import SHAPES as SHAPE_LIST
from convgen.calibrate.shapes import Reached
from convgen.calibrate.team import Team

LOCAL = Local(
    device="some CPU, 2 threads",
    threads=2,
    memory_bytes=8e9,
    bytes_per_s=2e10,
    flops_per_s={"float32": 1e11, "float64": 5e10},
    convolution_flops_per_s=7e10,
)
SHAPES = [Reached(SHAPE_LIST[0], (5e10, 4e10, 3e10)), Reached(SHAPE_LIST[9], (5e9, 4e9, 3e9))]
LAUNCH_S = 1e-5
COLLECTIVES = [
    Collective("all_gather", 2, 1 << 12, 2e-4, 1e-4),
    Collective("all_gather", 2, 1 << 20, 8e-4, 1e-4),
    Collective("all_gather", 4, 1 << 12, 3e-4, 1e-4),
    Collective("all_reduce", 2, 1 << 12, 1e-4, 2e-4),
    Collective("all_reduce", 2, 1 << 12, 4e-4, 2e-4),
]
LINES = {"inside": (2e-5, 3e9), "across": (5e-5, 1e9), "shared": (6e-5, 7e8), "pair 1": (1e-5, 4e9)}


def messages_of(nodes: Nodes) -> dict[str, Messages]:
    """Messages that take exactly what LINES says."""
    found: dict[str, Messages] = {}
    for key, pattern in patterns(nodes).items():
        latency, rate = LINES.get(key, (1e-4, 5e8))
        times = tuple(Timing(key, size, latency + size / rate, 9, 0.1) for size in SIZES)
        found[key] = Messages(pattern, times, fit_line(SIZES, [t.seconds for t in times], key))
    return found


def calibration(nodes: Nodes, name: str = "mine") -> Calibration:
    messages = messages_of(nodes)
    processor = fit_line(SIZES, [4e-5 + size / 3e9 for size in SIZES], "the processor's time") if name else None
    machine = machine_of(name or "free", nodes, messages, LOCAL, SHAPES, LAUNCH_S, processor)
    machine = replace(machine, misfits=misfits_of(COLLECTIVES, rounded))
    return Calibration(
        date="2030-01-02",
        backend="gloo",
        torch="2.13.0",
        nodes=nodes,
        messages=messages,
        local=LOCAL,
        machine=machine,
        assumed=assumed(LOCAL),
        shapes=tuple(SHAPES),
        collectives=tuple(COLLECTIVES),
    )


def on_a_line(team: Team, cases: Sequence[Case], seconds: float) -> list[Timing]:
    """A race whose times are then put on a line: on a busy machine they may be on none, and are rightly refused."""
    return [replace(t, seconds=1e-5 + t.size / 1e9) for t in race(team, cases, seconds)]


def fit_on_a_line(sizes: Sequence[int], seconds: Sequence[float], what: str) -> Fit:
    """The same of the processor's times."""
    assert min(seconds) > 0
    return fit_line(sizes, [1e-5 + size / 1e9 for size in sizes], what)
