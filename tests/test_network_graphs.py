"""A step of a network as one CUDA graph: the numbers of steps without one, whatever is given and kept."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_graphs import HERE, NoHost, as_recorded, fake_graphs, launch
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, refuse_aten, step_on_no_device
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


pytestmark = pytest.mark.usefixtures("doubles")


def state(model: Any) -> list[Tensor]:
    return [t.clone() for t in (*model.full_state_dict().values(), *model.full_gradients().values())]


def same(one: Any, other: Any) -> None:
    """Seeds and steps, too, which no state dict holds."""
    torch.testing.assert_close(state(one), state(other), rtol=0, atol=0)
    seeds = [
        [
            getattr(t, "_block", getattr(t, "_local_tensor", t))
            for n, t in m._known.items()
            if m._buffered.get(n) == "seed"
        ]
        for m in (one, other)
    ]
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
        how = True if k == 0 else rng.choice((None, False))  # then the next one's are added to what the graph has left
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


@pytest.mark.parametrize("seed", cases_of(4, "test_steps_are_those_without_a_graph"))
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


def test_kernels_are_in_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    given = [[torch.randn(2, 8, 4, 4)] for _ in range(3)]
    graph, tensors = graph_of(module, tuple(given[0]), name="small")
    launched: list[bool] = []

    def counted(*args: Any, **constants: Any) -> None:
        launched.append(getattr(HERE, "recorder", None) is not None)
        launch(*args, **constants)

    with loaded(compile_network(graph, Grid((("H", 2),)), target=SM_90), tensors, tmp_path) as package:
        package.NET.device = "cpu"
        fake_graphs(runtime_of(package), monkeypatch)
        refuse_aten(runtime_of(package), monkeypatch)
        for kernels in kernel_modules(package):
            monkeypatch.setattr(kernels, "launch", counted)
        World(2).run(lambda end: steps(package, given, end, 0))
    assert sum(launched) > 2 * 5


class Tables(nn.Module):
    """What reads tables: pools with divisors, resampling, reflection, moments that are merged, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.norms = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.pool, self.pad = nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.ReflectionPad2d(1)
        self.up, self.drop = nn.Upsample(scale_factor=2, mode="bilinear"), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.pool(self.pad(self.drop(torch.relu(self.norm(self.first(x)))))))
        return self.last(self.norms(y)).mean((2, 3))


@pytest.mark.parametrize("grid", [{"H": 2}])
def test_a_second_step_is_the_devices_alone(grid: dict[str, int], tmp_path: Path, monkeypatch: Any) -> None:
    """Copies from the host and reads on it can't be recorded."""
    made = torch.tensor

    def from_host(*given: Any, **how: Any) -> Tensor:
        assert not getattr(HERE, "no_host", False), "a tensor of the host's numbers"
        return made(*given, **how)

    monkeypatch.setattr(torch, "tensor", from_host)
    graph, tensors = graph_of(Tables(), (torch.randn(2, 8, 12, 12),), name="tables")
    with loaded(compile_network(graph, Grid(tuple(grid.items())), target=SM_90), tensors, tmp_path) as package:
        step_on_no_device(package, monkeypatch, second=NoHost)


def test_what_a_graph_can_not_be_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tensors = graph_of(nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 5, 5),), name="small")
    with loaded(compile_network(graph, Grid((("N", 2),))), tensors, tmp_path) as package:
        World(2).run(lambda end: refused(package, end, monkeypatch))


BARRIER = threading.Barrier(2)


def refused(package: Any, end: VirtualTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = package.init_mesh("cpu", transport=as_recorded(end))
    model, x = package.Network(mesh), torch.randn(1, 3, 5, 5)

    def loss(y: Tensor) -> Tensor:
        return y.sum()

    with pytest.raises(RuntimeError, match="this is compiled for cpu"):
        model.graphed(loss, x)
    BARRIER.wait()
    fake_graphs(runtime_of(package), monkeypatch)
    BARRIER.wait()
    with pytest.raises(TypeError, match="one number"):
        model.graphed(lambda y: y, x)
    with pytest.raises(RuntimeError, match=r"can't be recorded.*_local_scalar_dense"):
        model.graphed(lambda y: y.sum() * y.sum().item(), x)
    with pytest.raises(RuntimeError, match=r"can't be recorded.*lift_fresh"):
        model.graphed(lambda y: (y * torch.tensor([2.0])).sum(), x)
    with pytest.raises(TypeError, match="takes input"):
        model.graphed(None, x, x)
    step = model.graphed(loss, x)
    for wrong in (torch.randn(2, 3, 5, 5), x.float(), x.to("meta")):
        with pytest.raises(ValueError, match="a graph has one shape"):
            step(wrong)
    with pytest.raises(ValueError, match="requires a gradient"):
        step(x.clone().requires_grad_())
    hook = model.register_forward_hook(lambda *_: None)
    for call in (lambda: step(x), lambda: model.graphed(loss, x)):
        with pytest.raises(RuntimeError, match="hooks"):
            call()
    hook.remove()
    step(x)
    model.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="record it again"):
        step(x)
    model.weight.requires_grad_(True)
    step(x)
    place = getattr(model.weight, "_local_tensor", getattr(model.weight, "_block", model.weight))
    place.set_(place.clone())
    with pytest.raises(RuntimeError, match="other memory"):
        step(x)


def test_gradients_of_inputs_and_of_a_loss_that_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are `grad` of the tensors that a call is given; the loss's buffers are as they were."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(4, 1, 1))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, y: Tensor) -> Tensor:
            self.calls.add_(1)
            return (y * self.w).square().sum()

    graph, tensors = graph_of(nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 5, 5),), name="small")
    with loaded(compile_network(graph, Grid((("N", 2),))), tensors, tmp_path) as package:
        fake_graphs(runtime_of(package), monkeypatch)

        def run(end: VirtualTransport) -> None:
            model = package.Network(package.init_mesh("cpu", transport=as_recorded(end)))
            loss = Loss()
            step = model.graphed(loss, torch.zeros(1, 3, 5, 5, requires_grad=True))
            assert not loss.calls
            for _ in range(2):
                x = torch.randn(1, 3, 5, 5)
                one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                model.zero_grad(), loss.zero_grad()
                value = step(one)
                assert loss.w.grad is not None and one.grad is not None
                found = [value, one.grad.clone(), loss.w.grad.clone()]
                model.zero_grad(), loss.zero_grad()
                value = loss(model(other))
                value.backward()
                torch.testing.assert_close(found, [value.detach(), other.grad, loss.w.grad], rtol=0, atol=0)
            assert loss.calls == 4
            with pytest.raises(ValueError, match="computed from"):
                step(other * 2)

        World(2).run(run)
