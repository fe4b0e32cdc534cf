"""Modules whose parameters have several types: on ranks all values have the types that torch gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import draw_parameters, package
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import convgen
from convgen import parallel
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.passes.bucket_gradients import BucketGradients
from convgen.spec.exported import graph_of
from convgen.verify.network import check_network, report_text
from convgen.verify.processes import spawn
from convgen.verify.virtual import World

GRIDS = ({}, {"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


class Norms(nn.Module):
    """Of bfloat16, with norms of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(6, 6)
        self.bfloat16()
        self.batch, self.group, self.layer, self.rms = (
            nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(6), nn.RMSNorm(6),
        )  # fmt: skip
        self.instance = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.batch(self.first(x)))
        y = self.second(self.group(x))
        return self.head(self.layer(y)), self.rms(y), self.instance(y), y.mean((2, 3)), F.max_pool2d(self.layer(y), 2)


class Scaled(nn.Module):
    """Of float32, with a number and a vector of float64, of which one decides the type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("shift", numbers(8, 1, 1, dtype=torch.float64))
        self.slope = nn.Parameter(numbers(8, 1, 1, dtype=torch.float16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.conv(x)) * self.scale
        z = y + self.shift
        return y, z, (y * self.slope).softmax(1), z.square().mean(), F.avg_pool2d(z, 2), F.layer_norm(z, (6,))


class Embedded(nn.Module):
    """A table of float16, and the rest of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8).half(), nn.Parameter(numbers(6, 8, dtype=torch.float16))
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.table(x) + self.places
        z = self.norm(y.float())
        z = z + self.attend(z, z, z, need_weights=False)[0]
        return y, z, z * y, F.cross_entropy(z.flatten(0, 1), x.flatten() % 8)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "norms": (Norms, lambda: numbers(4, 3, 6, 6, dtype=torch.bfloat16)),
    "scaled": (Scaled, lambda: numbers(4, 3, 6, 6, dtype=torch.float32)),
    "embedded": (Embedded, lambda: torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))),
}


def drawn(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, x = MODULES[name]
    module = make()
    draw_parameters(module)
    return module, x()


def types_of(model: nn.Module, x: Tensor, call: Callable[[Tensor], Any]) -> dict[str, torch.dtype]:
    """Of outputs, gradients, parameters and buffers, after a step of training."""
    x = x.clone()
    if x.is_floating_point():
        x.requires_grad_()
    made: list[Tensor] = tree_flatten(call(x))[0]
    sum(y.double().square().sum() for y in made).backward()  # type: ignore[union-attr]
    found = {f"output {k}": y.dtype for k, y in enumerate(made)} | ({} if x.grad is None else {"x": x.grad.dtype})
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found |= {name: p.dtype, f"gradient of {name}": p.grad.dtype}
    return found | {name: b.dtype for name, b in model.named_buffers()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_values_have_torchs_types_and_numbers(name: str, grid: dict[str, int]) -> None:
    module, x = drawn(name)
    graph, constants = graph_of(module, (x,), name="net")
    compiled = compile_network(graph, Grid(tuple((grid or {"N": 1}).items())))
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    report = check_network(compiled, state | constants)
    assert report.ok, report_text(report)
    expected = types_of(module, x, module)
    with package(compiled.package().files) as net:

        def program(end: Any) -> dict[str, torch.dtype]:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(state)
            full = model.full_state_dict()
            assert {n: t.dtype for n, t in full.items()} == {n: t.dtype for n, t in state.items()}
            assert all(torch.equal(full[n], t) for n, t in state.items())
            return types_of(model, net.scatter("x", x, mesh), model)

        for found in World(compiled.program.grid.ranks).run(program):
            assert found == expected


# ---------------------------------------------------------------- parallelize
@pytest.fixture
def a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parallel, "exported", cache(parallel.exported))  # torch exports in one thread at a time


def one_step(model: nn.Module, x: Tensor, **how: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-2, **how)  # 1e-8 is 0 in float16
    for _ in range(2):
        optimizer.zero_grad()
        made: list[Tensor] = tree_flatten(model(x))[0]
        sum(y.double().square().mean() for y in made).backward()  # type: ignore[union-attr]
        optimizer.step()


def far(found: Tensor, truth: Tensor, least: torch.dtype) -> float:
    """In round-offs of the coarser of two types, of the largest entry."""
    found, truth = found.detach(), truth.detach()
    unit = max(torch.finfo(kind).eps for kind in (truth.dtype, least))
    return float((found.double() - truth.double()).abs().max() / max(float(truth.abs().max()), 1e-3) / unit)


@pytest.mark.usefixtures("a_cache")
@pytest.mark.parametrize("name", ["norms", "scaled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_type_for_all_floats(name: str, dtype: torch.dtype) -> None:
    """As the module in that type; the module itself stays as it was."""
    module, example = drawn(name)
    before = {n: (t.dtype, t.clone()) for n, t in module.state_dict().items()}
    reference, x = copy.deepcopy(module).to(dtype), example.to(dtype)

    net = convgen.from_torch(module, (example,), "N=2", dtype=dtype)

    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model: Any = convgen.parallelize(module, (example,), mesh, None, dtype=dtype)
        state = model.full_state_dict()
        return model(x), state

    expected = reference(x)
    for made, state in World(2).run(program):
        for y, truth in zip(made, expected, strict=True):
            assert y.dtype == truth.dtype == dtype and far(y, truth, dtype) < 32
        for n, t in copy.deepcopy(module).to(dtype).state_dict().items():
            assert state[n].dtype == t.dtype and torch.equal(state[n], t)
    for n, t in module.state_dict().items():
        assert t.dtype == before[n][0] and torch.equal(t, before[n][1])
    with pytest.raises(InputError, match="dtype int8 is no type of floats"):
        convgen.from_torch(module, (example,), "N=2", dtype=torch.int8)


@pytest.mark.usefixtures("a_cache")
@pytest.mark.parametrize("kind", ["blocks", "dtensors"])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_optimizers_and_states_keep_types(kind: str, how: dict[str, bool]) -> None:
    """Parameters of several types beside the module's; then load_state_dict, full_state_dict and copies."""
    module, x = drawn("scaled")
    reference = copy.deepcopy(module)
    one_step(reference, x, **how)
    truth = reference.state_dict()

    net = convgen.from_torch(module, (x,), "N=2")

    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model: Any = convgen.parallelize(module, (x,), mesh, None, parameters=kind)
        one_step(model, x, **how)
        full = model.full_state_dict()
        copied = copy.deepcopy(model)  # in the middle of training, gradients in buckets among it
        assert all(torch.equal(t, full[n]) for n, t in copied.full_state_dict().items())
        grads = model.full_gradients()
        assert all(torch.equal(t, grads[n]) and t.dtype == grads[n].dtype for n, t in copied.full_gradients().items())
        other: Any = convgen.parallelize(module, (x,), mesh, None, parameters=kind)
        other.load_state_dict(model.state_dict())
        again: Any = convgen.parallelize(module, (x,), mesh, None, parameters=kind)
        again.load_full(full)
        return full, other.full_state_dict(), again.full_state_dict()

    for states in World(2).run(program):
        for state in states:
            assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in truth.items()}
            assert all(torch.equal(state[n], states[0][n]) for n in truth)
        for n, t in truth.items():
            assert not t.is_floating_point() or far(states[0][n], t, torch.float16) < 32, n


@pytest.mark.slow
@pytest.mark.usefixtures("a_cache")
def test_checkpoints_keep_types(tmp_path: Path) -> None:
    """torch.distributed.checkpoint of two processes, to other two of another grid."""
    module, x = drawn("scaled")
    given = (x,)
    convgen.from_torch(module, given, "N=2", "auto")

    def program(rank: int) -> dict[str, Tensor]:
        import torch.distributed.checkpoint as dcp

        models: list[Any] = [convgen.parallelize(module, given, {axis: 2}, "auto") for axis in "NH"]
        one_step(models[0], x)
        state = models[0].state_dict()
        dcp.save(state, checkpoint_id=str(tmp_path / "kept"))
        there = models[1].state_dict()
        dcp.load(there, checkpoint_id=str(tmp_path / "kept"))
        models[1].load_state_dict(there)
        first, second = (m.full_state_dict() for m in models)
        assert all(torch.equal(first[n], second[n]) for n in first)
        return second

    for state in spawn(program, 2):
        assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in module.state_dict().items()}


@pytest.mark.parametrize(("name", "types"), [("norms", 2), ("scaled", 3), ("embedded", 2)])
def test_a_bucket_has_one_type(name: str, types: int) -> None:
    """A bucket a type; the check above counts its bytes."""
    module, x = drawn(name)
    compiled = compile_network(graph_of(module, (x,), name="net")[0], Grid((("N", 2),)), passes=(BucketGradients(),))
    buckets = compiled.program.buckets
    assert len({b.dtype for b in buckets}) == len(buckets) == types


class Tokens(nn.Module):
    """Each token beside the next one, whose rows of another rank travel in the tokens' type."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, t: Tensor) -> Tensor:
        return self.table(torch.cat([t[:, 1:], t[:, :1]], 1))


def test_whole_numbers_are_of_one_type_on_all_ranks() -> None:
    module, tokens = Tokens(), torch.arange(16).reshape(2, 8)
    graph, _ = graph_of(module, (tokens,), name="tokens")

    def program(net: Any, end: Any) -> None:
        model = net.Network(net.init_mesh("cpu", transport=end))
        model.load_full(module.state_dict())
        for kinds in ((torch.int64, torch.int64), (torch.int32, torch.int32), (torch.int64, torch.int32)):
            block = net.scatter("t", tokens.to(kinds[end.rank]), model._mesh)
            if len({*kinds}) == 1:
                assert torch.equal(net.gather("output", model(block), model._mesh), module(tokens))
                continue
            with pytest.raises(RuntimeError, match=r"types of inputs: as compiled on ranks \[0\], t torch\.int32 on"):
                model(block)

    with package(compile_network(graph, Grid((("W", 2),))).package().files) as net:
        World(2).run(partial(program, net))
