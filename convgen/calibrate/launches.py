# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (packages, and parts of torch, have no types)
"""Seconds that a network's package takes around a local operation: Python, autograd, ATen, and waiting for other ranks.

A network of convolutions, batch norms and ReLUs on tiny images is split by samples over all ranks. Its measured step
less the modelled step without launches, over its launches, is the result. It runs in turn with collectives.py's layers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from convgen.algebra.grid import Grid
from convgen.calibrate.team import Call, Team
from convgen.cost.machine import Machine
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.packages import files_of, load_package
from convgen.program.network import Program
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.spec.target import Target, read_target

BLOCKS = 8
IMAGE = (4, 4, 4)
WARM = 3  # the first step also sets up what later ones keep


@dataclass(frozen=True)
class Stepped:
    """A network's step.

    Attributes:
        seconds: on the slowest rank.
    """

    program: Program
    seconds: float


@dataclass
class NetworkStep:
    """A step to run in turn with others.

    Attributes:
        laps: seconds of each lap on this rank.
    """

    team: Team
    program: Program
    step: Call
    laps: list[float] = field(default_factory=list[float])

    def run(self) -> None:
        self.team.barrier()
        start = time.perf_counter()
        self.step()
        self.team.sync()
        self.laps.append(time.perf_counter() - start)

    def stepped(self) -> Stepped:
        """The step with the seconds that count (`Team.typical`) of laps, each on its slowest rank."""
        slowest: list[float] = self.team.most(torch.tensor(self.laps, dtype=torch.float64)).tolist()
        return Stepped(self.program, self.team.typical(slowest))


@contextmanager
def network_step(team: Team, target: str) -> Generator[NetworkStep]:
    """The network's step, ready to run.

    Args:
        target: what the package is compiled for.
    """
    compiled = _compiled(team, read_target(target))
    with tempfile.TemporaryDirectory(prefix="convgen-calibrate-") as folder:
        one = NetworkStep(team, compiled.program, team.communicate(_step(team, compiled, Path(folder) / "package")))
        for _ in range(WARM):
            one.step()
        yield one


def launch_of(machine: Machine, stepped: Stepped) -> float:
    """Seconds around a launch of a package.

    Args:
        machine: the machine with everything but these seconds.
    """
    free, dear = (_on(stepped.program, replace(machine, network_launch_s=seconds)) for seconds in (0.0, 1.0))
    return max(stepped.seconds - free, 0.0) / (dear - free)


def _on(program: Program, machine: Machine) -> float:
    return simulate(program, machine, "float32", of_inputs=True).end_s


def _compiled(team: Team, target: Target) -> CompiledNetwork:
    nodes = [
        node
        for i in range(BLOCKS)
        for node in (
            {"name": f"conv{i}", "kind": "conv", "out_channels": IMAGE[0], "kernel_size": 1},
            {"name": f"norm{i}", "kind": "batch_norm"},
            {"name": f"relu{i}", "kind": "relu"},
        )
    ]
    described = {"name": "calibrate_launches", "input": [team.size, *IMAGE], "nodes": nodes}
    return compile_network(network_graph(network_from_dict(described)), Grid((("N", team.size),)), target=target)


def _step(team: Team, compiled: CompiledNetwork, folder: Path) -> Callable[[], None]:
    """This rank's step, forward and backward."""
    folder.mkdir()
    for name, content in files_of(compiled, {}).items():
        (folder / name).write_bytes(content)
    package = load_package(folder)
    mesh = package.init_mesh(team.device.type)
    model = package.Network(mesh)
    x = torch.zeros((1, *IMAGE), device=team.device).requires_grad_()

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()

    return step
