"""Training of networks on ranks equals training on one device: losses, parameters, running statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import imported
from small_networks import ResNet, seeded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.network_compiler import compile_network, plan_graph
from convgen.packages import files_of
from convgen.plan.setting import Setting
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

SHAPE = (3, 13, 10)  # the last stage has two rows: on four ranks along H two have none
LAYOUTS = ("N4", "H4", "H2 W2", "C4", "planned")
Batches = Sequence[tuple[Tensor, ...]]


def resnet(p: float = 0.0) -> nn.Module:
    seeded()
    return ResNet(p).double()


def batches(count: int, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Random images and labels, of these numbers of samples by turns."""
    draw = torch.Generator().manual_seed(7)
    found: list[tuple[Tensor, Tensor]] = []
    for i in range(count):
        n = sizes[i % len(sizes)]
        x = torch.randn(n, *SHAPE, dtype=torch.float64, generator=draw)
        found.append((x, torch.randint(5, (n,), generator=draw)))
    return found


class WithLoss(nn.Module):
    """A network and its loss in one."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.net = ResNet(p)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.net(x)
        return nn.functional.cross_entropy(y, labels) + nn.functional.mse_loss(y.tanh(), torch.zeros_like(y))


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, labels) + nn.functional.mse_loss(y.tanh(), torch.zeros_like(y))


@cache
def exported(p: float, within: bool = False) -> tuple[Any, Any]:
    seeded()
    module = (WithLoss(p) if within else ResNet(p)).double()
    (x, labels), *_ = batches(1, 4)
    return graph_of(module, (x, labels) if within else (x,), name="trained")


@cache
def package(p: float, layout: str, folder: Path, within: bool = False) -> Any:
    """A package of the ResNet, with its loss if `within`; N1: of one rank."""
    graph, tensors = exported(p, within)
    if layout == "planned":
        compiled = plan_graph(graph, 4, Setting(machine=load_machine("lassen")))[0]
    else:
        axes = {one[0]: int(one[1]) for one in layout.split()}
        compiled = compile_network(graph, Grid(tuple(axes.items())))
    return imported({n: t.decode() for n, t in files_of(compiled, tensors).items()}, folder)


def on_ranks(net: Any, program: Callable[[Any, Any], Any], state: dict[str, Tensor] | None = None) -> list[Any]:
    """`program(model, mesh)` on virtual ranks, from this state."""

    def run(end: VirtualTransport) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        if state is not None:
            model.load_full(state)
        return program(model, mesh)

    return World(math.prod(net.NET.grid.values())).run(run)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


Trained = tuple[list[float], dict[str, Tensor]]


def train(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    given: Batches,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    clip: Callable[..., Any] | None = None,
    each: int = 1,
) -> list[float]:
    """Losses of steps, each on so many batches; gradients are clipped to 0.5."""
    optimizer, losses = make(model.parameters()), list[float]()
    for i, (x, labels) in enumerate(given):
        if i % each == 0:
            optimizer.zero_grad()
        value = loss(x, labels)
        value.backward()
        losses.append(float(value.detach()))
        if i % each == each - 1:
            if clip is not None:
                clip(model.parameters(), 0.5)
            optimizer.step()
    return losses


def on_one(given: Batches, **how: Any) -> Trained:
    module = resnet()
    losses = train(module, lambda x, labels: loss_of(module(x), labels), given, **how)
    return losses, {n: t.detach().clone() for n, t in module.state_dict().items()}


def of_blocks(net: Any, model: Any, mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss from the gathered output of a network."""

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        y = model(net.scatter("x", x, mesh), batch=len(x))
        return loss_of(net.gather("output", y, mesh, batch=len(x)), labels)

    return loss


def assert_equal(found: Trained, truth: Trained, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(truth[0]), rtol=tolerance, atol=tolerance)
    assert set(found[1]) == set(truth[1])
    for n, t in truth[1].items():
        torch.testing.assert_close(found[1][n], t, rtol=tolerance, atol=tolerance, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_equal_one_device(layout: str, packages: Path) -> None:
    """SGD with momentum, a new batch each; 4 samples and, without compiling again, 5."""
    given = batches(20, 4, 4, 5)
    truth = on_one(given)
    net = package(0.0, layout, packages)

    def program(model: Any, mesh: Any) -> Trained:
        return train(model, of_blocks(net, model, mesh), given), model.full_state_dict()

    for found in on_ranks(net, program, resnet().state_dict()):
        assert_equal(found, truth)


@pytest.mark.parametrize("layout", ["H4", "C4"])
def test_clipped_steps_of_adamw(layout: str, packages: Path) -> None:
    """The package's clip_grad_norm_; micro-batches of several sizes add up."""
    given = batches(8, 4, 3)
    truth = on_one(given, make=adamw, clip=torch.nn.utils.clip_grad_norm_, each=2)
    net = package(0.0, layout, packages)

    def program(model: Any, mesh: Any) -> Trained:
        losses = train(model, of_blocks(net, model, mesh), given, adamw, net.clip_grad_norm_, 2)
        return losses, model.full_state_dict()

    for found in on_ranks(net, program, resnet().state_dict()):
        assert_equal(found, truth, 1e-9)


@pytest.mark.parametrize("layout", ["H4", "C4", "N4"])
def test_masks_are_those_of_one_rank(layout: str, packages: Path) -> None:
    given = batches(3, 4, 5)

    def trained(net: Any) -> list[Trained]:
        return on_ranks(
            net,
            lambda model, mesh: (train(model, of_blocks(net, model, mesh), given), model.full_state_dict()),
            resnet().state_dict(),
        )

    (truth,) = trained(package(0.25, "N1", packages))
    assert truth[0] != on_one(given)[0]
    for found in trained(package(0.25, layout, packages)):
        assert_equal(found, truth)


@pytest.mark.parametrize("layout", ["H4", "N4"])
def test_a_loss_within_the_network(layout: str, packages: Path) -> None:
    given = batches(4, 4, 5)
    truth = on_one(given)
    net = package(0.0, layout, packages, within=True)

    def program(model: Any, mesh: Any) -> Trained:
        def loss(x: Tensor, labels: Tensor) -> Tensor:
            blocks = [net.scatter(n, t, mesh) for n, t in (("x", x), ("labels", labels))]
            return net.gather("output", model(*blocks, batch=len(x)), mesh)

        losses = train(model, loss, given)
        return losses, {n.removeprefix("net."): t for n, t in model.full_state_dict().items()}

    state = {f"net.{n}": t for n, t in copy.deepcopy(resnet().state_dict()).items()}
    for found in on_ranks(net, program, state):
        assert_equal(found, truth)
