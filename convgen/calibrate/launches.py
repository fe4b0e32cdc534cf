# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (packages, and parts of torch, have no types)
"""What a network's package takes around a local operation: Python, autograd and ATen.

A network of convolutions, batch norms and ReLUs on next to nothing, on each rank alone, all ranks at once: a step's
seconds over its launches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from convgen.algebra.grid import Grid
from convgen.calibrate.team import Team
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.packages import files_of, load_package
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.spec.target import Target, read_target

BLOCKS = 8
IMAGE = (2, 4, 4, 4)
LAPS, WARM = 30, 3


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds around a local operation: of a layer's module, and of a network's package."""

    module_s: float
    network_s: float


def measure_launch(team: Team, target: str) -> float:
    """Seconds around a launch, on the slowest rank.

    Args:
        target: of the packages.
    """
    compiled = _compiled(read_target(target))
    with tempfile.TemporaryDirectory(prefix="convgen-calibrate-") as folder:
        step = _step(team, compiled, Path(folder) / "package")
        for _ in range(WARM):
            step()
        taken: list[float] = []
        for _ in range(LAPS):
            team.barrier()
            start = time.perf_counter()
            step()
            team.sync()
            taken.append(time.perf_counter() - start)
    slowest: float = team.most(torch.tensor([team.typical(taken)], dtype=torch.float64)).item()
    return slowest / launches(compiled)


def launches(compiled: CompiledNetwork) -> int:
    """Of a step, the inputs' gradients among it, as timelines count them."""
    free, dear = (replace(load_machine("cpu"), network_launch_s=seconds) for seconds in (0.0, 1.0))
    return round(_on(compiled, dear) - _on(compiled, free))


def _on(compiled: CompiledNetwork, machine: Machine) -> float:
    return simulate(compiled.program, machine, "float32", of_inputs=True).end_s


def _compiled(target: Target) -> CompiledNetwork:
    nodes = [
        node
        for i in range(BLOCKS)
        for node in (
            {"name": f"conv{i}", "kind": "conv", "out_channels": IMAGE[1], "kernel_size": 1},
            {"name": f"norm{i}", "kind": "batch_norm"},
            {"name": f"relu{i}", "kind": "relu"},
        )
    ]
    described = {"name": "calibrate_launches", "input": list(IMAGE), "nodes": nodes}
    return compile_network(network_graph(network_from_dict(described)), Grid((("N", 1),)), target=target)


def _step(team: Team, compiled: CompiledNetwork, folder: Path) -> Callable[[], None]:
    """A step of the network on this rank alone, forward and backward."""
    folder.mkdir()
    for name, content in files_of(compiled, {}).items():
        (folder / name).write_bytes(content)
    package = load_package(folder)
    mesh = package.init_mesh(team.device.type, ranks=[team.rank])
    model = package.Network(mesh)
    x = torch.zeros(IMAGE, device=team.device).requires_grad_()

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()

    return step
