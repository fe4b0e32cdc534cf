"""Steps of training in mixed precision on virtual ranks beside the module, and how far rounding alone takes it.

The module runs again with all elements of its batches one unit in the last place larger, smaller, and either at random;
the largest distance of these runs from the first is that of a unit. Ranks round more often than one process does: each
addend of a sum is of the type that is computed in, where one process rounds the sum alone. So what ranks may be off is
LIMIT units. `python bench/mixed_steps.py` has the table, with how many units each is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from networks_on_ranks import package
from test_networks_gpu import SM_90
from test_networks_tf32 import interpreted
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.spec.target import CPU
from convgen.verify.virtual import World

LIMIT = 1.5
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Scaled(nn.Module):
    """A module between two numbers of float64, which decide no type."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.before, self.behind = (nn.Parameter(torch.tensor(s, dtype=torch.float64)) for s in (1.1, 0.9))

    def forward(self, x: Tensor) -> Any:
        return tree_map_floats(lambda y: y * self.behind, self.module(x * self.before))


class WithKernels(nn.Module):
    """Convolutions that a GPU has kernels for, a norm between them, small enough for Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        self.a, self.b, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, 2), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def tree_map_floats(of: Callable[[Tensor], Tensor], made: Any) -> Any:
    leaves, spec = tree_flatten(made)
    return spec.unflatten([of(y) if isinstance(y, Tensor) and y.is_floating_point() else y for y in leaves])


def with_norms_of_float32(module: nn.Module) -> nn.Module:
    module.bfloat16()
    for part in module.modules():
        if isinstance(part, NORMS):
            part.float()
    return module


@dataclass(frozen=True)
class Mix:
    """How types are mixed: the one of inputs' values, whether autocast is to it, and what is made of a module."""

    low: torch.dtype
    autocast: bool = False
    make: Callable[[nn.Module], nn.Module] = lambda module: module

    @property
    def held(self) -> torch.dtype:
        """The type of inputs."""
        return torch.float32 if self.autocast else self.low


MIXES: Mapping[str, Mix] = {
    "autocast to bfloat16": Mix(torch.bfloat16, autocast=True),
    "autocast to float16": Mix(torch.float16, autocast=True),
    "bfloat16, norms of float32": Mix(torch.bfloat16, make=with_norms_of_float32),
    "float32, numbers of float64": Mix(torch.float32, make=Scaled),
}


@dataclass(frozen=True)
class Run:
    """Losses; parameters and buffers at the end; types of outputs, of the last gradients, and of both."""

    losses: list[float]
    parameters: dict[str, Tensor]
    types: dict[str, torch.dtype]

    @cached_property
    def flat(self) -> Tensor:
        return torch.cat([t.flatten().double() for t in self.parameters.values()])


Whole = Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]  # state and gradients


def trained(model: nn.Module, call: Callable[[Tensor], Sequence[Tensor]], xs: Sequence[Tensor], whole: Whole) -> Run:
    """Steps of SGD with momentum on all outputs' squares, a batch each. `call` gives whole outputs of a whole batch."""
    known = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.SGD(known.values(), 1e-2, 0.9), list[float]()
    types = dict[str, torch.dtype]()
    for x in xs:
        optimizer.zero_grad()
        ys = call(x)
        loss = torch.stack([y.float().square().mean() for y in ys if y.requires_grad]).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        types |= {f"output {k}": y.dtype for k, y in enumerate(ys)}
    state, gradients = whole()
    types |= {f"gradient of {n}": g.dtype for n, g in gradients.items()} | {n: t.dtype for n, t in state.items()}
    return Run(losses, {n: state[n] for n in known}, types)


@dataclass(frozen=True)
class Far:
    """Of losses, relative to each, the root of the mean square; of parameters, to how far training moves them."""

    losses: float
    parameters: float

    def units(self, unit: Far) -> float:
        """The larger of both, in distances of a unit; nan is not within any."""
        found = self.losses / unit.losses, self.parameters / unit.parameters
        return math.inf if any(map(math.isnan, found)) else max(found)

    def __str__(self) -> str:
        return f"{self.losses:.1e} {self.parameters:.1e}"


class Steps:
    """A module's own steps of training, and how far a unit in the last place of inputs takes them.

    Args:
        module: that trains; shape: of a batch; mix: how types are mixed; count: of steps; draws: of runs whose inputs
            are off at random, beside the two that are off all alike.
        kernels: whether ranks run a GPU's package, compiled for the mix's autocast, in Triton's interpreter.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        mix: Mix,
        count: int = 20,
        draws: int = 8,
        *,
        kernels: bool = False,
    ) -> None:
        self.kernels, self.ran = kernels, list[str]()
        self.module, self.mix, self.draws = mix.make(deepcopy(module)).train(), mix, draws
        generator = torch.Generator().manual_seed(0)
        self.xs = [torch.randn(tuple(shape), generator=generator).to(mix.low) for _ in range(count)]
        self.graph, self.constants = graph_of(deepcopy(self.module), (self.xs[0].to(mix.held),), name="net")

    def under(self) -> Any:
        return torch.autocast("cpu", self.mix.low if self.mix.autocast else torch.bfloat16, enabled=self.mix.autocast)

    def own(self, off: Callable[[Tensor], Tensor] | None = None) -> Run:
        """The module's own run; off: by how many units in the last place each element of a batch is larger."""
        module, bits = deepcopy(self.module), torch.int32 if self.mix.low == torch.float32 else torch.int16
        xs = [(x.view(bits) + off(x).to(bits)).view(x.dtype) for x in self.xs] if off else self.xs

        def call(x: Tensor) -> list[Tensor]:
            with self.under():
                return [y for y in tree_flatten(module(x.to(self.mix.held)))[0] if isinstance(y, Tensor)]

        gradients = lambda: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}  # noqa: E731
        state = lambda: {n: t.detach() for n, t in module.state_dict().items()}  # noqa: E731
        return trained(module, call, xs, lambda: (state(), gradients()))

    @cached_property
    def plain(self) -> Run:
        return self.own()

    @cached_property
    def start(self) -> Tensor:
        state = self.module.state_dict()
        return torch.cat([state[n].flatten().double() for n in self.plain.parameters])

    @cached_property
    def is_repeated(self) -> bool:
        """Whether another run with the same inputs is the same, bit for bit."""
        again = self.own()
        return again.losses == self.plain.losses and torch.equal(again.flat, self.plain.flat)

    def apart(self, run: Run) -> Far:
        """From the module's own run."""
        plain = self.plain
        losses = [(p - q) / max(abs(q), 1e-30) for p, q in zip(run.losses, plain.losses, strict=True)]
        moved = (plain.flat - self.start).norm().clamp_min(1e-30)
        return Far(math.hypot(*losses) / len(losses) ** 0.5, float((run.flat - plain.flat).norm() / moved))

    @cached_property
    def unit(self) -> Far:
        """The largest distances of runs whose inputs are a unit in the last place off."""
        draw = torch.Generator().manual_seed(1)
        signs = [torch.ones_like, lambda x: -torch.ones_like(x)]  # from zero, to zero
        signs += [lambda x: torch.randint(2, x.shape, generator=draw) * 2 - 1] * self.draws
        found = [self.apart(self.own(off)) for off in signs]
        return Far(max(f.losses for f in found), max(f.parameters for f in found))

    def on_ranks(self, axes: Mapping[str, int], parameters: str = "blocks") -> list[Run]:
        """The runs of all ranks of a grid, of which each has whole outputs, parameters and gradients."""
        grid = Grid(tuple(axes.items()))
        state = deepcopy(self.module.state_dict()) | self.constants
        name = self.graph.inputs[0].name
        low = str(self.mix.low).removeprefix("torch.") if self.kernels and self.mix.autocast else ""
        compiled = compile_network(self.graph, grid, target=SM_90 if self.kernels else CPU, autocast=low)
        with package(compiled.package().files) as net:
            self.ran = interpreted(net) if self.kernels else []

            def program(end: Any) -> Run:
                mesh = net.init_mesh("cpu", transport=end)
                model = net.Network(mesh, parameters=parameters)
                model.load_full({n: t for n, t in state.items() if n in model._known or n in model._aliases})

                def call(x: Tensor) -> list[Tensor]:
                    with self.under():
                        ys = tree_flatten(model(net.scatter(name, x.to(self.mix.held), mesh)))[0]
                    return [net.gather(n, y, mesh) for (n, _), y in zip(self.graph.outputs, ys, strict=True)]

                return trained(model, call, self.xs, lambda: (model.full_state_dict(), model.full_gradients()))

            return World(grid.ranks).run(program)

    def check(self, axes: Mapping[str, int], parameters: str = "blocks", limit: float = LIMIT) -> tuple[Far, str]:
        """How far the steps of a grid's ranks are, and what is wrong with them, if anything."""
        runs = self.on_ranks(axes, parameters)
        far, nowhere = self.apart(runs[0]), torch.dtype
        for found in runs:
            other = [n for n, t in self.plain.types.items() if found.types.get(n, nowhere) != t]
            if other:
                return far, f"types of {', '.join(other[:3])}"
            if found.losses != runs[0].losses or not torch.equal(found.flat, runs[0].flat):
                return far, "ranks differ"
        return far, "" if far.units(self.unit) <= limit else f"{far.units(self.unit):.1f} units off"
