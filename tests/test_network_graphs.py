"""A step of a network as one CUDA graph: the same numbers as without, whatever is given and kept; nothing else changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generate import draws
from recorded_graphs import HERE, as_recorded, fake_graphs, launch
from small_networks import resnet, unet
from test_networks_gpu import compiled, loaded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import kernel_modules, runtime_of
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World


class Drawn(nn.Module):
    """What has state, draws, pools or resamples by tables, and several inputs."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = rng.choice((nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3), nn.GroupNorm(2, 4)))
        self.drop = rng.choice((nn.Dropout(0.3), nn.Dropout2d(0.4), nn.Identity()))
        self.pool = rng.choice((
            nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d((3, 2)),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Sequential(nn.ReflectionPad2d(1), nn.AvgPool2d(2)),
        ))  # fmt: skip
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.last(self.pool(self.drop(y)) * scale).mean((2, 3))


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def state(model: Any) -> list[Tensor]:
    return [t.clone() for t in (*model.full_state_dict().values(), *model.full_gradients().values())]


def same(one: Any, other: Any) -> None:
    """Seeds and steps, too, which no state dict holds."""
    torch.testing.assert_close(state(one), state(other), rtol=0, atol=0)
    seeds = [[getattr(t, "_block", getattr(t, "_local_tensor", t)) for n, t in m._known.items() if m._buffered.get(n, ("",))[0] == "seed"] for m in (one, other)]
    torch.testing.assert_close(*seeds, rtol=0, atol=0)


def steps(package: Any, given: list[list[Tensor]], end: VirtualTransport, seed: int) -> int:
    """Steps of training with a graph and without, which leave the same; how many launches the graph has."""
    rng = random.Random(seed)  # alike on all ranks
    mesh = package.init_mesh("cpu", transport=as_recorded(end))
    models = [package.Network(mesh, seed=seed, parameters=rng.choice(("dtensors", "blocks"))) for _ in range(2)]
    eager, graphed = models
    graphed.load_full(eager.full_state_dict())
    optimizers = [torch.optim.SGD([m._known[n] for n in m._learnt], 0.01, 0.9) for m in models]

    def loss(y: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        y = next(iter(y.values())) if isinstance(y, dict) else y
        return (y - target).square().sum(), y.mean()

    def blocks(k: int) -> list[Tensor]:
        return [package.scatter(n, t, mesh) for n, t in zip(eager._inputs, given[k], strict=True)]

    with torch.no_grad():
        made = eager.eval()(*blocks(0))
        made = next(iter(made.values())) if isinstance(made, dict) else made
    eager.train()
    target = torch.randn(made.shape, generator=torch.Generator().manual_seed(seed))
    random_state = torch.get_rng_state()
    if rng.random() < 0.5:  # what is in `grad` stays there, as do buffers
        for m in models:
            sum(loss(m(*blocks(0)), target)).backward()
    step = graphed.graphed(loss, *blocks(0), target)
    same(eager, graphed)
    assert torch.equal(random_state, torch.get_rng_state())
    for k in range(3):
        xs = blocks(k)
        value, mean = loss(eager(*xs), target + k)
        value.backward()
        found = step(*xs, target + k)
        torch.testing.assert_close(found, (value.detach(), mean.detach()), rtol=0, atol=0)
        same(eager, graphed)
        if rng.random() < 0.7:
            for optimizer in optimizers:
                optimizer.step()
        how = rng.choice((None, True, False))
        for optimizer in optimizers:
            if how is not None:
                optimizer.zero_grad(set_to_none=how)
        same(eager, graphed)
    eager.eval(), graphed.eval()
    with pytest.raises(RuntimeError, match="another mode"):
        step(*blocks(0), target)
    forward, xs = graphed.graphed(None, *blocks(0)), blocks(1)
    with torch.no_grad():
        torch.testing.assert_close(forward(*xs), eager(*xs), rtol=0, atol=0)
    same(eager, graphed)
    return len(step._graph.recorder.steps)


@pytest.mark.parametrize("seed", range(draws(8)))
def test_steps_are_those_without_a_graph(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    samples, rows = rng.choice((2, 4)), rng.choice((5, 6))
    given = [[torch.randn(samples, 3, rows, 6), torch.rand(1)] for _ in range(3)]
    graph, tensors = graph_of(Drawn(rng), tuple(given[0]), name="drawn")
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "W": 2})).items()))
    with loaded(compile_network(graph, grid), tensors, tmp_path) as package:
        fake_graphs(runtime_of(package), monkeypatch)
        found = World(grid.ranks).run(lambda end: steps(package, given, end, seed))
    assert min(found) > 20


@pytest.mark.parametrize(("made", "grid"), [(resnet, {"N": 2}), (unet, {"H": 2})])
def test_kernels_are_in_the_graph(made: Any, grid: dict[str, int], tmp_path: Path, monkeypatch: Any) -> None:
    one, tensors = compiled(made, grid)
    with loaded(one, tensors, tmp_path) as package:
        package.NET.device = "cpu"
        fake_graphs(runtime_of(package), monkeypatch)
        launched: list[bool] = []

        def counted(*args: Any, **constants: Any) -> None:
            launched.append(getattr(HERE, "recorder", None) is not None)
            launch(*args, **constants)

        for module in kernel_modules(package):
            monkeypatch.setattr(module, "launch", counted)
        net = package.NET
        model = package.Network
        given = [
            [torch.randn(net.split(n, net.batch).extents) for n in model._inputs] for _ in range(3)
        ]
        World(math.prod(grid.values())).run(lambda end: steps(package, given, end, 0))
    assert any(launched)
