"""What torch's own tools do around a generated network: right, as on one device, or refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from free_networks import imported
from test_networks_training import batches, loss_of, on_ranks, package, resnet, sgd
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_cases import on_processes

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of
from convgen.spec.exported import graph_of

(X, LABELS), (X_OTHER, LABELS_OTHER) = batches(2, 4)
KINDS = ["dtensors", "blocks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


def close(found: Any, truth: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance)


def whole(net: Any, mesh: Any, y: Tensor) -> Tensor:
    return net.gather("output", y, mesh)


def gradients_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def test_names_frozen_layers_and_gradients_of_inputs(folder: Path) -> None:
    net, module = package(0.0, "H4", folder), resnet()
    frozen = [n for n, _ in module.named_parameters() if n.startswith(("conv1", "bn1", "layer1"))]

    for n, p in module.named_parameters():
        p.requires_grad_(n not in frozen)
    x = X.clone().requires_grad_()
    (truth,) = torch.autograd.grad(loss_of(module(x), LABELS), x)
    loss_of(module(X), LABELS).backward()

    def program(model: Any, mesh: Any) -> None:
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in module.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in module.named_buffers()]
        for n, p in model.named_parameters():
            p.requires_grad_(n not in frozen)
        x = X.clone().requires_grad_()
        y = whole(net, mesh, model(net.scatter("x", x, mesh)))
        close(torch.autograd.grad(loss_of(y, LABELS), x)[0], truth)
        assert not gradients_of(model)
        end = net.NET.place(mesh).transport
        block, before = net.scatter("x", X, mesh), len(end.sent)
        y = whole(net, mesh, model(block))
        forward = len(end.sent) - before
        loss_of(y, LABELS).backward()
        assert len(end.sent) - before - forward < len(net.VOLUME["backward"]) / 2  # nothing for frozen layers
        close(model.full_gradients(), gradients_of(module))

    on_ranks(net, program, resnet().state_dict())


@pytest.mark.parametrize("layout", ["H4", "C4"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_whole(reentrant: bool, layout: str, folder: Path) -> None:
    """Running statistics are updated again, as torch's."""
    net, module = package(0.0, layout, folder), resnet()
    for x in (X, X_OTHER):
        given = x.clone().requires_grad_()
        loss_of(checkpoint(module, given, use_reentrant=reentrant), LABELS).backward()

    def program(model: Any, mesh: Any) -> None:
        for x in (X, X_OTHER):
            block = net.scatter("x", x, mesh).requires_grad_()
            loss_of(whole(net, mesh, checkpoint(model, block, use_reentrant=reentrant)), LABELS).backward()
        close(model.full_gradients(), gradients_of(module))
        close(model.full_state_dict(), dict(module.state_dict()))

    on_ranks(net, program, resnet().state_dict())


def test_checkpointing_draws_the_same_masks(folder: Path) -> None:
    """Two calls, then both backward passes: the masks are each call's own. On processes, which have a random state each."""
    net = package(0.25, "H4", folder)

    def program(rank: int) -> None:
        torch.manual_seed(rank)  # ranks need not agree
        mesh = net.init_mesh("cpu")
        first = net.Network(mesh)
        first.load_full(resnet().state_dict())

        def two(model: Any, call: Callable[[Tensor], Any]) -> dict[str, Tensor]:
            xs = [net.scatter("x", x, mesh).requires_grad_() for x in (X, X_OTHER)]
            for y in [whole(net, mesh, call(x)) for x in xs]:
                loss_of(y, LABELS).backward()
            return model.full_gradients()

        truth = copy.deepcopy(first)
        gradients = two(truth, truth)
        for reentrant in (False, True):
            model = copy.deepcopy(first)
            close(two(model, lambda x, m=model, r=reentrant: checkpoint(m, x, use_reentrant=r)), gradients)
            assert torch.equal(dict(model.named_buffers())["convgen.seed"].to_local(), torch.tensor([0, 2]))
        x = net.scatter("x", X, mesh).requires_grad_()
        y = checkpoint(model, x, use_reentrant=True, preserve_rng_state=False)
        with pytest.raises(RuntimeError, match="would draw other dropout masks than the first one"):
            y.sum().backward()

    on_processes(program, 4)


@pytest.mark.parametrize("part", ["layer1", "layer2"])
def test_checkpointing_a_part(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the package's text; two of the four ranks have nothing of layer2's output."""
    net, module = package(0.25, "H4", folder), resnet()
    text = sys.modules[f"{net.__name__}.network"]
    function = getattr(text, part)

    def program(model: Any, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        loss_of(whole(net, mesh, model(net.scatter("x", X, mesh))), LABELS).backward()
        return model.full_gradients(), model.full_state_dict()

    truth = on_ranks(net, program, module.state_dict())[0]
    monkeypatch.setattr(text, part, lambda run, x: run.checkpoint(function, x))  # as edited by hand
    for gradients, state in on_ranks(net, program, module.state_dict()):
        close(gradients, truth[0])
        twice = [n for n, t in state.items() if "num_batches" in n and t == 2]
        assert twice and all(n.startswith(part) for n in twice)


def test_transforms_are_right_or_refused(folder: Path) -> None:
    net, module = package(0.0, "H4", folder), resnet().eval()
    truth = grad(lambda ps: functional_call(module, ps, (X,)).square().sum())(dict(module.named_parameters()))
    with torch.no_grad():
        y = module(X)

    def program(model: Any, mesh: Any) -> None:
        model.eval()
        x = net.scatter("x", X, mesh)
        blocks = {n: p.to_local().detach() for n, p in model.named_parameters()}

        def loss(blocks: dict[str, Tensor]) -> Tensor:
            return whole(net, mesh, functional_call(model, blocks, (x,))).square().sum()

        for n, g in grad(loss)(blocks).items():
            close(net.NET.scatter(n, truth[n].detach(), mesh), g)
        for around in (torch.no_grad, torch.inference_mode):
            with around():
                close(whole(net, mesh, model(x)), y)
        given = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(whole(net, mesh, model(given)).square().sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="gradients of a network's gradients are not supported"):
            dx.sum().backward()
        made = whole(net, mesh, model(x))
        grads = torch.autograd.grad(made.square().sum(), list(model.parameters()), create_graph=True)
        with pytest.raises(RuntimeError, match="gradients of a network's gradients are not supported"):
            torch.autograd.grad(grads[0].to_local().sum(), list(model.parameters()))
        with pytest.raises(TypeError, match="vmap over a network is not supported"):
            vmap(model)(torch.stack([x, x]))
        with pytest.raises(TypeError, match="vmap over a network is not supported"):
            jacrev(model)(x)
        with pytest.raises(RuntimeError, match=r"forward-mode differentiation .* is not supported"):
            jvp(model, (x,), (x,))
        model.train()
        with pytest.raises(RuntimeError, match=r"in-place operation .* that would mutate a captured Tensor"):  # torch's
            grad(loss)(blocks)

    on_ranks(net, program, module.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_network_cant_run_with_is_refused(kind: str, folder: Path) -> None:
    net, module = package(0.0, "H2 W2", folder), resnet()

    def program(old: Any, mesh: Any) -> None:
        x, state = net.scatter("x", X, mesh), module.state_dict()

        def refused(match: str, change: Callable[[Any], Any], error: Any = (RuntimeError, ValueError)) -> None:
            with pytest.raises(error, match=match):
                model = net.Network(mesh, parameters=kind)
                change(model)
                model(x)

        refused("bn1 is in evaluation, the network in training", lambda m: m.layer1.bn1.eval())
        refused("layer1 is a name of parameters in a network, no call", lambda m: m.layer1.register_forward_hook(print))
        refused("layer1.conv1 is a name of parameters in a network, no call", lambda m: m.layer1.conv1(x))
        refused(r"torch.float64, got torch.float32; compile with --dtype", lambda m: m.float())
        refused("x is torch.float64, got torch.float32", lambda m: m(x.float()))
        if kind == "blocks":  # a DTensor's norm is the whole one
            refused("would take blocks for whole tensors", lambda m: parametrizations.weight_norm(m.conv1))
        refused("this rank's block of x has shape", lambda m: m(X))
        refused("takes x, got 2 tensors", lambda m: m(x, x), TypeError)
        refused("missing fc.bias", lambda m: m.load_full({n: t for n, t in state.items() if n != "fc.bias"}), KeyError)
        refused("unknown head", lambda m: m.load_full(state | {"head": X}), KeyError)

        def wrong(model: Any) -> None:
            before = model.conv1.weight.to_local().clone()
            with pytest.raises(ValueError, match=r"fc.bias has shape \(5,\), got \(4,\)"):
                model.load_full(state | {"fc.bias": torch.zeros(4)})
            assert torch.equal(before, model.conv1.weight.to_local())  # nothing of it is taken

        wrong(net.Network(mesh, parameters=kind))

    on_ranks(net, program)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x)


def compiled_for(module: torch.nn.Module, x: Tensor, axes: dict[str, int], folder: Path) -> Any:
    graph, tensors = graph_of(module, (x,), name=type(module).__name__)
    files = files_of(compile_network(graph, Grid(tuple(axes.items()))), tensors)
    return imported({n: t.decode() for n, t in files.items()}, folder)


def test_one_value_a_channel_is_no_statistic(tmp_path: Path) -> None:
    net = compiled_for(Tiny(), torch.randn(4, 4), {"N": 2}, tmp_path)

    def program(model: Any, mesh: Any) -> None:
        x = net.scatter("x", torch.zeros(1, 4), mesh)
        with pytest.raises(ValueError, match="expected more than 1 value per channel when training"):
            model(x, batch=1)
        assert not net.NET.place(mesh).transport.sent
        model.eval()(x, batch=1)

    on_ranks(net, program)


@pytest.mark.parametrize("axes", [{"N": 2}, {"H": 2}, {"C": 2}], ids=str)
def test_autocast_and_bfloat16(axes: dict[str, int], tmp_path: Path) -> None:
    """Under autocast a network keeps its type, so it is nearer to float32 than the module is. One of bfloat16 has
    moments of float32, and loses no more than the module in bfloat16 does, or little."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(4, *X.shape[1:], generator=draw)
    wide, truth = resnet().float(), resnet()
    narrow = resnet().bfloat16()

    def step(module: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
        loss_of(module(x).double(), LABELS).backward()
        return {n: g.double() for n, g in gradients_of(module).items()}

    exact = step(truth, x.double())
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(wide, x)

    def far(found: dict[str, Tensor]) -> float:
        return max(float((found[n].double() - g).norm() / g.norm()) for n, g in exact.items() if g.norm() > 1e-6)

    net = compiled_for(resnet().float(), x, axes, tmp_path / "wide")

    def program(model: Any, mesh: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = whole(net, mesh, model(net.scatter("x", x, mesh).bfloat16().float()))
            loss_of(y.double(), LABELS).backward()
            assert y.dtype == torch.float32
        assert far(model.full_gradients()) < max(far(cast), 0.02)

    on_ranks(net, program, resnet().float().state_dict())
    lost = far(step(narrow, x.bfloat16()))
    net_16 = compiled_for(resnet().bfloat16(), x.bfloat16(), axes, tmp_path / "narrow")

    def program_16(model: Any, mesh: Any) -> float:
        given = net_16.scatter("x", x.bfloat16(), mesh)
        optimizer = sgd(model.parameters())
        y = whole(net_16, mesh, model(given))
        assert y.dtype == model.fc.weight.dtype == torch.bfloat16
        loss_of(y.double(), LABELS).backward()
        found = far(model.full_gradients())
        optimizer.step()
        return found

    print(axes, lost)
    for found in on_ranks(net_16, program_16, resnet().bfloat16().state_dict()):
        assert found < 1.5 * lost
