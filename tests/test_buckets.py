"""Gradients that are made where their message takes them: the same bits, no copy, whatever else goes on meanwhile."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import imported
from networks_on_ranks import with_passes
from sampling import cases_of
from test_networks_gpu import SM_90, loaded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import runtime_of
from convgen.passes.bucket_gradients import BucketGradients
from convgen.spec.exported import graph_of
from convgen.spec.target import CPU, Target
from convgen.verify.interpreter import in_interpreter
from convgen.verify.virtual import VirtualTransport, World


class Calls(TorchDispatchMode):
    """Counts calls of ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


class Wide(nn.Module):
    """Products whose gradients are one matrix product each, one of them used twice, with one of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 7), nn.Linear(7, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.relu(self.a(x)))
        return self.d(self.c(torch.relu(self.b(x))))


class Convolved(nn.Module):
    """Convolutions, grouped ones and one along lines among them."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 16, 3, padding=1)
        self.g = nn.Conv2d(16, 16, 3, groups=2, bias=False)
        self.p = nn.Conv2d(16, 8, 1)
        self.line = nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.p(self.g(torch.relu(self.c(x)))).flatten(2))


def compiled(module: nn.Module, x: Tensor, target: Target = CPU) -> Any:
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    graph, constants = graph_of(module.train(), (x,))
    constants = {**constants, **module.state_dict()}
    one = with_passes(compile_network(graph, Grid((("N", 2),)), target=target), BucketGradients())
    assert one.program.buckets
    return one, constants


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one, constants = compiled(Wide(), torch.randn(8, 24), SM_90)
    package = imported(one.package().files, tmp_path_factory.mktemp("wide"))
    in_interpreter(package)
    return package, constants


def on_ranks(net: Any, program: Any) -> list[Any]:
    def run(end: VirtualTransport) -> Any:
        package, constants = net
        mesh = package.init_mesh("cpu", transport=end)
        model = package.Network(mesh).train()
        model.load_full(dict(constants))
        return program(package, mesh, model)

    return World(2).run(run)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: g.clone() for name, g in model.full_gradients().items()}
    model.zero_grad()
    return found


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def inputs(package: Any, mesh: Any, seed: int) -> Any:
    return package.scatter("x", torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)), mesh)


def test_the_second_step_packs_nothing(net: Any) -> None:
    def program(package: Any, mesh: Any, model: Any) -> None:
        found = []
        for _ in range(3):
            loss = model(inputs(package, mesh, 1)).square().sum()
            with Calls() as calls:
                loss.backward()
            found.append((gradients(model), calls.count))
        (first, packed), *others = found
        assert packed["cat"]
        for again, calls in others:
            alike(first, again)
            assert calls["mm"] >= 4  # the gradient of b is a sum of two
            assert calls["cat"] == packed["cat"] - 1  # the other is the transport's

    on_ranks(net, program)


def test_kernels_write_where_it_travels(tmp_path: Path) -> None:
    """On a GPU filters' gradients, of any shape."""
    one, constants = compiled(Convolved(), torch.randn(4, 8, 6, 6), SM_90)
    with loaded(one, constants, tmp_path) as package:
        in_interpreter(package)

        def program(package: Any, mesh: Any, model: Any) -> None:
            found: list[dict[str, Tensor]] = []
            for step in range(2):
                x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(1))
                loss = model(package.scatter("x", x, mesh)).square().sum()
                with Calls() as calls:
                    loss.backward()
                assert bool(calls.count["_foreach_copy_"]) == bool(step)  # of what no kernel makes: biases
                found.append(gradients(model))
            alike(*found)

        on_ranks((package, constants), program)


def test_messages_that_are_large(net: Any) -> None:
    """Memory of a message is not there before most of it is, beside activations, but where one value is half of it."""
    memory = runtime_of(net[0]).MessageMemory(torch.bfloat16, last=False)
    sizes = (1 << 22, 12 << 20, 1 << 22)
    some = [torch.empty(n, dtype=torch.bfloat16, device="meta") for n in sizes]
    with torch.no_grad():
        memory.packed(some)
        assert [memory.offer(k, t.shape, t) is not None for k, t in enumerate(some)] == [False, True, False]


def test_functions_of_autograd(tmp_path: Path) -> None:
    """torch.func.grad, behind a step, and twice."""
    one, constants = compiled(Wide(), torch.randn(8, 24))
    net = imported(one.package().files, tmp_path), constants

    def program(package: Any, mesh: Any, model: Any) -> None:
        x = inputs(package, mesh, 1)
        model(x).square().sum().backward()
        want = gradients(model)
        parameters, found = dict(model.named_parameters()), list[dict[str, Any]]()
        for _ in range(2):
            found.append(
                torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
            )
        alike(*found)
        alike(found[1], want)

    on_ranks(net, program)


@pytest.mark.parametrize("seed", range(6))
def test_passes_that_come_in_any_order(net: Any, seed: int) -> None:
    """Graphs that are kept and gone back through in any order, some broken off, have the gradients of one alone."""
    rng = random.Random(seed)
    order = [(rng.randrange(3), rng.random() < 0.4, rng.random() < 0.3) for _ in range(8)]

    def program(package: Any, mesh: Any, model: Any) -> None:
        fresh = package.Network(mesh).train()
        fresh.load_full(dict(net[1]))
        alone = []
        for k in range(3):
            fresh(inputs(package, mesh, k)).square().sum().backward()
            alone.append(gradients(fresh))
        made = [model(inputs(package, mesh, k)).square().sum() for k in range(3)]
        held: list[tuple[Any, int]] = []
        for k, holds, some in order:
            if some:  # of one layer alone, so a bucket comes with fewer values
                torch.autograd.grad(made[k], [model.get_parameter("c.weight")], retain_graph=True)
            made[k].backward(retain_graph=True)
            if holds:  # what an earlier pass has given stays as it is
                held.append(({n: p.grad for n, p in model.named_parameters()}, k))
                before = {n: g.full_tensor().clone() for n, g in held[-1][0].items()}
                model.zero_grad()
                alike(before, alone[k])
            else:
                alike(gradients(model), alone[k])
        for got, k in held:
            alike({n: g.full_tensor() for n, g in got.items()}, alone[k])

    on_ranks(net, program)


@pytest.mark.parametrize("seed", cases_of(40, "test_passes_that_cross"))
def test_passes_that_cross(net: Any, seed: int) -> None:
    """Of passes whose steps come in any order, some of which end early, each sends its own values, and what a pass has
    made stays as it is until then."""
    rng = random.Random(seed)
    last = rng.random() < 0.5
    shapes = [rng.choice(((4, 8), (7,), (8, 4, 3, 3), (16,), (3, 5))) for _ in range(rng.randint(1, 5))]
    message = runtime_of(net[0]).MessageMemory(torch.float32, last=last)
    passes: list[dict[int, tuple[Tensor, Tensor]]] = [{}]  # by value what lies there, and what it is to be
    direct = 0
    with torch.no_grad():
        for _ in range(60):
            i = rng.randrange(len(passes))
            one = passes[i]
            missing = [k for k in range(len(shapes)) if k not in one]
            if rng.random() < 0.1 and len(passes) < 3:
                passes.append({})
            elif rng.random() < 0.05:
                passes[i] = {}  # it ends
            elif missing:
                k = rng.choice(missing)
                wanted = torch.randn(shapes[k])
                there = message.offer(k, shapes[k], wanted) if rng.random() < 0.8 else None
                direct += there is not None
                one[k] = (wanted.clone() if there is None or rng.random() < 0.1 else there.copy_(wanted)), wanted
            else:
                for other in passes:
                    for lies, wanted in other.values():
                        assert torch.equal(lies, wanted)
                comes = [rng.random() < 0.9 for _ in shapes] if rng.random() < 0.2 else [True] * len(shapes)
                comes[0] = True
                packed = message.packed([one[k][0] if c else None for k, c in enumerate(comes)])
                sent = [one[k][1] for k, c in enumerate(comes) if c]
                flat = [(t.movedim(1, -1) if last and t.dim() == 4 else t).reshape(-1) for t in sent]
                assert torch.equal(packed, torch.cat(flat))
                packed.fill_(math.nan)  # it is on its way, and becomes a sum
                passes[i] = {}
    assert direct or len(shapes) < 3
