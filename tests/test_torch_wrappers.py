"""DDP, FSDP2, checkpointing, hooks, models of several layers, DTensors in and out: on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Case
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_cases import EVEN, RAGGED, backward_ours, backward_whole, layer, on_processes, single, x_and_dy

NARROW = layer("stationary-x", "N2 C2", EVEN)
COPIED = layer("stationary-y", "N2 F2", EVEN)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def trained(case: Case, steps: int = 2, clip: float | None = None) -> torch.nn.Module:
    """One device's layer after some steps."""
    whole = single(case)
    optimizer = adamw(whole)
    for _ in range(steps):
        optimizer.zero_grad()
        backward_whole(whole, case)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), clip)
        optimizer.step()
    return whole


def test_ddp_over_copies_is_right_and_refused_otherwise() -> None:
    """Blocks on (N, F), whose copies lie along N: DDP over N trains as one device; over F or all it raises at once."""
    m, whole = COPIED.module, trained(COPIED)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters="blocks")
        before = [p.to_local().detach().clone() for p in ours.parameters()]
        for group in (None, mesh.get_group("F")):
            with pytest.raises(RuntimeError, match=r"ranks \[.*\] hold other blocks of it than this one"):
                DistributedDataParallel(ours, process_group=group)
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, ours.parameters(), strict=True))
        unseen = DistributedDataParallel(ours, process_group=mesh.get_group("F"), init_sync=False)
        with pytest.raises(RuntimeError, match="hold other blocks of it than this one"):
            backward_ours(unseen, COPIED, mesh)
        views = DistributedDataParallel(ours, process_group=mesh.get_group("N"), gradient_as_bucket_view=True)
        with pytest.raises(RuntimeError, match="would leave plain gradients"):
            backward_ours(views, COPIED, mesh)
        ours = m.Conv(mesh, parameters="blocks")
        wrapped = DistributedDataParallel(ours, process_group=mesh.get_group("N"))
        optimizer = adamw(wrapped)
        for _ in range(2):
            optimizer.zero_grad()
            backward_ours(wrapped, COPIED, mesh)
            optimizer.step()
        for name, tensor in (("w", "weight"), ("bias", "bias")):
            got = m.gather(name, getattr(ours, tensor), mesh)
            torch.testing.assert_close(got, getattr(whole, tensor).detach(), rtol=1e-12, atol=1e-12)
        with pytest.raises(RuntimeError):  # torch's own words
            DistributedDataParallel(m.Conv(mesh), process_group=mesh.get_group("N"))

    on_processes(program, 4)


def test_ddp_over_whole_models_position_by_position() -> None:
    """Two meshes of two ranks, each with half of the samples: DDP over ranks at one position; others refused."""
    half = layer("stationary-x", "C2", type(EVEN)(2, 6, 8, EVEN.spatial, bias=True))
    m, whole = half.module, single(COPIED)
    x, dy = x_and_dy(COPIED)
    whole(x).backward(dy)

    def program(rank: int) -> None:
        first, position = rank // 2 * 2, rank % 2
        mesh = m.init_mesh("cpu", ranks=[first, first + 1])
        ours = m.Conv(mesh, parameters="blocks")
        crossed = [dist.new_group(pair) for pair in ((0, 3), (1, 2))]
        straight = [dist.new_group(pair) for pair in ((0, 2), (1, 3))]
        with pytest.raises(RuntimeError, match="hold other blocks"):
            DistributedDataParallel(ours, process_group=crossed[int(rank in (1, 2))])
        wrapped = DistributedDataParallel(ours, process_group=straight[position])
        samples = slice(first, first + 2)
        wrapped(m.scatter("x", x[samples], mesh)).backward(2 * m.scatter("dy", dy[samples], mesh))  # DDP takes the mean
        for name, tensor in (("dw", "weight"), ("dbias", "bias")):
            got = m.gather(name, getattr(ours, tensor).grad, mesh)
            torch.testing.assert_close(got, getattr(whole, tensor).grad, rtol=1e-12, atol=1e-12)

    on_processes(program, 4)


def test_fsdp2_over_copies_is_right_and_refused_otherwise() -> None:
    m, whole = COPIED.module, trained(COPIED, clip=0.3)
    untrained = single(COPIED)
    backward_whole(untrained, COPIED)
    first_norm = torch.nn.utils.get_total_norm([p.grad for p in untrained.parameters() if p.grad is not None])

    def program(rank: int) -> None:
        norms: list[Tensor] = []
        mesh = m.init_mesh("cpu")
        x, dy = x_and_dy(COPIED)
        x, dy = m.scatter("x", x, mesh), m.scatter("dy", dy, mesh)
        with pytest.raises(RuntimeError, match=r"hold other blocks of it than this one"):
            fully_shard(m.Conv(mesh, parameters="blocks"), mesh=mesh["F"])(x)
        with pytest.raises(
            (RuntimeError, ValueError, NotImplementedError, AssertionError)
        ):  # DTensors: torch's own words
            fully_shard(m.Conv(mesh), mesh=mesh["N"])(x)
        ours = fully_shard(m.Conv(mesh, parameters="blocks"), mesh=mesh["N"])
        optimizer = adamw(ours)
        for _ in range(2):
            optimizer.zero_grad()
            ours(x).backward(dy)
            with pytest.raises(RuntimeError, match="would take blocks for whole tensors"):
                torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.3)
            norms.append(m.clip_grad_norm_(ours.parameters(), 0.3))
            optimizer.step()
        torch.testing.assert_close(norms[0], first_norm, rtol=1e-12, atol=0)
        ours.unshard()
        for name, tensor in (("w", "weight"), ("bias", "bias")):
            got = m.gather(name, getattr(ours, tensor), mesh)
            torch.testing.assert_close(got, getattr(whole, tensor).detach(), rtol=1e-12, atol=1e-12)
        ours.reshard()
        with pytest.raises(RuntimeError, match="a part of a block can't be stored"):
            ours.weight.__create_write_items__("weight", ours.weight)

    on_processes(program, 4)


class Mixed(torch.nn.Module):
    """Our layers on two grids, with ordinary ones around and between; every rank has the whole activations there."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 6, 1, dtype=torch.float64)
        self.first, self.norm = first, torch.nn.BatchNorm2d(8, dtype=torch.float64)
        self.second, self.head = second, torch.nn.Linear(7, 2, dtype=torch.float64)


def whole_forward(model: Mixed, x: Tensor) -> Tensor:
    y = model.norm(model.first(model.stem(x))).relu()
    return model.head(model.second(y[:, :5]).mean((2, 3))).square().sum()


@pytest.mark.parametrize("parameters", ["dtensors", "blocks"])
def test_a_model_that_mixes_layers_grids_and_ordinary_modules(parameters: str) -> None:
    one, two = NARROW, layer("spatial", "H2 W2", RAGGED)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(4, 3, 7, 6, dtype=torch.float64, generator=generator)

    def ordinary() -> Mixed:
        torch.manual_seed(1)
        return Mixed(single(one, 2), single(two, 3))

    whole = ordinary()
    optimizer = adamw(whole)
    for _ in range(2):
        optimizer.zero_grad()
        whole_forward(whole, x).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.7)
        optimizer.step()

    def program(rank: int) -> None:
        a, b = one.module, two.module
        meshes = a.init_mesh("cpu"), b.init_mesh("cpu")
        model = ordinary()
        model.first = a.Conv(meshes[0], seed=2, parameters=parameters)
        model.second = b.Conv(meshes[1], seed=3, parameters=parameters)

        def forward(x: Tensor) -> Tensor:
            y = model.first(a.scatter("x", model.stem(x), meshes[0]))
            y = model.norm(a.gather("y", y, meshes[0])).relu()
            y = b.gather("y", model.second(b.scatter("x", y[:, :5], meshes[1])), meshes[1])
            return model.head(y.mean((2, 3))).square().sum()

        kinds: dict[Any, list[Tensor]] = {}
        for p in model.parameters():
            kinds.setdefault((type(p.data), getattr(p, "device_mesh", None)), []).append(p)
        groups = [{"params": ps} for ps in kinds.values()]
        optimizer = torch.optim.AdamW(groups, lr=0.05, foreach=True)
        if parameters == "blocks":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            forward(x).backward()
            a.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
        for (m, mesh), ours, theirs in zip(
            ((a, meshes[0]), (b, meshes[1])), (model.first, model.second), (whole.first, whole.second), strict=True
        ):
            for name, tensor in (("w", "weight"), ("bias", "bias")):
                got = m.gather(name, getattr(ours, tensor), mesh)
                torch.testing.assert_close(got, getattr(theirs, tensor).detach(), rtol=1e-9, atol=1e-9)
        for ours, theirs in ((model.stem, whole.stem), (model.norm, whole.norm), (model.head, whole.head)):
            torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-9, atol=1e-9)

    on_processes(program, 4)


@pytest.mark.parametrize("algorithm", ["stationary-x N2 C2", "stationary-y N2 F2", "spatial N2 H2"])
def test_dtensors_in_and_out(algorithm: str) -> None:
    """x as a DTensor gives y as one, and gradients as such; whatever does not fit is refused with what would."""
    name, grid = algorithm.split(" ", 1)
    conv = type(EVEN)(
        4, 8, 8, (type(EVEN.spatial[0])("H", 8, kernel=3, pad_lo=1, pad_hi=1), EVEN.spatial[1]), bias=True
    )
    case = layer(name, grid, conv)
    m, whole = case.module, single(case)
    x, dy = x_and_dy(case)
    truth = x.clone().requires_grad_()
    (whole(truth) * dy).sum().backward()

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh)
        placed = m.placements("x", mesh)
        given = torch.distributed.tensor.distribute_tensor(x, mesh, placed).requires_grad_()
        y = ours(given)
        assert isinstance(y, DTensor)
        assert list(y.placements) == m.placements("y", mesh)
        assert (y.shape, y.stride()) == (dy.shape, dy.stride())
        torch.testing.assert_close(y.full_tensor().detach(), whole(x).detach(), rtol=1e-12, atol=1e-12)
        # The loss is DTensor's own: dy arrives as torch makes it.
        loss = (y * torch.distributed.tensor.distribute_tensor(dy, mesh, y.placements)).sum()
        loss.full_tensor().backward()
        assert given.grad is not None
        torch.testing.assert_close(given.grad.full_tensor(), truth.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), whole.weight.grad, rtol=1e-12, atol=1e-12)
        given.grad = None
        ours(given).sum().backward()  # dy is replicated, or partial
        assert given.grad is not None
        assert not isinstance(ours(m.scatter("x", x, mesh)), DTensor)
        w = torch.distributed.tensor.distribute_tensor(whole.weight.detach(), mesh, m.placements("w", mesh))
        bias = m.scatter("bias", whole.bias.detach(), mesh)
        assert torch.equal(m.conv(given, w, bias, mesh=mesh).to_local(), y.to_local())
        assert torch.equal(m.gather("y", y, mesh), y.full_tensor())
        wrong = torch.distributed.tensor.distribute_tensor(x, mesh, [Replicate(), Replicate()])
        with pytest.raises(ValueError, match=r"got a DTensor; its placements are .*: pass x.redistribute\(mesh, \["):
            ours(wrong)
        assert torch.equal(ours(wrong.redistribute(mesh, placed)).to_local(), y.to_local())
        with pytest.raises(ValueError, match=r"got a DTensor; its shape is \(2, 8, 8, 6\); batch= tells"):
            ours(torch.distributed.tensor.distribute_tensor(x[:2], mesh, placed))
        other = type(mesh)("cpu", mesh.mesh, mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match="got a DTensor; its mesh is"):
            ours(torch.distributed.tensor.distribute_tensor(x, other, placed))

    on_processes(program, 4)


def test_ragged_dtensors_are_refused_with_what_would_do() -> None:
    case = layer("stationary-w", "F2 C2", RAGGED)
    m = case.module
    x, _ = x_and_dy(case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        given = torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(1), Shard(1)])
        with pytest.raises(
            ValueError, match=r"DTensor has no placements for y as y\[\*, \('F', 'C'\), .*x\.to_local\(\)"
        ):
            m.Conv(mesh)(given)
        w = torch.distributed.tensor.distribute_tensor(
            torch.zeros(7, 5, 3, 3, dtype=torch.float64), mesh, [Shard(0), Shard(1)]
        )
        with pytest.raises(
            ValueError, match=r"DTensor has no placements for it: .*layer\.scatter\('w', w\.full_tensor\(\), mesh\)"
        ):
            m.conv(m.scatter("x", x, mesh), w, m.scatter("bias", torch.zeros(7), mesh), mesh=mesh)
        with pytest.raises(ValueError, match=r"this rank's block of w as .* got Held"):
            m.conv(m.scatter("x", x, mesh), m.Conv(mesh).bias, m.scatter("bias", torch.zeros(7), mesh), mesh=mesh)

    on_processes(program, 4)


@pytest.mark.parametrize(("parameters", "kind"), [("dtensors", "DTensor"), ("blocks", "Block")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_hooks(reentrant: bool, parameters: str, kind: str) -> None:
    case, whole = NARROW, single(NARROW)
    m = case.module
    x, dy = x_and_dy(case)
    truth = x.clone().requires_grad_()
    whole(truth).relu().backward(dy)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours, seen = m.Conv(mesh, parameters=parameters), []
        ours.register_forward_pre_hook(lambda *_: seen.append("before"))
        ours.register_forward_hook(lambda *_: seen.append("forward"))
        ours.register_full_backward_hook(lambda *_: seen.append("backward"))
        ours.weight.register_hook(lambda g: seen.append(type(g).__name__) or g * 2)
        ours.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        own = m.scatter("x", x, mesh).requires_grad_()
        y = checkpoint(lambda x: ours(x).relu(), own, use_reentrant=reentrant)
        y.backward(m.scatter("dy", dy, mesh))
        torch.testing.assert_close(m.gather("dx", own.grad, mesh), truth.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            m.gather("dw", ours.weight.grad, mesh), 2 * whole.weight.grad, rtol=1e-12, atol=1e-12
        )
        assert seen == ["before", "forward", "before", "forward", *seen[4:]]
        assert sorted(seen[4:]) == [kind, "accumulated", "backward"]

    on_processes(program, 4)
