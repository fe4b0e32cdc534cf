"""What torch's own tools do around a generated network: right, as on one device, or refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault_cases import GUARD_S, NEVER_S, ready, told
from free_networks import imported
from test_networks_training import batches, loss_of, on_ranks, package, resnet, sgd
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_cases import on_processes

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of
from convgen.spec.exported import graph_of
from convgen.verify.processes import ProcessFailed, spawn

(X, LABELS), (X_OTHER, LABELS_OTHER) = batches(2, 4)
KINDS = ["dtensors", "blocks"]


def close(found: Any, truth: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance)


def whole(net: Any, mesh: Any, y: Tensor) -> Tensor:
    return net.gather("output", y, mesh)


def gradients_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def test_names_frozen_layers_and_gradients_of_inputs(packages: Path) -> None:
    net, module = package(0.0, "H4", packages), resnet()
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
def test_checkpointing_the_whole(reentrant: bool, layout: str, packages: Path) -> None:
    """Running statistics are updated again, as torch's."""
    net, module = package(0.0, layout, packages), resnet()
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


def test_checkpointing_draws_the_same_masks(packages: Path) -> None:
    """Two calls, then both backward passes: the masks are each call's own. Processes have a random state each."""
    net = package(0.25, "H4", packages)

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of forward mode
def test_transforms_are_right_or_refused(packages: Path) -> None:
    net, module = package(0.0, "H4", packages), resnet().eval()
    truth = grad(lambda ps: functional_call(module, ps, (X,)).square().sum())(dict(module.named_parameters()))
    with torch.no_grad():
        y = module(X)
    other = copy.deepcopy(module).train()
    other(X).square().sum().backward()
    trained = {n: p.grad for n, p in other.named_parameters() if p.grad is not None}

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
        model.train()  # running statistics move as they do without the transform
        for n, g in grad(loss)(blocks).items():
            close(net.NET.scatter(n, trained[n].detach(), mesh), g)

    on_ranks(net, program, module.state_dict())

    def forward_mode(model: Any, mesh: Any) -> None:  # of one rank, as torch has one level for all threads
        with pytest.raises(RuntimeError, match=r"forward-mode differentiation .* is not supported"):
            jvp(model, (X,), (X,))

    on_ranks(package(0.0, "N1", packages), forward_mode)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_network_cant_run_with_is_refused(kind: str, packages: Path) -> None:
    net, module = package(0.0, "H2 W2", packages), resnet()

    def program(old: Any, mesh: Any) -> None:
        x, state = net.scatter("x", X, mesh), module.state_dict()

        def refused(match: str, change: Callable[[Any], Any], error: Any = (RuntimeError, ValueError)) -> None:
            model = net.Network(mesh, parameters=kind)

            def changed() -> None:
                change(model)
                model(x)

            with pytest.raises(error, match=match):
                changed()

        refused("layer1 is a name of parameters in a network, no call", lambda m: m.layer1.register_forward_hook(print))
        refused("layer1.conv1 is a name of parameters in a network, no call", lambda m: m.layer1.conv1(x))
        refused(r"torch.float64, got torch.float32; dtype= compiles", lambda m: m.float())
        refused("x is torch.float64, got torch.float32", lambda m: m(x.float()))
        refused("conv1.weight can't be deleted: what", lambda m: parametrizations.weight_norm(m.conv1))
        refused("this rank's block of x has shape", lambda m: m(X))
        refused("takes x, got 2 tensors", lambda m: m(x, x), TypeError)
        held = net.Network(mesh, parameters=kind).conv1.weight
        refused(r"x is to be this rank's block, a dense tensor, got a (DTensor|Block)", lambda m: m(held), TypeError)
        for got, value in (("a list", [1]), ("one on meta", X.to("meta")), (type(held).__name__, held)):
            with pytest.raises(TypeError, match=f"scatter takes the whole x, a dense tensor, got .*{got}"):
                net.scatter("x", value, mesh)
        with pytest.raises(TypeError, match="block reads x from an array with a shape, got list"):
            net.block("x", [1], mesh)
        refused(r"x is on meta, and the network on cpu; x.to\('cpu'\)", lambda m: m(x.to("meta")))
        refused(r"is for cpu, and its parameters are on meta; model.to\('cpu'\)", lambda m: m.to("meta")(x))
        refused("missing fc.bias", lambda m: m.load_full({n: t for n, t in state.items() if n != "fc.bias"}), KeyError)
        refused("unknown head", lambda m: m.load_full(state | {"head": X}), KeyError)

        def wrong(model: Any) -> None:
            before = model.conv1.weight.to_local().clone()
            with pytest.raises(ValueError, match=r"fc.bias has shape \(5,\), got \(4,\)"):
                model.load_full(state | {"fc.bias": torch.zeros(4)})
            assert torch.equal(before, model.conv1.weight.to_local())  # nothing of it is taken

        wrong(net.Network(mesh, parameters=kind))
        for as_it_was in (x.detach(), x.clone().requires_grad_()):
            model = net.Network(mesh, parameters=kind)
            model.layer2.bn1.requires_grad_(False)
            y = whole(net, mesh, model(as_it_was))
            with torch.no_grad():
                model.fc.bias.add_(1)  # nobody reads it
            loss_of(y, LABELS).backward(retain_graph=True)
            with torch.no_grad():
                model.fc.weight.add_(1)
                model.layer2.bn1.weight.add_(1)
            two = r"backward reads (fc.weight|layer2.*), (fc.weight|layer2.*), changed in place since the forward pass"
            with pytest.raises(RuntimeError, match=two):
                loss_of(y, LABELS).backward()

    on_ranks(net, program)


@pytest.mark.parametrize("kind", KINDS)
def test_loops_over_modules_by_kind(kind: str, packages: Path) -> None:
    """Find what the source has; what would change how one computes is refused."""
    net, module = package(0.5, "H2 W2", packages), resnet(0.5)
    nn = torch.nn
    sorts = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.Dropout)

    def of(model: torch.nn.Module, sort: type) -> list[str]:
        return [n for n, m in model.named_modules() if isinstance(m, sort)]

    def program(old: Any, mesh: Any) -> None:
        model = net.Network(mesh, parameters=kind)
        assert all(set(of(model, sort)) == set(of(module, sort)) != set() for sort in sorts)
        assert "BatchNorm2d" in str(model)
        for one in model.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.eval()
        model(net.scatter("x", X, mesh))  # tests/test_networks_modes.py has its numbers
        model.train()
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert set(of(again, nn.BatchNorm2d)) == set(of(module, nn.BatchNorm2d))

        def refused(match: str, sort: type, change: Callable[[Any], Any]) -> None:
            model = net.Network(mesh, parameters=kind)

            def changed() -> None:
                for one in model.modules():
                    if isinstance(one, sort):
                        change(one)
                model(net.scatter("x", X, mesh))

            with pytest.raises(RuntimeError, match=match):
                changed()

        refused("is in evaluation", nn.Dropout, lambda m: m.eval())
        refused(r"\.p can't be set", nn.Dropout, lambda m: setattr(m, "p", 0.1))
        refused(r"\.momentum can't be set", nn.BatchNorm2d, lambda m: setattr(m, "momentum", None))
        refused("what it computes is compiled", nn.Conv2d, lambda m: m.reset_parameters())
        with pytest.raises(RuntimeError, match="what it computes is compiled"):
            torch.optim.swa_utils.update_bn([net.scatter("x", X, mesh)], model)
        for one in model.modules():
            if isinstance(one, nn.Conv2d):
                nn.init.constant_(one.weight, 0.25)
        assert all((model.full_state_dict()[f"{n}.weight"] == 0.25).all() for n in of(module, nn.Conv2d))

    on_ranks(net, program)


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_set_or_refused(kind: str, packages: Path) -> None:
    """Averages that are put in the place of parameters, and back, as is often written; whole tensors are not."""
    net = package(0.0, "C2", packages)

    def program(old: Any, mesh: Any) -> None:
        model, other = (net.Network(mesh, parameters=kind, seed=s) for s in (0, 1))
        mine, theirs = model.full_state_dict(), other.full_state_dict()
        backup = {n: p.data.clone() for n, p in model.named_parameters()}
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data = q.data
        close({n: model.full_state_dict()[n] for n in backup}, {n: theirs[n] for n in backup}, 0)
        for n, p in model.named_parameters():
            p.data = backup[n]
        close(model.full_state_dict(), mine, 0)
        with pytest.raises(RuntimeError, match=r"\.data"):
            model.conv1.weight.data = mine["conv1.weight"]
        y = whole(net, mesh, model(net.scatter("x", X, mesh)))
        loss_of(y, LABELS).backward()

    with torch.autograd.set_detect_anomaly(kind == "blocks"):  # of DTensors it asks torch's process groups
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


@pytest.mark.parametrize("axes", [{"H": 2}, {"C": 2}], ids=str)
def test_autocast_and_bfloat16(axes: dict[str, int], tmp_path: Path) -> None:
    """Under autocast a network gives the module's types, and one of bfloat16 has moments of float32; both lose no more
    than the module does, or little."""
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
        errors = [float((found[n].double() - g).norm() / g.norm()) for n, g in exact.items()]
        return statistics.median(errors)  # where two of a window are equal in bfloat16, gradients go to another pixel

    net = compiled_for(resnet().float(), x, axes, tmp_path / "wide")

    def program(model: Any, mesh: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = whole(net, mesh, model(net.scatter("x", x, mesh)))
            loss_of(y.double(), LABELS).backward()
            assert y.dtype == torch.bfloat16 and model.fc.weight.grad.dtype == torch.float32
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

    for found in on_ranks(net_16, program_16, resnet().bfloat16().state_dict()):
        assert found < 1.5 * lost


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_copies(kind: str, packages: Path, tmp_path: Path) -> None:
    """4 ranks store, 2 ranks, one and the original module read; state dicts and files of a rank; copies, averages."""
    four, two, one = (package(0.0, layout, packages) for layout in ("C4", "H2", "N1"))
    module = resnet()
    loss_of(module(X), LABELS).backward()
    sgd(module.parameters()).step()
    truth = {n: t.detach().clone() for n, t in module.state_dict().items()}

    def load(net: Any, ranks: int) -> None:
        def program(rank: int) -> None:
            model = net.Network(net.init_mesh("cpu"), seed=5, parameters=kind)
            dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "four")
            close(model.full_state_dict(), truth)

        on_processes(program, ranks)

    def program(rank: int) -> None:
        mesh = four.init_mesh("cpu")
        model, other = (four.Network(mesh, seed=s, parameters=kind) for s in (0, 1))
        model.load_full(resnet().state_dict())
        averaged = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: old.lerp(new, 0.25))
        averaged.update_parameters(model)
        loss_of(whole(four, mesh, model(four.scatter("x", X, mesh))), LABELS).backward()
        sgd(model.parameters()).step()
        close(model.full_state_dict(), truth)
        averaged.update_parameters(model)
        state = {n: truth[n] for n, _ in module.named_parameters()}
        first = resnet().state_dict()
        close(
            {n: averaged.module.full_state_dict()[n] for n in state}, {n: first[n].lerp(state[n], 0.25) for n in state}
        )
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "four")
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        for made in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            close(made.full_state_dict(), truth)
            made.eval()
            close(whole(four, mesh, made(four.scatter("x", X, mesh))).detach(), module.eval()(X).detach())
        fresh = resnet()
        fresh.load_state_dict(model.full_state_dict())
        with pytest.raises(RuntimeError, match=r"full_state_dict=True would give .* take model.full_state_dict\(\)"):
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        get_model_state_dict(model)
        with torch.device("meta"):
            empty = four.Network(mesh, parameters=kind)
        assert empty.fc.weight.is_meta
        empty.to_empty(device="cpu")
        empty.load_full(truth)
        close(empty.full_state_dict(), truth)

    on_processes(program, 4)
    load(two, 2)
    load(one, 1)
    fresh = resnet()

    def alone(rank: int) -> None:
        dcp.load({"model": fresh.state_dict()}, checkpoint_id=tmp_path / "four")
        close(dict(fresh.state_dict()), truth)

    on_processes(alone, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_clipping_and_hooks(kind: str, packages: Path) -> None:
    """foreach and fused steps, torch's clipping, hooks on parameters and on the network."""
    net = package(0.0, "N2 H2", packages)
    makes: dict[str, Any] = {
        "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}
    }  # fmt: skip
    truths: dict[str, Any] = {}
    for name, how in makes.items():
        module = resnet()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, **how)
        for x in (X, X_OTHER):
            optimizer.zero_grad()
            loss_of(module(x), LABELS).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        truths[name] = module.state_dict()

    def program(rank: int) -> list[str]:
        mesh, seen = net.init_mesh("cpu"), list[str]()
        for name, how in makes.items():
            model = net.Network(mesh, parameters=kind)
            model.load_full(resnet().state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
            model.register_full_backward_hook(lambda *_: seen.append("backward"))
            model.register_forward_hook(lambda *_: seen.append("forward"))
            model.fc.weight.register_hook(lambda g: seen.append(type(g).__name__))
            for x in (X, X_OTHER):
                optimizer.zero_grad()
                block = net.scatter("x", x, mesh).requires_grad_()
                loss_of(whole(net, mesh, model(block)), LABELS).backward()
                clip = net.clip_grad_norm_ if name == "loop" else torch.nn.utils.clip_grad_norm_
                clip(model.parameters(), 0.5)
                optimizer.step()
            close(model.full_state_dict(), dict(truths[name]), 1e-9)
        return seen

    for seen in on_processes(program, 4):
        assert sorted(set(seen)) == sorted({"forward", "backward", "Block" if kind == "blocks" else "DTensor"})
        assert len(seen) == 18


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of outputs that are views
def test_ddp_and_fsdp2_over_copies(packages: Path) -> None:
    """Two ranks along H, and two copies along N that have other samples each: they are one network of the grid, not of
    DDP; over ranks that hold copies DDP and FSDP2 change nothing, over others they are refused."""
    net, module = package(0.0, "N2 C2", packages), resnet()
    optimizer = sgd(module.parameters())
    loss_of(module(X), LABELS).backward()
    optimizer.step()

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu")

        def made() -> Any:
            model = net.Network(mesh, parameters="blocks")
            model.load_full(resnet().state_dict())
            return model

        def stepped(model: Any) -> None:
            optimizer = sgd(model.parameters())
            loss_of(whole(net, mesh, model(net.scatter("x", X, mesh))), LABELS).backward()
            optimizer.step()

        with pytest.raises(RuntimeError, match=r"hold other blocks of it than this one|appears not to match sizes"):
            DistributedDataParallel(made(), process_group=mesh.get_group("C"))
        group = mesh.get_group("N")
        views = DistributedDataParallel(made(), process_group=group, gradient_as_bucket_view=True)
        with pytest.raises(RuntimeError, match="would leave plain gradients"):
            stepped(views)
        model = made()
        stepped(DistributedDataParallel(model, process_group=mesh.get_group("N")))
        close(model.full_state_dict(), dict(module.state_dict()))
        model = made()
        stepped(fully_shard(model, mesh=mesh["N"]))
        model.unshard()
        close(model.full_state_dict(), dict(module.state_dict()))

    on_processes(program, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_and_export(packages: Path) -> None:
    net, module = package(0.0, "H2", packages), resnet()
    loss_of(module(X), LABELS).backward()

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu")
        model = net.Network(mesh)
        model.load_full(resnet().state_dict())
        x = net.scatter("x", X, mesh)
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(whole(net, mesh, compiled(x)), LABELS).backward()
        close(model.full_gradients(), gradients_of(module))
        close(model.full_state_dict(), dict(module.state_dict()))
        for strict in (False, True):
            with pytest.raises(Exception, match="an exported program would hold this rank's place"):
                torch.export.export(model, (x,), strict=strict)

    on_processes(program, 2)


# ---- Faults --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_step(packages: Path, tmp_path: Path) -> None:
    net = package(0.0, "H4", packages)

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        model = net.Network(mesh)
        x = net.scatter("x", X, mesh)
        model(x).square().sum().backward()
        if rank == 1:
            model.layer2.conv1.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

        def step() -> None:
            model(x).square().sum().backward()
            model(x)

        (tmp_path / f"{rank}.said").write_text(told(step))

    with pytest.raises(ProcessFailed):
        spawn(program, 4, GUARD_S)
    for rank in (0, 2, 3):
        said = (tmp_path / f"{rank}.said").read_text()
        assert re.match(r"RuntimeError: trained: ranks \[(\d, )*1(, \d)*\] did not come to ", said), said


@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
def test_a_wrong_input_on_one_rank(agree: bool, packages: Path, tmp_path: Path) -> None:
    """All are told; with CONVGEN_AGREE=0 the others time out with the step's name."""
    net = package(0.0, "H4", packages)

    def program(rank: int) -> str:
        os.environ["CONVGEN_AGREE"] = "1" if agree else "0"

        def begin(timeout: float) -> tuple[Any, Tensor]:
            mesh = net.init_mesh("cpu", timeout=NEVER_S if agree else timeout)
            model, x = net.Network(mesh), net.scatter("x", X, mesh)
            model(x)
            return model, x

        model, x = ready(begin, rank, tmp_path)
        said = told(lambda: model(x[:, :, :1] if rank == 2 else x))
        (tmp_path / f"{rank}.done").touch()
        while not all((tmp_path / f"{r}.done").exists() for r in range(4)):
            time.sleep(0.01)  # a rank that ends would be another fault
        return said

    says = spawn(program, 4, GUARD_S)
    assert "this rank's block of x has shape" in says[2]
    for rank in (0, 1, 3):
        if agree:
            assert "ranks [2] refused their arguments" in says[rank]
        else:
            # The first that has waited long enough hangs up; others may hear that before their own time is over.
            assert re.search(r"Error: trained: (ranks \[.*\] did not come to )?step %", says[rank]), says[rank]


@pytest.mark.slow
def test_ranks_with_other_packages(packages: Path) -> None:
    one, other = package(0.0, "H4", packages), package(0.25, "H4", packages)

    def program(rank: int) -> str:
        net = other if rank == 3 else one
        mesh = net.init_mesh("cpu")
        model = net.Network(mesh)
        return told(lambda: model(net.scatter("x", X, mesh)))

    for said in spawn(program, 4, GUARD_S):
        assert "don't run the same module, nothing was computed: ranks [0, 1, 2]: " in said
