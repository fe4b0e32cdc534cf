"""Steps of training to run in turn: of a package, of its plain program, without messages, the module's, DDP's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convgen.bench.marks import Clock, Recorder
from convgen.calibrate.team import TIMEOUT_S
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork
from convgen.packages import files_of, load_package, runtime_of
from convgen.program.network import Program
from convgen.program.other_sizes import program_like
from convgen.spec.graph import FLOATS, Graph, Value
from convgen.verify.graph_reference import run_graph
from convgen.verify.network_program import by_name

DDP = "torch's DDP"
MODULE = "the module alone"


@dataclass
class Way:
    """A step that can be run.

    Attributes:
        forward: gives the outputs, which backward takes.
        recorder: records a package's marks; None where there is no package.
        is_here: whether this rank is one of its ranks.
    """

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    recorder: Recorder | None = None
    is_here: bool = True


def drawn(value: Value, device: torch.device, generator: torch.Generator) -> Tensor:
    """A whole input: normal numbers for floats, else zeros, which number a row of any table."""
    shape = tuple(n for n in value.shape if isinstance(n, int))
    dtype: torch.dtype = getattr(torch, value.dtype)
    if value.dtype not in FLOATS:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def back(outputs: Mapping[str, Tensor], ones: dict[str, Tensor]) -> None:
    """Run backward from the sum of all outputs that require gradients.

    Args:
        ones: the outputs' gradients by name, kept from step to step.
    """
    several = {n: y for n, y in outputs.items() if y.requires_grad}
    for n, y in several.items():
        if n not in ones:
            ones[n] = torch.ones_like(y)
    if several:
        torch.autograd.backward([*several.values()], [ones[n] for n in several])


def package_way(
    name: str,
    compiled: CompiledNetwork,
    program: Program,
    tensors: Mapping[str, Tensor],
    folder: Path,
    device: torch.device,
    rank: int,
    *,
    of_inputs: bool = False,
    transport: Callable[[Any], Any] | None = None,
) -> Way:
    """A package's step.

    Args:
        program: the network's, or another of the same layout.
        folder: where the package is written, or has been.
        of_inputs: whether inputs want gradients, too.
        transport: makes one for the package; by default it is torch.distributed's.
    """
    ranks = program.grid.ranks
    if rank >= ranks:
        return Way(name, lambda: None, lambda _: None, is_here=False)
    if not folder.exists():
        other = program_like(program, compiled.any_sizes.many)
        files = files_of(replace(compiled, program=program, other=other), tensors)
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
    package = load_package(folder)
    end = runtime_of(package).TorchTransport(timedelta(seconds=TIMEOUT_S), device.type)
    mesh = package.init_mesh(
        device.type, ranks=range(ranks), transport=end if transport is None else transport(package)
    )
    model = package.Network(mesh)
    graph = compiled.graph.at()
    model.train("train" in graph.modes)
    generator = torch.Generator().manual_seed(0)
    inputs = [package.scatter(v.name, drawn(v, device, generator), mesh).detach() for v in graph.inputs]
    for x in inputs:
        x.requires_grad_(of_inputs and x.is_floating_point())
    ones: dict[str, Tensor] = {}
    cast = _cast(program.autocast, device)

    def forward() -> dict[str, Tensor]:
        model.zero_grad()
        for x in inputs:
            x.grad = None
        with cast():
            return by_name(graph, model(*inputs))

    return Way(name, forward, lambda outputs: back(outputs, ones), Recorder(package, Clock(device)))


def _cast(autocast: str, device: torch.device) -> Callable[[], Any]:
    if not autocast:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, getattr(torch, autocast))


class GraphModule(nn.Module):
    """A network's calls, which torch runs one after the other."""

    def __init__(self, graph: Graph, state: Mapping[str, Tensor], autocast: str) -> None:
        super().__init__()
        self.graph, self.autocast, self.names = graph, autocast, [*state]
        frozen = {v.name for v in graph.parameters if v.frozen}
        learnt = {v.name for v in graph.parameters}
        for i, (name, value) in enumerate(state.items()):
            if name in learnt:
                wants = name not in frozen and value.is_floating_point()
                self.register_parameter(f"v{i}", nn.Parameter(value, requires_grad=wants))
            else:
                self.register_buffer(f"v{i}", value)

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        state = {name: getattr(self, f"v{i}") for i, name in enumerate(self.names)}
        given = state | {v.name: x for v, x in zip(self.graph.inputs, inputs, strict=True)}
        trains = "train" in self.graph.modes
        return run_graph(self.graph, given, training=trains, autocast=self.autocast).outputs


def module_way(
    compiled: CompiledNetwork, tensors: Mapping[str, Tensor], device: torch.device, size: int, *, ddp: bool
) -> Way:
    """A step of the graph's own calls: with the whole batch on every rank alone, or with a rank's share of it by DDP.

    Args:
        ddp: by DDP over all ranks; a batch norm's statistics are then of a rank's own samples.
    Raises:
        InputError: samples can't be shared.
    """
    graph = compiled.graph
    if ddp:
        if graph.batch % size or (not graph.is_dynamic and size > 1):
            fact = f"--against ddp: {graph.name} of {graph.batch} samples has no equal shares for {size} ranks"
            raise InputError(fact, hint="a number of samples that the ranks divide, of a graph of any number")
        graph = replace(graph, batch=graph.batch // size)
    graph = graph.at()
    state = _state(graph, tensors, device)
    module: nn.Module = GraphModule(graph, state, compiled.program.autocast)
    name = DDP if ddp else MODULE
    if ddp and size > 1:
        module = nn.parallel.DistributedDataParallel(module)
    generator = torch.Generator().manual_seed(0)
    inputs = [drawn(v, device, generator) for v in graph.inputs]
    ones: dict[str, Tensor] = {}

    def forward() -> dict[str, Tensor]:
        module.zero_grad()
        return module(*inputs)

    return Way(name, forward, lambda outputs: back(outputs, ones))


def _state(graph: Graph, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    from convgen.verify.network_program import given_of

    given = given_of(replace(graph, modes=("eval",)), tensors)  # draws inputs of one step, not of three
    return {name: value.to(device) for name, value in given.state.items()}
