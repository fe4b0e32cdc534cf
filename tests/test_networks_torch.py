"""What torch's own tools do around a generated network: right, as on one device, or refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import ResNet
from test_networks_training import adamw, batches, loss_of, on_ranks, package, resnet, sgd
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_cases import on_processes

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
