"""A PyTorch module compiled into a temporary package and run on virtual ranks, against the module itself."""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from convgen.algebra.grid import Grid
from convgen.cost.network import volume as volume_of
from convgen.network_compiler import CompiledNetwork, compile_network, program_like
from convgen.passes.network_contract import NetworkPass
from convgen.spec.aten.samples import for_any_number
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.verify.virtual import World

Tensors = dict[str, torch.Tensor]
COUNT = itertools.count()


@dataclass(frozen=True)
class Imported:
    """A module's graph, with its constants, for one mode."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    graph: Graph
    constants: Tensors
    seconds: float


def imported(module: nn.Module, *inputs: torch.Tensor, train: bool = True) -> Imported:
    start = perf_counter()
    graph, constants = graph_of(module.train(train), inputs, name="net")
    return Imported(module, inputs, graph, constants, perf_counter() - start)


@dataclass(frozen=True)
class Errors:
    """Largest errors of all ranks, relative to the largest of the tensor (of gradients of parameters: to it, or to a
    thousandth of the largest of all). `volume`: what differs between bytes counted and said."""

    outputs: float
    inputs: float
    parameters: float
    buffers: float
    volume: str
    compiled: float
    sent: int
    worst: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def right(self) -> bool:
        small = max(self.inputs, self.parameters, self.buffers) <= 1e-8
        return self.outputs <= 1e-9 and small and not self.volume


def check(
    given: Imported,
    grid: Mapping[str, int],
    *,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    passes: Sequence[NetworkPass] = (),
) -> Errors:
    """Compiles for a grid and compares outputs, gradients, buffers and bytes with the module's (or `reference`'s).

    Args:
        passes: that the program goes through, instead of those that a timeline finds.
    """
    module, graph = given.module, given.graph
    start = perf_counter()
    compiled = compile_network(graph, Grid(tuple(grid.items())))
    if passes:
        compiled = with_passes(compiled, *passes)
    files = compiled.package().files
    seconds = perf_counter() - start
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    state = {n: t.detach().clone() for n, t in module.state_dict().items()} | given.constants
    xs = [x.clone().requires_grad_(x.is_floating_point()) for x in given.inputs]
    module.zero_grad()
    y: Any = (reference or module)(*xs)
    ys = [t for t in tree_flatten(y)[0] if t is not None]
    smooth = [k for k, t in enumerate(ys) if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dys = {k: torch.randn(ys[k].shape, generator=generator, dtype=ys[k].dtype) for k in smooth}
    torch.autograd.backward([ys[k] for k in smooth], [dys[k] for k in smooth])
    wished = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    new = {n: b.clone() for n, b in module.named_buffers()}
    with torch.no_grad():
        for n, b in module.named_buffers():
            b.copy_(buffers[n])

    with package(files) as net:
        names = [v.name for v in graph.inputs]

        def program(end: Any) -> tuple[Any, ...]:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh, seed=seed)
            model.load_full({n: state[n] for n in state if n in model._known or n in model._aliases})
            model.train(module.training)
            blocks = [net.scatter(n, x.detach(), mesh) for n, x in zip(names, xs, strict=True)]
            blocks = [b.requires_grad_(b.is_floating_point()) for b in blocks]
            out = model(*blocks)
            forward = len(end.sent)
            parts = [t for t in tree_flatten(out)[0] if t is not None]
            whole = [net.gather(name, t, mesh) for (name, _), t in zip(graph.outputs, parts, strict=True)]
            gathered = len(end.sent)
            torch.autograd.backward([whole[k] for k in smooth], [dys[k] for k in smooth])
            sent = [(s.collective, s.bytes) for s in end.sent]
            runtime = sys.modules[type(model).__mro__[1].__module__]
            here = model._net.here(mesh)
            dxs = [
                None if b.grad is None else runtime.gathered(b.grad, model._net.split(n, x.shape[0]), here)
                for n, b, x in zip(names, blocks, xs, strict=True)
            ]
            at_all = end.rank == 0 if hasattr(end, "rank") else True
            grads = model.full_gradients()
            full = model.full_state_dict()
            return [t.detach() for t in whole], dxs, grads if at_all else {}, full, sent[:forward], sent[gathered:]

        found = World(Grid(tuple(grid.items())).ranks).run(program)
    worst: dict[str, str] = {}

    def largest(pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], what: str, floor: float = 0.0) -> float:
        most = 0.0
        for name, a, b in pairs:
            assert a.shape == b.shape, (name, a.shape, b.shape)
            if not b.numel():
                continue
            scale = max(b.detach().double().abs().max().item(), floor, 1e-30)
            one = (a.double() - b.detach().double()).abs().max().item() / scale
            if not one <= most:
                most, worst[what] = one, name
        return most

    floor = 1e-3 * max((g.abs().max().item() for g in wished.values()), default=0.0)
    all_grads = [one[2] for one in found if one[2]]
    missing = [n for grads in all_grads for n in set(wished) - set(grads) if wished[n].any()]
    assert not missing, f"no gradient of {missing}"
    return Errors(
        largest((("output", a, b) for one in found for a, b in zip(one[0], ys, strict=True)), "outputs"),
        largest(
            (
                (n, torch.zeros_like(x) if g is None else g, torch.zeros_like(x) if x.grad is None else x.grad)
                for one in found
                for n, g, x in zip(names, one[1], xs, strict=True)
            ),
            "inputs",
            floor=1e-12,
        ),
        largest(
            ((n, grads[n], g) for grads in all_grads for n, g in wished.items() if n in grads), "parameters", floor
        ),
        largest(((n, one[3][n], b) for one in found for n, b in new.items() if n in one[3]), "buffers", floor=1e-6),
        volume(compiled, [one[4] for one in found], [one[5] for one in found]),
        seconds,
        sum(b for one in found for half in one[4:] for _, b in half),
        worst,
    )


def with_passes(compiled: CompiledNetwork, *passes: NetworkPass) -> CompiledNetwork:
    """The same with these passes alone."""
    program = compiled.plain
    for one in passes:
        program = one.run(program)
    return replace(compiled, program=program, other=program_like(program, for_any_number(compiled.graph)[2]))


def volume(compiled: CompiledNetwork, forward: Sequence[Any], backward: Sequence[Any]) -> str:
    """The first difference between bytes counted and said, in whatever order."""
    said_of = volume_of(compiled.program, of_inputs=True)
    for name, counted in (("forward", forward), ("backward", backward)):
        steps = said_of[name]
        for rank, got in enumerate(counted):
            said = Counter((s["collective"], s["bytes_sent_per_rank"][rank]) for s in steps)
            if (more := Counter(got)) != said:
                return f"{name} of rank {rank}: counted and not said {more - said}, said and not counted {said - more}"
    return ""


@contextmanager
def package(files: Mapping[str, str]) -> Iterator[Any]:
    """The package of these files, imported."""
    with tempfile.TemporaryDirectory() as directory:
        name = f"convgen_test_network_{next(COUNT)}"
        path = Path(directory) / name
        path.mkdir()
        for file, text in files.items():
            (path / file).write_text(text)
        sys.path.insert(0, directory)
        try:
            yield importlib.import_module(name)
        finally:
            sys.path.remove(directory)
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]


def draw_parameters(module: nn.Module, seed: int = 0) -> None:
    """Anew: heads of zeros and scales of 1e-6 hide errors. Matrices so that activations keep their size; vectors are
    those that were there (ones, zeros) and something beside."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1 and p.numel() > max(p.shape):
                fan = p[0].numel()
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (1.4 / fan**0.5))
            else:
                base = p.mean().round()
                p.copy_(base + 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for name, b in module.named_buffers():
            if b.is_floating_point() and name.endswith(("running_mean", "running_var")):
                b.copy_(b + 0.2 * torch.rand(b.shape, generator=generator, dtype=b.dtype))


def random_input(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
