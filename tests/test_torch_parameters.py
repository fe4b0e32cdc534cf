"""Parameters as torch's tools see them, on real processes: state dicts, checkpoints, norms, optimizers, copies."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from modules import Case
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import EVEN, GROUPED, RAGGED, backward_ours, backward_whole, layer, on_processes, single

from convgen.algebra.conv import Conv
from convgen.verify.virtual import VirtualTransport, World

KINDS = {
    "dtensors": (("stationary-w", "F2 C2", EVEN), "dtensors"),
    "blocks": (("stationary-w", "F2 C2", EVEN), "blocks"),
    "mixed": (("stationary-w", "C2 F2", EVEN), "dtensors"),  # a bias's axes nest out of the mesh's order
    "ragged": (("stationary-w", "C2 F2", RAGGED), "dtensors"),
    "grouped": (("stationary-w", "G2 F2", GROUPED), "dtensors"),
    "copies": (("stationary-y", "N2 F2", EVEN), "dtensors"),
    "copied blocks": (("stationary-y", "N2 F2", EVEN), "blocks"),
}


def case_of(kind: str) -> tuple[Case, str]:
    (algorithm, grid, conv), parameters = KINDS[kind]
    return layer(algorithm, grid, conv), parameters


def is_whole(module: Any) -> bool:
    """Whether all parameters are DTensors."""
    return all(type(p.data) is DTensor for p in module.parameters())


def groups_by_kind(module: Any) -> list[dict[str, Any]]:
    """Parameter groups that an optimizer's foreach and fused steps can take: no DTensor beside a Block."""
    kinds: dict[type, list[Tensor]] = {}
    for p in module.parameters():
        kinds.setdefault(type(p.data), []).append(p)
    return [{"params": ps} for ps in kinds.values()]


def assert_equal(
    module: Any, ours: torch.nn.Module, theirs: torch.nn.Module, mesh: Any, tolerance: float = 1e-12
) -> None:
    """The whole weight and bias are those of one device's layer."""
    for name, tensor in (("w", "weight"), ("bias", "bias")):
        whole = module.gather(name, getattr(ours, tensor), mesh)
        torch.testing.assert_close(whole, getattr(theirs, tensor).detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_gradients_know_their_place(kind: str) -> None:
    case, parameters = case_of(kind)
    m = case.module
    blocks = "blocks" in kind or kind in ("ragged", "grouped")
    expected_types = {
        "weight": m.Block if blocks else DTensor,
        "bias": m.Block if blocks or kind == "mixed" else DTensor,
    }
    whole = single(case)
    backward_whole(whole, case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=parameters)
        backward_ours(ours, case, mesh)
        assert {n: tuple(p.shape) for n, p in ours.named_parameters()}.keys() == {"weight", "bias"}
        for name, tensor in (("weight", "w"), ("bias", "bias")):
            p, expected = getattr(ours, name), expected_types[name]
            assert isinstance(p, torch.nn.Parameter)
            assert type(p.data) is type(p.grad) is expected
            own = m.scatter(tensor, getattr(whole, name).detach(), mesh)
            assert torch.equal(p.to_local().detach(), own)
            gradient = m.scatter(tensor, getattr(whole, name).grad, mesh)
            torch.testing.assert_close(p.grad.to_local(), gradient, rtol=1e-12, atol=1e-12)
            if expected is DTensor:
                assert p.device_mesh == mesh
                assert p.shape == getattr(whole, name).shape
                assert p.stride() == getattr(whole, name).stride()
                assert p.grad.placements == p.placements
                assert torch.equal(p.full_tensor(), getattr(whole, name))
            else:
                assert p.shape == own.shape
                assert p.size() == p.grad.size() == own.shape
                assert p.held.whole == tuple(getattr(whole, name).shape)

    on_processes(program, 4)


def test_placements_are_shards_and_copies_on_the_whole_mesh() -> None:
    stationary_w, stationary_y = (
        layer("stationary-w", "F2 C2", EVEN).module,
        layer("stationary-y", "N2 F2", EVEN).module,
    )

    def program(rank: int) -> list[Any]:
        meshes = [m.init_mesh("cpu") for m in (stationary_w, stationary_y)]
        layers = [m.Conv(mesh) for m, mesh in zip((stationary_w, stationary_y), meshes, strict=True)]
        return [(p.weight.placements, p.bias.placements) for p in layers]

    for ran in on_processes(program, 4):
        assert ran[0] == ((Shard(0), Shard(1)), (Shard(0), Shard(0)))
        assert ran[1] == ((Replicate(), Shard(0)), (Replicate(), Shard(0)))


# ---- Checkpoints ---------------------------------------------------------------------------------------------------


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, backward: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(module)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_between_ranks_and_one_device(kind: str, tmp_path: Path) -> None:
    """4 ranks store parameters and AdamW's state; 4 ranks, 2 ranks and one device's nn.Conv2d read them, and back."""
    case, parameters = case_of(kind)
    two = layer("sample", "N2", GROUPED) if kind == "grouped" else layer("stationary-x", "C2", case.layer.conv)
    m = case.module
    whole = single(case)
    train(whole, torch.optim.AdamW(whole.parameters(), lr=0.1), lambda w: backward_whole(w, case))

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=parameters)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
        train(ours, optimizer, lambda o: backward_ours(o, case, mesh))
        assert_equal(m, ours, whole, mesh)
        state = {"model": get_model_state_dict(ours), "optimizer": get_optimizer_state_dict(ours, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / "four")
        again = m.Conv(mesh, seed=5, parameters=parameters)
        other = torch.optim.AdamW(again.parameters(), lr=0.1)
        state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, other)}
        dcp.load(state, checkpoint_id=tmp_path / "four")
        set_model_state_dict(again, state["model"])
        set_optimizer_state_dict(again, other, state["optimizer"])
        assert_equal(m, again, whole, mesh)
        for o in (optimizer, other):
            train(again if o is other else ours, o, lambda c: backward_ours(c, case, mesh), 1)
        assert all(
            torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours.parameters(), again.parameters(), strict=True)
        )

    on_processes(program, 4)

    def on_two(rank: int) -> None:
        mesh = two.module.init_mesh("cpu")
        ours = two.module.Conv(mesh, seed=3)
        dcp.load({"model": ours.state_dict()}, checkpoint_id=tmp_path / "four")
        assert_equal(two.module, ours, whole, mesh)

    on_processes(on_two, 2)

    def alone(rank: int) -> None:
        ordinary = single(case, seed=9)
        dcp.load({"model": ordinary.state_dict()}, checkpoint_id=tmp_path / "four")
        assert all(
            torch.allclose(a, b, rtol=1e-12, atol=0)
            for a, b in zip(ordinary.parameters(), whole.parameters(), strict=True)
        )
        dcp.save({"model": ordinary.state_dict()}, checkpoint_id=tmp_path / "one")

    on_processes(alone, 1)

    def back(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, seed=7, parameters=parameters)
        dcp.load({"model": ours.state_dict()}, checkpoint_id=tmp_path / "one")
        assert_equal(m, ours, whole, mesh)

    on_processes(back, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_state_dict_is_whole_or_refused(kind: str) -> None:
    case, parameters = case_of(kind)
    m, whole = case.module, single(case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = torch.nn.Sequential(m.Conv(mesh, parameters=parameters))
        for cpu in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu)
            if is_whole(ours):
                state = get_model_state_dict(ours, options=options)
                if not cpu or rank == 0:
                    assert torch.equal(state["0.weight"], whole.weight)
                    assert torch.equal(state["0.bias"], whole.bias)
            else:
                with pytest.raises(RuntimeError, match="full_state_dict=True would give this rank's block"):
                    get_model_state_dict(ours, options=options)
        assert set(get_model_state_dict(ours)) == {"0.weight", "0.bias"}

    on_processes(program, 4)


def test_plain_state_dicts_and_files_of_a_rank() -> None:
    """state_dict, load_state_dict and torch.save hold what the rank holds, and say so."""
    for kind in ("dtensors", "blocks"):
        case, parameters = case_of(kind)
        m = case.module

        def program(rank: int, m: Any = m, parameters: str = parameters) -> None:
            mesh = m.init_mesh("cpu")
            ours, other = (m.Conv(mesh, seed=s, parameters=parameters) for s in (0, 1))
            file = io.BytesIO()
            torch.save(ours.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file))
            for a, b in zip(ours.parameters(), other.parameters(), strict=True):
                assert type(a.data) is type(b.data)
                assert torch.equal(a.to_local(), b.to_local())
            for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
                backward_ours(made, case_of("dtensors")[0], mesh)
                assert made.weight.grad is not None
                assert ours.weight.grad is None
                assert torch.equal(made.weight.to_local(), ours.weight.to_local())

        on_processes(program, 4)


# ---- Norms, optimizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.5])
def test_clipping_any_mix_of_parameters(norm_type: float) -> None:
    """DTensors on two meshes, Blocks, ordinary parameters in one call: the norm of one device, and its gradients."""
    cases = [case_of(kind) for kind in ("dtensors", "blocks", "ragged", "copies")]
    wholes = [single(case, i) for i, (case, _) in enumerate(cases)]
    torch.manual_seed(4)
    extra = torch.nn.Linear(3, 5, dtype=torch.float64)
    for (case, _), whole in zip(cases, wholes, strict=True):
        backward_whole(whole, case)
    extra(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    parameters = [p for m in (*wholes, extra) for p in m.parameters()]
    before = [p.grad.clone() for p in parameters]
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type)

    def program(rank: int) -> None:
        meshes = [case.module.init_mesh("cpu") for case, _ in cases]
        ours = [
            c.module.Conv(mesh, seed=i, parameters=p)
            for i, ((c, p), mesh) in enumerate(zip(cases, meshes, strict=True))
        ]
        for (case, _), one, mesh in zip(cases, ours, meshes, strict=True):
            backward_ours(one, case, mesh)
        plain = torch.nn.Linear(3, 5, dtype=torch.float64)
        plain.weight.grad, plain.bias.grad = (g.clone() for g in before[-2:])
        mine = [p for m in (*ours, plain) for p in m.parameters()]
        norm = cases[0][0].module.clip_grad_norm_(mine, 0.5, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for (case, _), one, whole, mesh in zip(cases, ours, wholes, meshes, strict=True):
            for name, tensor in (("dw", "weight"), ("dbias", "bias")):
                got = case.module.gather(name, getattr(one, tensor).grad, mesh)
                torch.testing.assert_close(got, getattr(whole, tensor).grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(plain.weight.grad, extra.weight.grad, rtol=1e-12, atol=1e-12)

    on_processes(program, 4)


# Of a Block: what would take a part for the whole, or draw what copies don't.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "variance": lambda b: b.var(),
    "norms of rows": lambda b: b.norm(dim=0, keepdim=True) if b.dim() > 1 else b.cumsum(0),
    "largest and where": lambda b: b.max(0),
    "where": lambda b: b.argmax(),
    "foreach": lambda b: torch._foreach_max([b.detach()]),
    "uniform_": torch.nn.init.uniform_,
    "normal_": lambda b: b.data.normal_(),
    "dropout": torch.nn.functional.dropout,
    "randn_like": torch.randn_like,
    "product": lambda b: b.flatten() @ b.flatten(),
    "part": lambda b: b[:1].sum(),
    "softmax": lambda b: torch.softmax(b, 0),
    "cumsum": lambda b: b.cumsum(0),
    "vector": lambda b: torch.nn.utils.parameters_to_vector([b, b]).norm(),
}


def other_place(held: Any) -> Any:
    """The same extents, one filter further on."""
    (lo, hi), *rest = held.box
    return held._replace(box=((lo + 1, hi + 1), *rest))


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_norms_are_right_and_what_takes_parts_is_refused(kind: str) -> None:
    case, parameters = case_of(kind)
    m, whole = case.module, single(case)
    backward_whole(whole, case)
    norms = [torch.linalg.vector_norm(t) for p in whole.parameters() for t in (p.detach(), p.grad)]
    total = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)

    def program(rank: int) -> list[str]:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=parameters)
        backward_ours(ours, case, mesh)
        if is_whole(ours):
            for t, e in zip([t for p in ours.parameters() for t in (p, p.grad)], norms, strict=True):
                torch.testing.assert_close(torch.linalg.vector_norm(t).full_tensor().detach(), e, rtol=1e-12, atol=0)
            got = torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
            torch.testing.assert_close(got.full_tensor(), total, rtol=1e-12, atol=0)
            assert abs(got.item() / total.item() - 1) <= 1e-12  # torch alone gives each rank's part
            assert abs(float(ours.weight.detach().norm()) / norms[0].item() - 1) <= 1e-12
            return []
        accepted: list[str] = []
        for block in (ours.bias, ours.bias.grad) if ours.bias.to_local().numel() else ():
            for what, call in REFUSED.items():
                try:
                    call(block)
                    accepted.append(what)
                except RuntimeError as error:
                    assert re.match(r"tools_.* (weight|bias): .* this rank holds .* of \(", str(error)), what
        if kind == "blocks":
            elsewhere = m.rebuild_block(
                ours.weight.to_local().detach(), other_place(ours.weight.held), frozenset(), False, False
            )
            for call in (
                lambda: ours.weight.data.copy_(elsewhere),
                lambda: ours.weight + elsewhere,
                lambda: torch._foreach_add_([ours.weight.data], [elsewhere]),
                lambda: ours.load_state_dict({"weight": elsewhere, "bias": ours.bias}),
            ):
                with pytest.raises(RuntimeError, match="would mix blocks of different places"):
                    call()
        if kind != "mixed":
            with pytest.raises(RuntimeError, match="would mix blocks of different places"):
                ours.weight + ours.bias.view(-1, 1, 1, 1)
            with pytest.raises(RuntimeError, match="would take blocks for whole tensors"):
                torch.nn.functional.conv2d(torch.ones(1, ours.weight.shape[1], 5, 5, dtype=torch.float64), ours.weight)
        return accepted

    assert on_processes(program, 4) == [[]] * 4


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_and_averages(kind: str) -> None:
    """Steps of torch's optimizers, and exponential averages of the weights, are those of one device."""
    case, parameters = case_of(kind)
    m = case.module
    ema = torch.optim.swa_utils
    truths = {}
    for name, make in OPTIMIZERS.items():
        whole = single(case)
        optimizer = make(whole.parameters())
        average = ema.AveragedModel(whole, multi_avg_fn=ema.get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            train(whole, optimizer, lambda w: backward_whole(w, case), 1)
            average.update_parameters(whole)
        truths[name] = whole, average.module

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        for name, make in OPTIMIZERS.items():
            ours = m.Conv(mesh, parameters=parameters)
            if name == "sgd fused" and type(ours.weight.data) is DTensor:
                continue  # torch has no such step for DTensors, and says so
            optimizer = make(groups_by_kind(ours))
            how = (
                {"avg_fn": ema.get_ema_avg_fn(0.9)}
                if kind == "mixed"
                else {"multi_avg_fn": ema.get_ema_multi_avg_fn(0.9)}
            )
            average = ema.AveragedModel(ours, **how)
            for _ in range(3):
                train(ours, optimizer, lambda o: backward_ours(o, case, mesh), 1)
                average.update_parameters(ours)
            assert_equal(m, ours, truths[name][0], mesh, 1e-11)
            assert_equal(m, average.module, truths[name][1], mesh, 1e-11)

    on_processes(program, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_lamb_like_steps(kind: str) -> None:
    """A step scaled by the ratio of norms of a parameter and its gradient, which are whole."""
    case, parameters = case_of(kind)
    m, whole = case.module, single(case)
    backward_whole(whole, case)
    with torch.no_grad():
        for p in whole.parameters():
            p.sub_(p.grad * (0.01 * p.norm() / p.grad.norm()))

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=parameters)
        backward_ours(ours, case, mesh)
        with torch.no_grad():
            for p in (ours.weight, ours.bias):
                p.sub_(p.grad * (0.01 * p.norm() / p.grad.norm()))
        assert_equal(m, ours, whole, mesh)

    on_processes(program, 4)


@pytest.mark.parametrize("kind", ["dtensors", "blocks"])
def test_a_weight_penalty(kind: str) -> None:
    """As torch has it, or from the gathered weight, whose gradient is the rank's part."""
    case, parameters = case_of(kind)
    m, whole = case.module, single(case)
    backward_whole(whole, case)
    (0.1 * whole.weight.square().sum()).backward()

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours = m.Conv(mesh, parameters=parameters)
        backward_ours(ours, case, mesh)
        (0.1 * m.gather("w", ours.weight, mesh).square().sum()).backward()
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), whole.weight.grad, rtol=1e-12, atol=1e-12)
        ours.zero_grad()
        backward_ours(ours, case, mesh)
        penalty = 0.1 * ours.weight.square().sum()
        (penalty.full_tensor() if kind == "dtensors" else penalty).backward()
        torch.testing.assert_close(m.gather("dw", ours.weight.grad, mesh), whole.weight.grad, rtol=1e-12, atol=1e-12)

    on_processes(program, 4)


def test_meta_device_and_initialisation() -> None:
    """Under torch.device("meta") nothing is drawn; reset_parameters draws what the constructor would have."""
    cases = [case_of(kind) for kind in KINDS]

    def program(rank: int) -> None:
        for case, parameters in cases:
            m = case.module
            mesh = m.init_mesh("cpu")
            with torch.device("meta"):
                ours = m.Conv(mesh, parameters=parameters)
            assert {p.device.type for p in ours.parameters()} == {"meta"}
            kinds = [type(p.data) for p in ours.parameters()]
            ours.to_empty(device="cpu")
            ours.reset_parameters(seed=3)
            assert [type(p.data) for p in ours.parameters()] == kinds
            assert_equal(m, ours, single(case, 3), mesh, 0.0)
            backward_ours(ours, case, mesh)
            train(ours, torch.optim.AdamW(ours.parameters()), lambda o, c=case, m=mesh: backward_ours(o, c, m), 1)

    on_processes(program, 4)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and made.device.type != "meta":
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_large_layer_is_drawn_without_holding_it(dtype: str) -> None:
    """Two million weights, a million at a time: the numbers that torch draws at once."""
    conv = Conv(1, 300, 700, (EVEN.spatial[0], EVEN.spatial[1]), bias=True)
    case = layer("stationary-x", "C4", conv, dtype=dtype)
    whole = single(case, 3)

    def program(end: VirtualTransport) -> None:
        mesh = case.module.init_mesh(transport=end)
        with Largest() as largest:
            ours = case.module.Conv(mesh, seed=3)
        assert largest.elements <= 2**20 < whole.weight.numel()
        assert torch.equal(ours.weight.to_local(), case.module.scatter("w", whole.weight.detach(), mesh))
        assert torch.equal(ours.bias.to_local(), case.module.scatter("bias", whole.bias.detach(), mesh))

    World(4).run(program)
