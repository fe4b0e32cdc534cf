"""What a generated module promises besides right numbers: refusals, names, torch's rules, meshes, determinism."""

from __future__ import annotations

import ast
import gc
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from generate import algorithm_problem
from modules import Case, assert_counted, assert_true, draw, make, run, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.verify.program import global_tensors, load_module, reference
from convgen.verify.virtual import Deadlock, Mismatch, VirtualTransport, World

CONV = Conv(4, 6, 8, (Spatial("H", 7, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1)))
BIASED = Conv(CONV.batch, CONV.channels, CONV.filters, CONV.spatial, bias=True)


def named(name: str, algorithm: str, conv: Conv, grid: dict[str, int], **changes: Any) -> Case:
    """A case of a named algorithm; one name is one module, made once."""
    if name not in _cases:
        problem = algorithm_problem(algorithm, conv, Grid(tuple(grid.items())))
        _cases[name] = make(problem, name, random.Random(name), **{"memory_format": "contiguous", **changes})
    return _cases[name]


_cases: dict[str, Case] = {}


@dataclass
class Alone:
    """A transport without others: what comes from them is ones. Records its calls."""

    rank: int = 0
    size: int = 1
    calls: list[str] = field(default_factory=list)

    def _take(self, kind: str, tensor: Tensor, elements: int) -> Tensor:
        self.calls.append(kind)
        return tensor.new_ones(elements)

    def all_gather(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        return self._take("all_gather", tensor, sum(splits))

    def reduce_scatter(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        return self._take("reduce_scatter", tensor, splits[group.ranks.index(self.rank)])

    def all_reduce(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        return self._take("all_reduce", tensor, tensor.numel())

    def all_to_all(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        return self._take("all_to_all", tensor, sum(splits[1]))

    def exchange(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        return self._take("exchange", tensor, sum(splits[1]))


def blocks(case: Case, mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's blocks of random tensors."""
    given = global_tensors(case.layer)
    return {name: case.module.scatter(name, value, mesh) for name, value in given.items()}


# ---- Refusals ------------------------------------------------------------------------------------------------------

Call = Callable[[ModuleType, DeviceMesh, dict[str, Tensor]], Any]
REFUSALS: dict[str, tuple[Call, type[Exception], str]] = {
    "shape of x": (
        lambda m, mesh, t: m.conv(t["x"][:, :2], t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"on rank {'N': 0, 'C': 0}: x, this rank's block of x\[N, C, \*, \*\] \(4, 6, 7, 6\), "
        r"has shape \(2, 3, 7, 6\), got \(2, 2, 7, 6\)",
    ),
    "shape of w": (
        lambda m, mesh, t: m.conv(t["x"], t["w"][:5], t["bias"], mesh=mesh),
        ValueError,
        r"w, .* has shape \(8, 3, 3, 3\), got \(5, 3, 3, 3\)",
    ),
    "shape of bias": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], torch.zeros(8, dtype=torch.float64), mesh=mesh),
        ValueError,
        r"bias, .* has shape \(4,\), got \(8,\)",
    ),
    "dimensions": (
        lambda m, mesh, t: m.conv(t["x"][0], t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"x, .* has shape \(2, 3, 7, 6\), got \(3, 7, 6\)",
    ),
    "dtype of x": (
        lambda m, mesh, t: m.conv(t["x"].float(), t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"x, .* is torch.float64, got torch.float32",
    ),
    "dtype of w": (
        lambda m, mesh, t: m.conv(t["x"], t["w"].half(), t["bias"], mesh=mesh),
        ValueError,
        r"w, .* is torch.float64, got torch.float16",
    ),
    "device of x": (
        lambda m, mesh, t: m.conv(t["x"].to("meta"), t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"x, .* is on cpu, got meta",
    ),
    "device of everything": (
        lambda m, mesh, t: m.conv(t["x"].to("meta"), t["w"].to("meta"), t["bias"].to("meta"), mesh=mesh),
        ValueError,
        r"x, .* is on cpu, got meta",
    ),
    "memory format": (
        lambda m, mesh, t: m.conv(t["x"].to(memory_format=torch.channels_last), t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"x, .* is torch.contiguous_format, got strides \(126, 1, 18, 3\)",
    ),
    "strides": (
        lambda m, mesh, t: m.conv(t["x"].repeat(1, 1, 1, 2)[..., ::2], t["w"], t["bias"], mesh=mesh),
        ValueError,
        r"x, .* is torch.contiguous_format, got strides",
    ),
    "no bias": (lambda m, mesh, t: m.conv(t["x"], t["w"], mesh=mesh), ValueError, r"bias is missing"),
    "batch of none": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=mesh, batch=0),
        ValueError,
        r"batch= wants the global number of samples, got 0",
    ),
    "another batch": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=mesh, batch=6),
        ValueError,
        r"x, .*\(6, 6, 7, 6\), has shape \(3, 3, 7, 6\), got \(2, 3, 7, 6\)",
    ),
    "no mesh": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=None),
        TypeError,
        r"mesh= wants a DeviceMesh",
    ),
    "axes of the mesh": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=_mesh((2, 2), ("N", "H"))),
        ValueError,
        r"the mesh has axes {'N': 2, 'H': 2}, this layer's grid is {'N': 2, 'C': 2}",
    ),
    "sizes of the mesh": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=_mesh((4, 1), ("N", "C"))),
        ValueError,
        r"the mesh has axes {'N': 4, 'C': 1}, this layer's grid is {'N': 2, 'C': 2}",
    ),
    "mesh without names": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=_mesh((2, 2), None)),
        ValueError,
        r"the mesh has axes {}, this layer's grid is",
    ),
    "device of the mesh": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=_mesh((2, 2), ("N", "C"), "meta")),
        ValueError,
        r"this module is for cpu, the mesh for meta",
    ),
    "foreign mesh": (
        lambda m, mesh, t: m.conv(t["x"], t["w"], t["bias"], mesh=_mesh((2, 2), ("N", "C"), rank=3)),
        RuntimeError,
        r"init_process_group",
    ),
    "scatter of an unknown": (
        lambda m, mesh, t: m.scatter("z", t["x"], mesh),
        ValueError,
        r"no tensor 'z'; there are x, w",
    ),
    "scatter of a part": (
        lambda m, mesh, t: m.scatter("x", t["x"], mesh),
        ValueError,
        r"the whole x has shape \(4, 6, 7, 6\), got \(2, 3, 7, 6\)",
    ),
    "gather of a whole": (
        lambda m, mesh, t: m.gather("y", torch.zeros(4, 8, 7, 6, dtype=torch.float64), mesh),
        ValueError,
        r"y, .* has shape \(2, 4, 7, 6\), got \(4, 8, 7, 6\)",
    ),
    "load_full without bias": (
        lambda m, mesh, t: m.Conv(mesh).load_full(torch.zeros(8, 6, 3, 3)),
        TypeError,
        r"load_full wants weight and bias",
    ),
    "gradient of another shape": (
        lambda m, mesh, t: m.conv(t["x"], t["w"].requires_grad_(), t["bias"], mesh=mesh).backward(t["dy"][:1]),
        RuntimeError,
        r"[Mm]ismatch in shape",
    ),
    "gradient given to the op": (
        lambda m, mesh, t: torch.ops.convgen.refuser_backward(
            t["dy"].float(), t["x"], t["w"], m.mesh_key(mesh), 4, True, True, True
        ),
        ValueError,
        r"dy, .* is torch.float64, got torch.float32",
    ),
    "key of no mesh": (
        lambda m, mesh, t: torch.ops.convgen.refuser_forward(t["x"], t["w"], t["bias"], "nowhere", 4),
        RuntimeError,
        r"no mesh 'nowhere' in this process",
    ),
}


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None, device: str = "cpu", rank: int = 0) -> DeviceMesh:
    ranks = torch.arange(4).view(sizes)
    return DeviceMesh(device, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_before_anything_is_sent(what: str) -> None:
    case = named("refuser", "stationary-x", BIASED, {"N": 2, "C": 2})
    call, error, message = REFUSALS[what]
    gc.collect()  # meshes of earlier tests are not known any more
    transport = Alone(rank=0, size=4)
    mesh = case.module.init_mesh(transport=transport)
    local = blocks(case, mesh)
    before = [kind for kind in transport.calls if what == "gradient of another shape"]
    with pytest.raises(error, match=message) as caught:
        call(case.module, mesh, local)
    if what != "gradient of another shape":  # forward has run, and autograd itself refuses
        assert transport.calls == before
        assert case.layer.name in str(caught.value)


def test_bias_that_the_layer_does_not_have() -> None:
    case = named("unbiased", "sample", CONV, {"N": 2})
    mesh = case.module.init_mesh(transport=Alone(size=2))
    local = blocks(case, mesh)
    bias = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"unbiased: on rank .*the layer has no bias"):
        case.module.conv(local["x"], local["w"], bias, mesh=mesh)
    with pytest.raises(TypeError, match="load_full wants weight alone"):
        case.module.Conv(mesh).load_full(local["w"], bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": Alone(size=3)}, r"the grid {'N': 2, 'C': 2} has 4 ranks, but the world has 3, so name some"),
        ({"transport": Alone(size=8)}, r"has 4 ranks, but the world has 8"),
        ({"transport": Alone(size=8), "ranks": [1, 2, 3]}, r"ranks= names 3 of a world of 8: \(1, 2, 3\)"),
        ({"transport": Alone(size=8), "ranks": [1, 2, 3, 3]}, r"ranks= names 4 of a world of 8: \(1, 2, 3, 3\)"),
        ({"transport": Alone(size=4), "ranks": [1, 2, 3, 4]}, r"ranks= names 4 of a world of 4"),
        ({"transport": Alone(size=8, rank=7), "ranks": [1, 2, 3, 4]}, r"rank 7 is not on this mesh: \(1, 2, 3, 4\)"),
        ({}, r"init_process_group first"),
    ],
)
def test_meshes_that_cannot_be(options: dict[str, Any], message: str) -> None:
    case = named("refuser", "stationary-x", BIASED, {"N": 2, "C": 2})
    with pytest.raises((ValueError, RuntimeError), match=message):
        case.module.init_mesh(**options)


def test_meshes_of_a_transport_are_no_meshes_of_torch() -> None:
    """DTensor's caches would take the one for the other, for processes that are forked later too."""
    case = named("refuser", "stationary-x", BIASED, {"N": 2, "C": 2})
    ours = case.module.init_mesh(transport=Alone(size=4, rank=0))
    names = ours.mesh_dim_names
    torchs = DeviceMesh(ours.device_type, ours.mesh, mesh_dim_names=names, _init_backend=False, _rank=0)
    assert ours != torchs and hash(ours) != hash(torchs)
    assert ours == case.module.init_mesh(transport=Alone(size=4, rank=0))


# ---- One name, one module ------------------------------------------------------------------------------------------


def test_two_modules_of_one_name(tmp_path: Path) -> None:
    """Torch would let the second op replace the first; the same module twice is no harm."""
    case = named("namesake", "sample", CONV, {"N": 2})
    assert load_module(Path(case.module.__file__ or "")).NAME == "namesake"
    other = tmp_path / "namesake.py"
    other.write_text(case.source + "\n# edited\n", encoding="utf-8")
    with pytest.raises(ImportError, match="two modules define the op convgen::namesake") as caught:
        load_module(other)
    assert str(other) in str(caught.value)
    assert str(case.module.__file__) in str(caught.value)


def test_imports_neither_convgen_nor_anything_but_torch() -> None:
    for seed in range(10):
        tree = ast.parse(draw(seed).source)
        names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert names - set(sys.stdlib_module_names) == {"torch"}


def test_runs_where_convgen_is_not_installed(tmp_path: Path) -> None:
    case = named("stranger", "sample", BIASED, {"N": 1})
    (tmp_path / "stranger.py").write_text(case.source, encoding="utf-8")
    program = """
import sys
sys.modules["convgen"] = None  # any import of it fails
import torch, torch.distributed as dist
import stranger as layer
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = layer.init_mesh("cpu")
x = layer.scatter("x", torch.ones(4, 6, 7, 6), mesh).requires_grad_()
y = layer.Conv(mesh, seed=0)(x)
y.sum().backward()
print(tuple(layer.gather("y", y, mesh).shape), tuple(layer.gather("dx", x.grad, mesh).shape), layer.SPEC["name"])
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path / "store")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "(4, 8, 7, 6) (4, 6, 7, 6) stranger\n", done.stderr


# ---- Ranks that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caught", [True, False], ids=["caught there", "not caught"])
def test_a_rank_that_fails_takes_the_others_along(caught: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs; the others name the step that they wait in and the ranks that did not come."""
    monkeypatch.setenv("CONVGEN_AGREE", "0")
    case = named("failing", "stationary-x", CONV, {"N": 2, "C": 2})
    ends: dict[int, str] = {}

    def program(end: VirtualTransport) -> None:
        mesh = case.module.init_mesh(transport=end)
        local = blocks(case, mesh)
        if end.rank == 2:
            local["x"] = local["x"].float()
        try:
            case.module.conv(local["x"], local["w"], mesh=mesh)
        except Exception as error:
            ends[end.rank] = f"{type(error).__name__}: {error}"
            if not caught:
                raise

    error = Deadlock if caught else ValueError
    text = r"rank 3 waits in meet of ranks \(0, 1, 2, 3\) for \[2\]; ranks \[2\] have ended" if caught else r"float32"
    with pytest.raises(error, match=text):
        World(4).run(program)
    assert "failing: on rank {'N': 1, 'C': 0}: x, " in ends[2]
    assert "got torch.float32" in ends[2]
    assert re.match(r"RuntimeError: failing: conv, call 1: rank 3, in meet of .*", ends[3])
    assert re.search(text, ends[3])


def test_a_mistake_on_one_rank_is_told_to_all() -> None:
    """Every rank refuses with its own or another's mistake, and nothing is sent but the message of the call."""
    case = named("agreeing", "stationary-x", BIASED, {"N": 2, "C": 2})
    mistakes: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
        "is torch.float64, got torch.float32": lambda t: {**t, "x": t["x"].float()},
        "has shape": lambda t: {**t, "w": t["w"][:1]},
        "bias is missing": lambda t: {**t, "bias": None},
        "batch= wants": lambda t: {**t, "batch": 0},
    }

    def run_with(mistake: Callable[[dict[str, Tensor]], dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        def program(end: VirtualTransport) -> tuple[str, list[str]]:
            mesh = case.module.init_mesh(transport=end)
            local: dict[str, Any] = {**blocks(case, mesh), "batch": 4}
            if end.rank == 1:
                local = mistake(local)
            try:
                case.module.conv(local["x"], local["w"], local["bias"], mesh=mesh, batch=local["batch"])
            except ValueError as error:
                return str(error), [s.collective for s in end.sent]
            return "", [s.collective for s in end.sent]

        ran = World(4).run(program)
        return [text for text, _ in ran], [sent for _, sent in ran]

    texts, sent = run_with(lambda local: local)
    assert texts == [""] * 4
    assert sent == [["reduce_scatter"]] * 4
    for text, mistake in mistakes.items():
        texts, sent = run_with(mistake)
        assert text in texts[1]
        assert all("ranks [1] refused their arguments" in texts[r] for r in (0, 2, 3)), texts
        assert sent == [[]] * 4


def in_group(ranks: tuple[int, ...]) -> Any:
    """A group as a module makes it."""
    return named("refuser", "stationary-x", BIASED, {"N": 2, "C": 2}).module.Group(ranks, "ordered")


def test_virtual_ranks_report_who_waits_for_whom() -> None:
    def alone(end: VirtualTransport) -> None:
        if end.rank != 1:
            end.all_gather(torch.ones(2), [2, 2, 2], in_group((0, 1, 2)))

    with pytest.raises(Deadlock) as caught:
        World(3).run(alone)
    assert str(caught.value) == (
        "rank 0 waits in all_gather of ranks (0, 1, 2) for [1]; "
        "rank 2 waits in all_gather of ranks (0, 1, 2) for [1]; ranks [1] have ended"
    )

    def crossed(end: VirtualTransport) -> None:
        first, second = ((0, 1), (0, 1, 2)) if end.rank == 0 else ((0, 1, 2), (0, 1))
        end.all_gather(torch.ones(1), [1] * len(first), in_group(first))
        end.all_gather(torch.ones(1), [1] * len(second), in_group(second))

    with pytest.raises(
        (Deadlock, RuntimeError), match=r"rank 0 waits in all_gather of ranks \(0, 1\) for \[1\]; rank 1"
    ):
        World(3).run(crossed)


def test_virtual_ranks_report_what_does_not_match() -> None:
    def kinds(end: VirtualTransport) -> None:
        call = end.all_gather if end.rank else end.all_reduce
        call(torch.ones(2), [2, 2] if end.rank else [1, 1], in_group((0, 1)))

    with pytest.raises(
        Mismatch, match=r"ranks \(0, 1\) are in different collectives: {0: 'all_reduce', 1: 'all_gather'}"
    ):
        World(2).run(kinds)

    def sizes(end: VirtualTransport) -> None:
        end.all_gather(torch.ones(2 + end.rank), [2, 2], in_group((0, 1)))

    with pytest.raises(Mismatch, match=r"all_gather of ranks \(0, 1\): expects \[2, 2\], the others send \[2, 3\]"):
        World(2).run(sizes)

    def splits(end: VirtualTransport) -> None:
        sends = ([0, 2], [0, 1]) if end.rank == 0 else ([1, 0], [1, 0])
        end.exchange(torch.ones(sum(sends[0])), sends, in_group((0, 1)))

    with pytest.raises(Mismatch, match=r"exchange of ranks \(0, 1\): expects \[1, 0\], the others send \[2, 0\]"):
        World(2).run(splits)

    def types(end: VirtualTransport) -> None:
        end.all_reduce(torch.ones(2, dtype=(torch.float32, torch.bfloat16)[end.rank]), [1, 1], in_group((0, 1)))

    with pytest.raises(Mismatch, match=r"all_reduce of ranks \(0, 1\): they send torch\.bfloat16, torch\.float32"):
        World(2).run(types)


# ---- A torch citizen -----------------------------------------------------------------------------------------------

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("seed", range(8))
def test_opcheck(seed: int) -> None:
    assert_opchecks(draw(4000 + seed))


def assert_opchecks(case: Case) -> None:
    """Both ops follow torch's rules: schema, fake, autograd and tracing agree with what they do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # opcheck's own doing
        _assert_opchecks(case)


def _assert_opchecks(case: Case) -> None:
    layer = case.module
    mesh = layer.init_mesh(layer.DEVICE, transport=Alone(rank=0, size=case.layer.grid.ranks))
    local = blocks(case, mesh)
    batch, key = case.layer.conv.batch, layer.mesh_key(mesh)
    forward = getattr(torch.ops.convgen, f"{layer.NAME}_forward").default
    backward = getattr(torch.ops.convgen, f"{layer.NAME}_backward").default
    for wanted in (False, True):
        given = [local[n].clone().requires_grad_(wanted) if n in local else None for n in ("x", "w", "bias")]
        torch.library.opcheck(forward, (*given, key, batch), test_utils=OPCHECKS)
    with torch.no_grad():
        made = forward(local["x"], local["w"], local.get("bias"), key, batch)
    held = made[1:] if isinstance(made, tuple) else ()
    names = [a.name for a in backward._schema.arguments]
    values = {**local, **dict(zip(case.schedule.held(), held, strict=True))}
    for wanted in ((True, True, case.layer.conv.bias), (False, True, False), (True, False, False)):
        arguments = [values[n] for n in names[: names.index("mesh")]]
        torch.library.opcheck(backward, (*arguments, key, batch, *wanted), test_utils=OPCHECKS)


class Net(torch.nn.Module):
    """Two layers of a model with something between."""

    def __init__(self, layer: ModuleType, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first = layer.Conv(mesh, seed=1)
        self.second = layer.Conv(mesh, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x).square().sum()


SQUARE = Conv(
    2, 4, 4, (Spatial("H", 5, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1)), 1, True
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(backend: str, dynamic: bool) -> None:
    case = named("compiled", "stationary-y", SQUARE, {"N": 2, "F": 2})
    torch._dynamo.reset()
    mesh = case.module.init_mesh(transport=Alone(rank=0, size=4))
    net = Net(case.module, mesh)
    x = blocks(case, mesh)["x"]
    expected, expected_dx = gradients(net, net, x)
    got, got_dx = gradients(torch.compile(net, backend=backend, fullgraph=True, dynamic=dynamic), net, x)
    for a, b in zip((*expected, expected_dx), (*got, got_dx), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def gradients(call: Callable[[Tensor], Tensor], net: torch.nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    net.zero_grad()
    own = x.clone().requires_grad_()
    out = call(own)
    out.backward()
    assert own.grad is not None
    return [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)], own.grad


def test_compiled_function_takes_a_mesh_and_any_batch() -> None:
    case = named("compiled", "stationary-y", SQUARE, {"N": 2, "F": 2})
    torch._dynamo.reset()
    layer = case.module
    mesh = layer.init_mesh(transport=Alone(rank=0, size=4))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, w: Tensor, bias: Tensor, batch: int) -> Tensor:
        return layer.conv(x, w, bias, mesh=mesh, batch=batch) * 2

    given = global_tensors(case.layer)
    local = {name: layer.scatter(name, given[name], mesh) for name in ("w", "bias")}
    for batch in (2, 4, 6, 3):
        x = layer.scatter("x", torch.randn(batch, 4, 5, 6), mesh, batch=batch)
        y = layer.conv(x, local["w"], local["bias"], mesh=mesh, batch=batch)
        assert torch.equal(step(x, local["w"], local["bias"], batch), y * 2)


def test_compiled_on_virtual_ranks() -> None:
    """Each rank's compiled code stays its own."""
    case = named("compiled", "stationary-y", SQUARE, {"N": 2, "F": 2})
    torch._dynamo.reset()
    given = global_tensors(case.layer)

    def program(end: VirtualTransport) -> bool:
        mesh = case.module.init_mesh(transport=end)
        net = Net(case.module, mesh)
        x = case.module.scatter("x", given["x"], mesh)
        expected, expected_dx = gradients(net, net, x)
        got, got_dx = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), net, x)
        pairs = zip((*expected, expected_dx), (*got, got_dx), strict=True)
        return all(torch.allclose(*(getattr(t, "_local_tensor", t) for t in pair)) for pair in pairs)

    assert World(4).run(program) == [True] * 4


def test_module_is_torchs_layer_cut_into_blocks() -> None:
    """weight and bias are blocks of torch's default initialisation of the global layer; only the seed decides."""
    conv = Conv(4, 6, 9, CONV.spatial, groups=3, bias=True)
    for dtype in ("float64", "bfloat16"):
        case = named(f"initial_{dtype}", "stationary-w", conv, {"F": 2, "G": 2, "C": 2}, dtype=dtype)
        layer = case.module
        torch.manual_seed(7)
        whole_layer = torch.nn.Conv2d(6, 9, 3, padding=1, groups=3, dtype=case.dtype)

        def program(end: VirtualTransport, layer: ModuleType = layer) -> tuple[Tensor, ...]:
            mesh = layer.init_mesh(transport=end)
            module = layer.Conv(mesh, seed=7)
            other = layer.Conv(mesh, seed=8)
            assert not module.weight.to_local().numel() or not torch.equal(module.weight, other.weight)
            return layer.gather("w", module.weight, mesh), layer.gather("bias", module.bias, mesh)

        before = torch.random.get_rng_state()
        for weight, bias in World(8).run(program):
            assert torch.equal(weight, whole_layer.weight)
            assert torch.equal(bias, whole_layer.bias)
        assert torch.equal(before, torch.random.get_rng_state())


def test_state_dict_holds_blocks_and_load_full_scatters() -> None:
    case = named("stateful", "stationary-y", BIASED, {"N": 2, "F": 2})
    layer, given = case.module, global_tensors(case.layer)

    def program(end: VirtualTransport) -> bool:
        mesh = layer.init_mesh(transport=end)
        module, other = layer.Conv(mesh, seed=1), layer.Conv(mesh, seed=2)
        module.load_full(given["w"], given["bias"])
        assert torch.equal(module.weight.to_local(), layer.scatter("w", given["w"], mesh))
        assert torch.equal(module.bias.to_local(), layer.scatter("bias", given["bias"], mesh))
        state = module.state_dict()
        assert {name: tuple(t.shape) for name, t in state.items()} == {"weight": (8, 6, 3, 3), "bias": (8,)}
        assert {name: tuple(t.to_local().shape) for name, t in state.items()} == {"weight": (4, 6, 3, 3), "bias": (4,)}
        other.load_state_dict(state)
        x = layer.scatter("x", given["x"], mesh)
        return torch.equal(other(x), module(x)) and "grid(N=2, F=2)" in repr(module)

    assert World(4).run(program) == [True] * 4


def test_trains() -> None:
    """A step of SGD on blocks is a step of SGD on the whole layer."""
    case = named("trained", "stationary-w", BIASED, {"N": 2, "C": 2, "F": 2})
    layer, given = case.module, global_tensors(case.layer)
    torch.manual_seed(0)
    single = torch.nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        single(given["x"]).square().mean().backward()
        optimizer.step()

    def program(end: VirtualTransport) -> tuple[Tensor, Tensor]:
        mesh = layer.init_mesh(transport=end)
        module = layer.Conv(mesh, seed=0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = layer.scatter("x", given["x"], mesh)
        elements = given["dy"].numel()
        for _ in range(3):
            optimizer.zero_grad()
            (module(x).square().sum() / elements).backward()
            optimizer.step()
        return layer.gather("w", module.weight, mesh), layer.gather("bias", module.bias, mesh)

    for weight, bias in World(8).run(program):
        torch.testing.assert_close(weight, single.weight.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(bias, single.bias.detach(), rtol=1e-12, atol=1e-13)


# ---- Meshes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1, 0, 2), (5, 2, 6, 1), (2, 3, 4, 5)])
def test_any_ranks_in_any_order(ranks: tuple[int, ...]) -> None:
    """The mesh need not start at rank 0, nor hold all ranks, nor in their order."""
    case = named("placed", "stationary-w", BIASED, {"C": 2, "F": 2})
    layer, given = case.module, global_tensors(case.layer)
    truth = reference(case.layer.conv, given)

    def program(end: VirtualTransport) -> dict[str, Tensor] | None:
        if end.rank not in ranks:
            return None
        mesh = layer.init_mesh(transport=end, ranks=ranks)
        local = blocks(case, mesh)
        x, w = local["x"].requires_grad_(), local["w"].requires_grad_()
        y = layer.conv(x, w, local["bias"], mesh=mesh)
        y.backward(local["dy"])
        place = layer.coordinates(layer.LAYER, ranks.index(end.rank))
        assert torch.equal(layer.scatter("w", given["w"], mesh), w.detach())
        assert place == {"C": ranks.index(end.rank) // 2, "F": ranks.index(end.rank) % 2}
        return {"y": layer.gather("y", y, mesh), "dx": layer.gather("dx", x.grad, mesh)}

    for rank, got in enumerate(World(8).run(program)):
        assert (got is None) == (rank not in ranks)
        for name, value in (got or {}).items():
            torch.testing.assert_close(value, truth[name], rtol=1e-12, atol=1e-12)


def test_grids_that_name_the_axes_in_another_order_share_a_mesh() -> None:
    """A mesh has its axes in one order; each module finds itself on it by name, so that their blocks fit."""
    straight = named("axes_straight", "stationary-w", CONV, {"C": 2, "F": 3})
    turned = named("axes_turned", "stationary-w", CONV, {"F": 3, "C": 2})
    given = global_tensors(straight.layer)
    truth = reference(CONV, given)

    def program(end: VirtualTransport) -> list[Tensor]:
        results: list[Tensor] = []
        mesh = straight.module.init_mesh(transport=end)
        mine = [layer.scatter("w", given["w"], mesh) for layer in (straight.module, turned.module)]
        c, f = mesh.get_coordinate() or (-1, -1)
        assert torch.equal(mine[0], given["w"].tensor_split([3, 6])[f][:, 3 * c : 3 * c + 3])
        assert torch.equal(mine[0], mine[1])
        for layer in (straight.module, turned.module, straight.module):
            x = layer.scatter("x", given["x"], mesh)
            results.append(layer.gather("y", layer.conv(x, mine[0], mesh=mesh), mesh))
        return results

    for results in World(6).run(program):
        for y in results:
            torch.testing.assert_close(y, truth["y"], rtol=1e-12, atol=1e-12)


def test_gather_and_scatter_undo_each_other() -> None:
    for seed in range(30):
        case = draw(5000 + seed)
        layer, given = case.module, global_tensors(case.layer)

        def program(
            end: VirtualTransport, layer: ModuleType = layer, given: dict[str, Tensor] = given
        ) -> dict[str, Tensor]:
            mesh = layer.init_mesh(transport=end)
            return {name: layer.gather(name, layer.scatter(name, value, mesh), mesh) for name, value in given.items()}

        for got in World(case.layer.grid.ranks).run(program):
            for name, value in got.items():
                assert torch.equal(value, given[name]), f"{name} of\n{case}"


def test_scatter_makes_memory_of_its_own() -> None:
    """An update of a block in place leaves the global tensor alone."""
    case = named("owner", "sample", CONV, {"N": 1})
    mesh = case.module.init_mesh(transport=Alone())
    given = global_tensors(case.layer)
    for name, value in given.items():
        before = value.clone()
        case.module.scatter(name, value, mesh).zero_()
        assert torch.equal(value, before)


# ---- What it says of itself ----------------------------------------------------------------------------------------


def test_spec_schedule_and_volume() -> None:
    case = named("refuser", "stationary-x", BIASED, {"N": 2, "C": 2})
    layer = case.module
    assert layer.SPEC["name"] == "refuser"
    assert layer.SPEC["grid"] == {"N": 2, "C": 2}
    assert case.volume() == layer.VOLUME
    steps = [step["step"] for phase in layer.VOLUME.values() for step in phase]
    assert all(f"%{step} = " in layer.SCHEDULE for step in steps)
    given = global_tensors(case.layer)
    ran = run(case, given)
    assert_true(case, ran, reference(case.layer.conv, given))
    assert_counted(case, ran)
    assert whole(case, ran, "y").shape == (4, 8, 7, 6)
