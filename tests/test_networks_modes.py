"""Batch norms in another mode than the network, as `bn.eval()` after `model.train()` has them: as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from free_networks import free_network, imported
from operation_cases import a_grid
from sampling import cases_of
from small_networks import ResNet, seeded
from test_networks_training import batches, exported, loss_of, on_ranks, package, resnet
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_modes import own_modes

(X, LABELS), (X_OTHER, LABELS_OTHER) = batches(2, 4)
Freeze = Callable[[nn.Module], Any]


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def all_norms(model: nn.Module) -> None:
    for norm in norms_of(model):
        norm.eval()


def first_norm(model: nn.Module) -> None:
    model.get_submodule("layer1.bn1").eval()


def containers(model: nn.Module) -> None:
    """What they hold that has a mode are norms."""
    model.get_submodule("layer1").eval()
    model.get_submodule("layer2").eval()


def others(model: nn.Module) -> None:
    """The network in evaluation, one norm in training."""
    model.eval()
    model.get_submodule("layer2.bn2").train()


WAYS: dict[str, Freeze] = {"all": all_norms, "first": first_norm, "containers": containers, "others": others}


def state() -> dict[str, Tensor]:
    """The ResNet's, with running statistics that are not those of a batch."""
    found = resnet().state_dict()
    draw = torch.Generator().manual_seed(5)
    for name, t in found.items():
        if name.endswith("running_mean"):
            t.copy_(torch.randn(t.shape, dtype=t.dtype, generator=draw))
        if name.endswith("running_var"):
            t.copy_(torch.rand(t.shape, dtype=t.dtype, generator=draw) + 0.5)
    return found


def steps(model: nn.Module, freeze: Freeze, call: Callable[[Tensor], Tensor]) -> list[float]:
    """Losses of two steps of training with some norms frozen, and one without."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), list[float]()
    for x, labels, frozen in ((X, LABELS, True), (X_OTHER, LABELS_OTHER, True), (X, LABELS, False)):
        model.train()
        if frozen:
            freeze(model)
        optimizer.zero_grad()
        loss = loss_of(call(x), labels)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def check(net: Any, freeze: Freeze) -> None:
    """Losses, parameters and buffers are the module's."""
    module = resnet()
    module.load_state_dict(state())
    losses = steps(module, freeze, module)
    before = state()
    assert any(not torch.equal(t, before[n]) for n, t in module.state_dict().items() if "running" in n)

    def program(model: Any, mesh: Any) -> None:
        found = steps(model, freeze, lambda x: net.gather("output", model(net.scatter("x", x, mesh)), mesh))
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()), rtol=1e-9, atol=1e-9)

    on_ranks(net, program, state())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["H4", "N1", "C4", "N2 C2", "planned"])
def test_norms_have_modes_of_their_own(layout: str, way: str, packages: Path) -> None:
    check(package(0.0, layout, packages), WAYS[way])


@pytest.mark.parametrize("statistics", ["spatial", "local"])
@pytest.mark.parametrize("layout", [{"N": 2, "H": 2}, {"C": 2}], ids=str)
def test_statistics_by_parts(layout: dict[str, int], statistics: str, tmp_path: Path) -> None:
    """Frozen, parts are normalised alike; those of blocks of one's own are there in the next step."""
    graph, tensors = exported(0.0)
    compiled = compile_network(graph, Grid(tuple(layout.items())), statistics=statistics)
    net = imported({n: t.decode() for n, t in files_of(compiled, tensors).items()}, tmp_path)
    module = resnet()
    module.load_state_dict(state())
    all_norms(module)
    loss_of(module(X), LABELS).backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}

    def program(model: Any, mesh: Any) -> None:
        all_norms(model)
        loss_of(net.gather("output", model(net.scatter("x", X, mesh)), mesh), LABELS).backward()
        torch.testing.assert_close(model.full_gradients(), gradients, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()), rtol=0, atol=0)
        model.train()
        model(net.scatter("x", X, mesh))
        counts = {int(t) for n, t in model.full_state_dict().items() if "num_batches" in n}
        assert counts == {1}

    on_ranks(net, program, state())


def test_blocks_that_are_computed_again(tmp_path: Path) -> None:
    """Backward has the modes that the call had, whatever the model's are then."""
    graph, tensors = exported(0.0)
    compiled = compile_network(graph, Grid((("N", 2),)), again=("layer1", "layer2"))
    net = imported({n: t.decode() for n, t in files_of(compiled, tensors).items()}, tmp_path)
    check(net, all_norms)
    module = resnet()
    module.load_state_dict(state())
    first_norm(module)
    loss_of(module(X), LABELS).backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}

    def program(model: Any, mesh: Any) -> None:
        first_norm(model)
        loss = loss_of(net.gather("output", model(net.scatter("x", X, mesh)), mesh), LABELS)
        model.eval()
        loss.backward()
        torch.testing.assert_close(model.full_gradients(), gradients, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()), rtol=1e-10, atol=1e-10)

    on_ranks(net, program, state())


class Normed(nn.Module):
    """Norms with and without numbers, one that is read twice, one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 4, 3, padding=1)
        self.first = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False, momentum=0.3)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(torch.relu(self.first(self.one(x))))
        return self.last(self.two(torch.relu(y)) + y)


@pytest.mark.parametrize("seed", cases_of(8, "test_any_layout"))
def test_any_layout(seed: int, tmp_path: Path) -> None:
    """Layouts and roles by chance, under which norms are rows like any others; which are frozen is by chance, too."""
    draw = Random(seed)
    seeded()
    module, x = Normed().double(), torch.randn(4, 2, 9, 7, dtype=torch.float64)
    for norm in norms_of(module):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    net_graph, tensors = graph_of(module, (x,))
    grid = a_grid(draw)
    compiled = free_network(draw, net_graph, grid)
    net = imported({n: t.decode() for n, t in files_of(compiled, tensors).items()}, tmp_path)
    names = draw.sample(["first", "plain", "last"], draw.randint(1, 3))
    start = copy.deepcopy(module.state_dict())
    for name in names:
        module.get_submodule(name).eval()
    y = module(x)
    y.square().sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}

    def program(model: Any, mesh: Any) -> None:
        for name in names:
            model.get_submodule(name).eval()
        found = net.gather("output", model(net.scatter("x", x, mesh)), mesh)
        found.square().sum().backward()
        torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model.full_gradients(), gradients, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()), rtol=1e-10, atol=1e-10)

    on_ranks(net, program, start)


class Moded(nn.Module):
    """A norm, a norm without a momentum, a dropout of one's own, one of torch's, a container of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.own = Own()
        self.block = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.drop(self.block(self.norm(x))))


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.25, self.training)


def test_others_have_the_networks_mode(tmp_path: Path) -> None:
    """And what a mode is called: alike where it computes alike."""
    graph, tensors = graph_of(Moded().double(), (torch.randn(4, 3, 5, 5, dtype=torch.float64),))
    assert own_modes(graph) == (("norm", "block.1"), ("drop", "own"))
    files = files_of(compile_network(graph, Grid((("N", 2),))), tensors)
    net = imported({n: t.decode() for n, t in files.items()}, tmp_path)

    def program(model: Any, mesh: Any) -> None:
        x = net.scatter("x", torch.randn(4, 3, 5, 5, dtype=torch.float64), mesh)
        for name in ("drop", "own"):
            model.train()
            model.get_submodule(name).eval()
            with pytest.raises(
                RuntimeError, match=f"{name} is in evaluation, the network in training: batch norms may"
            ):
                model(x)
        model.train()
        assert model._mode_text() == "train"
        model.block.eval()
        model(x)
        assert model._mode_text() == "train, but eval: block.1"
        model.eval()
        model.norm.train()
        assert model._mode_text() == "eval, but train: norm"

    on_ranks(net, program)


class Branching(nn.Module):
    """Another graph in evaluation; a norm whose average counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.counting = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None)
        self.after = nn.Sequential(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.counting(self.norm(x))
        return self.after(y) * 2 if self.training else y


def test_of_a_graph_of_training_alone_norms_alone(tmp_path: Path) -> None:
    module, x = Branching().double(), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    graph, tensors = graph_of(module, (x,))
    assert graph.modes == ("train",)
    assert own_modes(graph) == (("norm",), ("counting",))
    net = imported(
        {n: t.decode() for n, t in files_of(compile_network(graph, Grid((("N", 2),))), tensors).items()}, tmp_path
    )
    start = copy.deepcopy(module.state_dict())
    module.norm.eval()
    y = module(x)

    def program(model: Any, mesh: Any) -> None:
        block = net.scatter("x", x, mesh)
        model.norm.eval()
        torch.testing.assert_close(net.gather("output", model(block), mesh), y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()), rtol=1e-12, atol=1e-12)
        for name in ("counting", "after"):
            model.train()
            model.get_submodule(name).eval()
            with pytest.raises(RuntimeError, match=f"{name} is in evaluation, the network in training"):
                model(block)
        model.eval()
        with pytest.raises(
            RuntimeError, match=r"train mode alone.* behind module\.eval\(\), or by convgen import --eval"
        ):
            model(block)

    on_ranks(net, program, start)


def test_a_network_of_evaluation_has_no_norms_in_training(tmp_path: Path) -> None:
    seeded()
    graph, tensors = graph_of(ResNet(0.0).double(), (X,), training=False)
    assert own_modes(graph) == ((), ())
    net = imported(
        {n: t.decode() for n, t in files_of(compile_network(graph, Grid((("N", 2),))), tensors).items()}, tmp_path
    )

    def program(model: Any, mesh: Any) -> None:
        model.bn1.train()
        with pytest.raises(RuntimeError, match="bn1 is in training, the network in evaluation"):
            model(net.scatter("x", X, mesh))
        model.train()
        with pytest.raises(RuntimeError, match=r"eval mode alone.* behind module\.train\(\), or by convgen import"):
            model(net.scatter("x", X, mesh))

    on_ranks(net, program)
