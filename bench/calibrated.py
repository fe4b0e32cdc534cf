"""How near calibrated models come: layers by algorithms and small networks on two processes, modelled over measured.

    python bench/calibrated.py calibrate FOLDER [--seconds 90]     # of a machine that does nothing else
    python bench/calibrated.py measure FOLDER [--rounds 15]        # each call adds rounds
    python bench/calibrated.py report FOLDER [--quantile 0.5] [--steps CASE]

`measure` runs nine layers by five algorithms, forward and backward, and three small networks, a step each, on two
processes of one thread with gloo between them; all in turn, round by round, each round beginning with another. A cell
of the report is the modelled seconds, as the model is now, over the median of the measured ones, or another quantile:
what else runs delays a step, and never makes it faster. `--steps` says what a case is modelled to consist of.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from rows import add, rows_of

from convgen.algebra.grid import Grid
from convgen.compiler import Compiled, compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.cost.timeline import simulate
from convgen.kernels.load import load_text
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package, write_package
from convgen.spec.build import layer_from_dict
from convgen.spec.exported import graph_of
from convgen.verify.processes import spawn

# name: N, C, rows, F, K, S
LAYERS = {
    "first": (4, 3, 112, 32, 7, 2), "early_3x3": (4, 32, 56, 32, 3, 1), "early_1x1": (4, 64, 56, 128, 1, 1),
    "middle_3x3": (4, 64, 28, 64, 3, 1), "middle_1x1": (4, 256, 28, 64, 1, 1), "down_3x3": (4, 64, 28, 128, 3, 2),
    "late_3x3": (4, 128, 14, 128, 3, 1), "late_1x1": (4, 512, 14, 128, 1, 1), "last_3x3": (4, 256, 7, 256, 3, 1),
}  # fmt: skip
ALGORITHMS = {"sample": "N", "spatial": "H", "stationary-x": "C", "stationary-y": "F", "integrated": "F"}
NEAR = 0.7, 1.4
RANKS, WARM = 2, 2
FILE, LAPS = "machine.yaml", "laps.jsonl"


def networks() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    """Small ones, as users write them."""
    nn = torch.nn
    torch.manual_seed(0)

    def block(c: int, f: int, stride: int = 1) -> list[torch.nn.Module]:
        return [nn.Conv2d(c, f, 3, stride, 1, bias=False), nn.BatchNorm2d(f), nn.ReLU()]

    head = lambda c: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)]  # noqa: E731
    return {
        "narrow": (nn.Sequential(*block(3, 16), *block(16, 32, 2), *block(32, 32), *head(32)), (4, 3, 48, 48)),
        "wide": (nn.Sequential(*block(3, 64, 2), *block(64, 128, 2), *block(128, 128), *head(128)), (4, 3, 64, 64)),
        "plain": (
            nn.Sequential(
                nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
                nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10),
            ),
            (8, 3, 32, 32),
        ),
    }  # fmt: skip


def layer(name: str, algorithm: str) -> dict[str, Any]:
    n, c, rows, f, k, s = LAYERS[name]
    return {
        "name": f"{name}_{algorithm.replace('-', '_')}", "layer": "conv2d", "input": [n, c, rows, rows],
        "out_channels": f, "kernel_size": k, "stride": s, "padding": k // 2, "grid": {ALGORITHMS[algorithm]: RANKS},
        "algorithm": algorithm,
    }  # fmt: skip


def layer_step(text: str) -> Callable[[], object]:
    """Forward and backward of a module's block."""
    module = load_text(text)
    mesh = module.init_mesh("cpu")
    shapes = {"x": module.LAYER.stored["x"], "w": module.LAYER.stored["w"], "dy": module.LAYER.stored["y"]}
    generator, given = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, layout in shapes.items():
        whole = torch.randn(module.LAYER.whole_shape(layout, module.SPEC["input"][0]), generator=generator)
        given[name] = module.scatter(name, whole, mesh).requires_grad_(name != "dy")
    x, w, dy = given.values()
    return lambda: torch.autograd.grad(module.conv(x, w, mesh=mesh), (x, w), dy)


def network_step(folder: Path, shape: tuple[int, ...]) -> Callable[[], object]:
    net = load_package(folder)
    mesh = net.init_mesh("cpu")
    ours, x = net.Network(mesh), net.scatter("input", torch.randn(shape), mesh)

    def step() -> None:
        ours.zero_grad(set_to_none=True)
        ours(x).square().mean().backward()

    return step


def table(found: dict[str, dict[str, float]]) -> None:
    """The table, and what counts."""
    ratio = {n: c["modelled_s"] / c["measured_s"] for n, c in found.items()}
    print(f"| {'layer':<12} | " + " | ".join(ALGORITHMS) + " | modelled best | measured best |")
    print("|---" * (3 + len(ALGORITHMS)) + "|")
    good = 0
    for name in LAYERS:
        cells = {a: found[f"{name} {a}"] for a in ALGORITHMS}
        best, truth = (min(cells, key=lambda a: cells[a][k]) for k in ("modelled_s", "measured_s"))
        good += cells[best]["measured_s"] <= 1.1 * cells[truth]["measured_s"]
        texts = [f"{ratio[f'{name} {a}']:.2f} ({cells[a]['measured_s'] * 1e3:.2f} ms)" for a in ALGORITHMS]
        print(f"| {name:<12} | " + " | ".join(texts) + f" | {best} | {truth} |")
    for name in networks():
        one = found[f"{name} network"]
        cells_text = f"{ratio[f'{name} network']:.2f} ({one['measured_s'] * 1e3:.1f} ms)"
        print(f"| network {name} | {cells_text} |" + " |" * (1 + len(ALGORITHMS)))
    near = sum(NEAR[0] <= r <= NEAR[1] for r in ratio.values())
    print(f"\n{near} of {len(ratio)} cells within {NEAR[0]} to {NEAR[1]}; geometric mean {mean(ratio):.2f}.")
    print(f"The modelled best is within 10 % of the measured best in {good} of {len(LAYERS)} layers.")


def mean(ratio: dict[str, float]) -> float:
    return statistics.geometric_mean(ratio.values())


def laps_of(cases: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each on two processes, a round each: of the slower one, all cases in turn."""

    def program(_: int) -> dict[str, list[float]]:
        torch.set_num_threads(1)
        steps = {n: layer_step(c) if isinstance(c, str) else network_step(*c) for n, c in cases.items()}
        laps: dict[str, list[float]] = {n: [] for n in steps}
        names = list(steps)
        for turn in range(rounds + WARM):
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                dist.barrier()
                start = time.perf_counter()
                steps[name]()
                if turn >= WARM:
                    laps[name].append(time.perf_counter() - start)
        return laps

    ranks = spawn(program, RANKS, timeout_s=3000)
    return {n: [max(both) for both in zip(*(r[n] for r in ranks), strict=True)] for n in cases}


def compiled() -> dict[str, Compiled | tuple[Any, ...]]:
    """Every case: a layer's, or a network's with its tensors and the shape of its input."""
    found: dict[str, Any] = {}
    for name in LAYERS:
        for algorithm in ALGORITHMS:
            found[f"{name} {algorithm}"] = compile_layer(layer_from_dict(layer(name, algorithm)))
    for name, (model, shape) in networks().items():
        graph, tensors = graph_of(model, (torch.zeros(shape),), name=name)
        found[f"{name} network"] = compile_network(graph, Grid((("N", RANKS),))), tensors, shape
    return found


def modelled_s(case: Compiled | tuple[Any, ...], machine: Machine) -> float:
    if isinstance(case, tuple):
        return simulate(case[0].program, machine, "float32").end_s
    return schedule_cost(case.schedule, Model(case.space, machine, "float32")).total().seconds


@click.group(help=(__doc__ or "").split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    torch.set_num_threads(1)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seconds", default=90.0)
def calibrate(folder: Path, seconds: float) -> None:
    """This machine, as it is now."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"]
    words = ["convgen.cli", "calibrate", "-o", str(folder / FILE), "--seconds", str(seconds), "--device", "cpu"]
    subprocess.run([*command, *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=15)
def measure(folder: Path, rounds: int) -> None:
    """Run every case so many times more."""
    cases: dict[str, Any] = {}
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        for case, made in compiled().items():
            if isinstance(made, tuple):
                network, tensors, shape = made
                package = Path(name, case.split()[0])
                write_package(package, files_of(network, tensors), "the folder")
                cases[case] = package, shape
            else:
                cases[case] = made.module()
        laps = laps_of(cases, rounds)
    for case, seconds in laps.items():
        add(folder / LAPS, {"case": case, "s": [round(s, 7) for s in seconds], "load": before})
    print(f"{rounds} rounds; load {before:.1f} before, {os.getloadavg()[0]:.1f} after")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--steps", metavar="CASE", help="A layer and an algorithm: what each step is modelled to take.")
@click.option("--quantile", default=0.5, help="Of the rounds: what else runs delays a step, and never makes it faster.")
def report(folder: Path, steps: str | None, quantile: float) -> None:
    """The table, and what counts."""
    machine, cases = load_machine(str(folder / FILE)), compiled()
    if steps is not None:
        one = cases[steps]
        assert not isinstance(one, tuple), "a layer's"
        for s in schedule_cost(one.schedule, Model(one.space, machine, "float32")).steps:
            print(f"{s.phase:<16} {s.result:<18} {s.kind:<14} {s.cost.sent_bytes:>9} B {s.cost.seconds * 1e3:8.3f} ms")
        return
    laps: dict[str, list[float]] = {}
    loads: list[float] = []
    for row in rows_of(folder / LAPS):
        laps.setdefault(row["case"], []).extend(row["s"])
        loads.append(row["load"])
    measured = {n: float(np.quantile(some, quantile)) for n, some in laps.items()}
    table({n: {"modelled_s": modelled_s(c, machine), "measured_s": measured[n]} for n, c in cases.items()})
    said = f"load {statistics.median(loads):.1f}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"Of {min(map(len, laps.values()))} rounds the quantile {quantile:g}; {said}.")


if __name__ == "__main__":
    main()
