"""More of torch's tools, on real processes: loss scaling, other optimizers, whole state dicts, what changes weights."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_value_, parametrizations, prune
from torch_cases import EVEN, backward_ours, backward_whole, layer, on_processes, single, x_and_dy

CASE = layer("stationary-x", "N2 C2", EVEN)
KINDS = ("dtensors", "blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_scaler_sees_all_ranks(kind: str) -> None:
    """An infinity in one block skips the step on all."""
    m, whole = CASE.module, single(CASE)
    backward_whole(whole, CASE)
    x, dy = x_and_dy(CASE)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=kind)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore[reportPrivateImportUsage]
        loss = (m.gather("y", ours(m.scatter("x", x, mesh)), mesh) * dy).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), whole.weight.grad, rtol=1e-12, atol=1e-12)
        scaler.step(optimizer)
        scaler.update()
        before = ours.weight.to_local().detach().clone()
        ours.zero_grad()
        scaler.scale(loss.new_ones(()))
        backward_ours(ours, CASE, mesh)
        if rank % 2:  # and so its copy: gradients of copies are alike
            m.local(ours.weight.grad).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, ours.weight.to_local())
        assert scaler.get_scale() == 2.0

    on_processes(program, 4)


def test_a_gradient_scaler_looks_along_all_axes() -> None:
    """In any order of parameters, of which some ranks hold copies: torch's own looks along the axes that the first one
    is split over, and ranks would part."""

    def program(rank: int) -> list[float]:
        mesh = CASE.module.init_mesh("cpu")
        CASE.module.Conv(mesh)  # whose mesh it is
        scales: list[float] = []
        for order in (1, -1):
            ps = [
                torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, placed))
                for placed in ([Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(0), Replicate()])
            ]
            for p in ps:
                p.grad = torch.zeros_like(p)
            if rank % 2:
                CASE.module.local(ps[0].grad).fill_(float("inf"))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore[reportPrivateImportUsage]
            scaler.scale(torch.ones(()))
            scaler.step(torch.optim.SGD(ps[::order], lr=0.1))
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert on_processes(program, 4) == [[2.0, 2.0]] * 4


FLATTENED = "Attempted to flatten multiple dimensions"
OPTIMIZERS: dict[str, Any] = {
    name: getattr(torch.optim, name)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "LBFGS", "Adafactor")
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_optimizers(kind: str) -> None:
    """Steps are one device's. LBFGS and Adafactor, whose steps have norms, are refused of Blocks; so is Rprop where it
    takes elements by a mask."""
    m = CASE.module
    x, dy = x_and_dy(CASE)

    def steps(make: Any, parameters: Any, forward: Any) -> None:
        optimizer = make(parameters, lr=0.05)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (forward() * dy).sum()
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(loss)

    truths = {}
    for name, make in (OPTIMIZERS | {"Rprop": torch.optim.Rprop}).items():
        whole = single(CASE)
        steps(make, whole.parameters(), lambda whole=whole: whole(x))
        truths[name] = whole.weight.detach()

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        own = m.scatter("x", x, mesh)

        def tried(make: Any) -> Any:
            ours = m.Conv(mesh, parameters=kind)
            steps(make, ours.parameters(), lambda: m.gather("y", ours(own), mesh))
            return m.gather("w", ours.weight, mesh)

        for name, make in OPTIMIZERS.items():
            if kind == "blocks" and name in ("LBFGS", "Adafactor"):
                continue
            try:
                found = tried(make)
            except RuntimeError as error:  # torch 2.11, of a DTensor that is split behind the first dimension
                assert kind == "dtensors" and name == "LBFGS" and FLATTENED in str(error), error
            else:
                torch.testing.assert_close(found, truths[name], rtol=1e-9, atol=1e-9)
        if kind == "blocks":
            for make in (torch.optim.LBFGS, torch.optim.Adafactor):
                with pytest.raises(RuntimeError, match="would take blocks for whole tensors"):
                    tried(make)
        try:
            found = tried(torch.optim.Rprop)
        except (IndexError, RuntimeError) as error:  # up to torch 2.13, which takes elements by a mask
            assert re.search("would take blocks for whole tensors|shape of the mask|aten.index_put_", str(error)), error
        else:
            torch.testing.assert_close(found, truths["Rprop"], rtol=1e-9, atol=1e-9)

    on_processes(program, 4)


def test_the_number_of_a_dtensor_is_that_of_all_ranks() -> None:
    """torch alone takes this rank's part of a partial sum for its number; a module's import mends that."""
    whole = single(CASE)
    expected = torch.linalg.vector_norm(whole.weight.detach())

    def program(rank: int) -> None:
        mesh = CASE.module.init_mesh("cpu")
        placed = CASE.module.placements("w", mesh)
        p = distribute_tensor(whole.weight.detach(), mesh, placed)
        norm = torch.linalg.vector_norm(p)
        torch.testing.assert_close(norm.full_tensor(), expected)
        assert norm.item() == float(norm) == pytest.approx(expected.item(), rel=1e-12)
        assert p.sum().item() == pytest.approx(whole.weight.sum().item(), rel=1e-9)
        assert p.max().item() == whole.weight.max().item()
        assert bool((p.detach().abs().amax() < 100).full_tensor())

    on_processes(program, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_state_dicts_are_taken_or_refused(kind: str) -> None:
    m, other = CASE.module, single(CASE, 3)
    whole = {n: p.detach().clone() for n, p in other.named_parameters()}

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        for broadcast in (False, True):
            ours = m.Conv(mesh, parameters=kind)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            given = {} if broadcast and rank else {n: t.clone() for n, t in whole.items()}
            if kind == "blocks":
                with pytest.raises(RuntimeError, match="size mismatch for weight"):
                    set_model_state_dict(ours, given, options=options)
                ours.load_full(whole["weight"], whole["bias"])
            else:
                set_model_state_dict(ours, given, options=options)
            assert torch.equal(m.gather("w", ours.weight, mesh), whole["weight"])
            with pytest.raises(RuntimeError, match=r"size mismatch|mixed torch\.Tensor and DTensor"):
                ours.load_state_dict(whole)
        backward_ours(ours, CASE, mesh)
        optimizer = torch.optim.AdamW(ours.parameters())
        optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        if kind == "dtensors":
            state = get_optimizer_state_dict(ours, optimizer, options=options)
            assert state["state"]["weight"]["exp_avg"].shape == whole["weight"].shape
        else:
            for get in (get_optimizer_state_dict, get_state_dict):
                with pytest.raises(RuntimeError, match="full_state_dict=True would give this rank's block"):
                    get(torch.nn.Sequential(ours), optimizer, options=options)

    on_processes(program, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_add_up_and_are_clipped_by_value(kind: str) -> None:
    m, whole = CASE.module, single(CASE)
    for _ in range(2):
        backward_whole(whole, CASE)
    total = whole.weight.grad.clone()
    clip_grad_value_(whole.parameters(), 0.1)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=kind)
        for _ in range(2):
            backward_ours(ours, CASE, mesh)
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), total, rtol=1e-12, atol=1e-12)
        clip_grad_value_(ours.parameters(), 0.1)
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), whole.weight.grad, rtol=1e-12, atol=1e-12)

    on_processes(program, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_has_changed_since_is_refused(kind: str) -> None:
    """As torch does of plain tensors; a bias, which no gradient reads, may change."""
    m = CASE.module
    x, dy = x_and_dy(CASE)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours, own = m.Conv(mesh, parameters=kind), m.scatter("x", x, mesh).requires_grad_()
        y, of_w = ours(own), ours(own.detach())
        with torch.no_grad():
            ours.bias.add_(1)
        y.backward(m.scatter("dy", dy, mesh), retain_graph=True)
        with torch.no_grad():
            ours.weight.add_(1)
        of_w.backward(m.scatter("dy", dy, mesh))
        with pytest.raises(RuntimeError, match="backward reads w, changed in place since the forward pass"):
            y.backward(m.scatter("dy", dy, mesh))

    on_processes(program, 4)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # spectral_norm's
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_a_weight_on_its_way_is_refused(kind: str) -> None:
    """Weight and spectral norms, pruning, another type: by the module, by Blocks, or in torch's own words."""
    m = CASE.module
    x, _ = x_and_dy(CASE)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        own = m.scatter("x", x, mesh)
        for change in (
            parametrizations.weight_norm,
            parametrizations.spectral_norm,
            lambda c: prune.l1_unstructured(c, "weight", 0.5),
        ):
            with pytest.raises(
                (RuntimeError, ValueError), match=rf"would take blocks|redistribute|in-place operations|{FLATTENED}"
            ):
                change(m.Conv(mesh, parameters=kind))(own)
        with pytest.raises(ValueError, match=r"w, this rank's block of .*, is torch\.float64, got torch\.float32"):
            m.Conv(mesh, parameters=kind).float()(own)

    on_processes(program, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_initialisation_draws_a_rank_at_a_time(kind: str) -> None:
    """Blocks refuse it; of DTensors on a CPU every rank draws for itself, so copies part: reset_parameters mends it."""
    m = CASE.module
    whole = single(CASE, 3)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=kind)
        torch.manual_seed(rank)
        if kind == "blocks":
            with pytest.raises(RuntimeError, match="normal_ would take blocks for whole tensors"):
                torch.nn.init.kaiming_normal_(ours.weight)
        else:
            with pytest.warns(UserWarning, match="DTensor random operators may not have complete support on cpu"):
                torch.nn.init.kaiming_normal_(ours.weight)
            mine = ours.weight.to_local().detach()
            copies = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(copies, mine, group=mesh.get_group("N"))
            assert not torch.equal(*copies)
        ours.reset_parameters(seed=3)
        assert torch.equal(m.gather("w", ours.weight, mesh), whole.weight)

    on_processes(program, 4)


def test_a_clipped_norm_as_a_number() -> None:
    m, whole = CASE.module, single(CASE)
    backward_whole(whole, CASE)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        for clip in (torch.nn.utils.clip_grad_norm_, m.clip_grad_norm_):
            ours = m.Conv(mesh)
            backward_ours(ours, CASE, mesh)
            assert clip(ours.parameters(), 1.0).item() == pytest.approx(expected, rel=1e-12)

    on_processes(program, 4)


def test_ranks_with_other_modules_all_say_so() -> None:
    other = layer("stationary-x", "N2 C2", replace(EVEN, bias=False))

    def program(rank: int) -> None:
        m = (other if rank == 3 else CASE).module
        mesh = m.init_mesh("cpu")
        x = torch.zeros(2, 3, 7, 6, dtype=torch.float64)
        with pytest.raises(
            RuntimeError, match=r"don't run the same module, nothing was computed: ranks \[0, 1, 2\]: .*"
        ):
            m.gather("x", x, mesh)

    on_processes(program, 4)
