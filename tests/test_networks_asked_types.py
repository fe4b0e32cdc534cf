"""Modules that ask values for their types, under torch.autocast: types and values are torch's, or it is refused."""

from __future__ import annotations

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

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.operations.typed import ByAutocast
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.graph_file import read_graph, write_graph
from convgen.spec.target import read_target
from convgen.verify.virtual import World

Forward = Callable[[nn.Module, Tensor], Any]


class Asks(nn.Module):
    """A convolution and what is made of it and x."""

    def __init__(self, then: Forward) -> None:
        super().__init__()
        self.a, self.b, self.then = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self, x)


def casts(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return x.to(y.dtype), y.to(x.dtype) * 3, y, (y > 0).to(y.dtype), x.type_as(y)


def made(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    k = torch.arange(y.shape[3], dtype=y.dtype) / 7
    z = torch.zeros_like(y)
    z[:, :2] = 1.7
    full = torch.full((4, 1, 1), 0.3, dtype=y.dtype) + torch.tensor([0.1, 0.2], dtype=y.dtype).sum()
    return y * k, z * y, x.new_ones(4, 1, 1) * y, y.new_full((4, 1, 1), 0.1) * y, full * x


def limits(m: Any, x: Tensor) -> Any:
    y, limit = m.a(x), torch.finfo(m.a(x).dtype)
    least = torch.full((4, 1, 1), limit.min, dtype=y.dtype)
    kept = y.masked_fill(y > 0, limit.min).softmax(1)
    return kept, y.clamp(min=limit.tiny), least, y + torch.tensor(limit.eps).to(y)


def casts_if_it_must(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    if y.dtype != x.dtype:
        y = y.to(x.dtype)
    z = m.b(y * 1.01)
    if z.dtype == torch.float32:
        z = z.to(torch.float32)
    return y, z + z.float().mean(1, keepdim=True)


def keeps_both(m: Any, x: Tensor) -> Any:
    """A value, and the same as float32, which tracing without autocast takes for one."""
    y = m.a(x)
    z = y.float()
    return y * 1.01, z * 1.01, m.b(y) + z.type_as(y)


def adds_in_place(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    y += x
    y.mul_(x)
    return y, m.b(y)


def in_regions(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    with torch.autocast("cpu", enabled=False):
        z = m.b(y.float()).to(y.dtype)
    return z, z * torch.ones_like(y)


RIGHT: dict[str, Forward] = {
    f.__name__: f for f in (casts, made, limits, casts_if_it_must, keeps_both, adds_in_place, in_regions)
}  # fmt: skip


def branches(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    if y.dtype == torch.bfloat16:
        y = y + 1
    return y


def switched(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return y * 2 if torch.is_autocast_enabled("cpu") else y


def settings(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return F.layer_norm(y, y.shape[3:], eps=1e-3 if y.dtype in (torch.bfloat16, torch.float16) else 1e-6)


def raises(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    if y.dtype != torch.float32:
        raise TypeError("float32 alone")
    return y


def regions_own(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu"):  # of the type around
        return m.a(x)


X = torch.randn(4, 4, 8, 6, generator=torch.Generator().manual_seed(2))
LOWS = (torch.bfloat16, torch.float16)


def module(then: Forward) -> nn.Module:
    torch.manual_seed(3)
    made = Asks(then)
    draw_parameters(made)
    return made


@cache
def graph_and_tensors(then: Forward) -> tuple[Graph, dict[str, Tensor]]:
    return graph_of(module(then), (X,), name="net")


def step(of: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    ys = tree_flatten(of(x))[0]
    smooth = [y for y in ys if y.requires_grad]
    torch.autograd.backward(smooth, [torch.ones_like(y) * 0.5 for y in smooth])
    return [y.detach() for y in ys], {n: p.grad for n, p in of.named_parameters() if p.grad is not None}


def on_rank(net: Any, then: Forward, dtype: torch.dtype | None, end: Any) -> Any:
    mesh = net.init_mesh("cpu", transport=end)
    graph, tensors = graph_and_tensors(then)
    of = net.Network(mesh)
    of.load_full(module(then).state_dict() | {n: t for n, t in tensors.items() if n in of._known})
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        ys = tree_flatten(of(net.scatter("x", X, mesh)))[0]
    whole = [net.gather(name, y, mesh) for (name, _), y in zip(graph.outputs, ys, strict=True)]
    smooth = [y for y in whole if y.requires_grad]
    torch.autograd.backward(smooth, [torch.ones_like(y) * 0.5 for y in smooth])
    return [y.detach() for y in whole], of.full_gradients()


def near(a: Tensor, b: Tensor, unit: float) -> bool:
    a, b = a.double(), b.double()
    there = b.isfinite() & (b.abs() < 1e4)
    return bool(torch.equal(a[~there], b[~there])) and float((a - b)[there].norm()) <= unit * float(b[there].norm())


@pytest.mark.parametrize("grid", [{"N": 1}, {"H": 2}], ids=str)
@pytest.mark.parametrize("kind", RIGHT)
def test_types_that_are_asked_are_torchs(kind: str, grid: dict[str, int]) -> None:
    """From one import: without autocast, and under it of both types."""
    then = RIGHT[kind]
    graph, _ = graph_and_tensors(then)
    assert graph.asks == (("bfloat16", ""), ("float16", ""))
    with package(compile_network(graph, Grid(tuple(grid.items()))).package().files) as net:
        for dtype in (None, *LOWS):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                ys, grads = step(module(then), X)
            unit = 4 * torch.finfo(dtype or torch.float32).eps
            for found, gradients in World(Grid(tuple(grid.items())).ranks).run(partial(on_rank, net, then, dtype)):
                assert [y.dtype for y in found] == [y.dtype for y in ys]
                assert all(near(a, b, unit) for a, b in zip(found, ys, strict=True))
                assert all(near(gradients[n], g, 8 * unit) for n, g in grads.items())


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("kind", RIGHT)
def test_a_program_for_autocast_has_the_types_that_are_asked(kind: str, low: torch.dtype) -> None:
    """Those of outputs, by which bytes, prices and memory go, are torch's."""
    name = str(low).removeprefix("torch.")
    program = compile_network(graph_and_tensors(RIGHT[kind])[0], Grid((("N", 2),)), autocast=name).program
    with torch.autocast("cpu", low):
        made = [str(y.dtype).removeprefix("torch.") for y in tree_flatten(module(RIGHT[kind])(X))[0]]
    assert [program.types[v] for _, v in program.outputs] == made


def test_what_is_refused_under_autocast_is_not_compiled_for_it() -> None:
    graph, _ = graph_and_tensors(branches)
    assert compile_network(graph, Grid((("N", 2),)), autocast="float16").program.autocast == "float16"
    with pytest.raises(InputError, match="net: not under autocast of bfloat16: the source asks for a type"):
        compile_network(graph, Grid((("N", 2),)), autocast="bfloat16")


@pytest.mark.parametrize("then", [branches, switched, settings, raises, regions_own], ids=lambda f: f.__name__)
def test_what_autocast_changes_otherwise_is_refused_under_it(then: Forward) -> None:
    """By name, with the line of the source; without autocast it runs."""
    graph, _ = graph_and_tensors(then)
    lows = [low for low in LOWS if dict(graph.asks)[str(low).removeprefix("torch.")]]
    assert lows == {"branches": [torch.bfloat16], "regions_own": [torch.float16]}.get(then.__name__, [*LOWS])
    with package(compile_network(graph, Grid((("N", 2),))).package().files) as net:
        ys, _ = step(module(then), X)
        for found, _ in World(2).run(partial(on_rank, net, then, None)):
            assert near(found[0], ys[0], 4 * torch.finfo(ys[0].dtype).eps)
        for low in lows:
            with pytest.raises(RuntimeError, match=f"net: not under autocast of {low}: the source asks for a type"):
                World(2).run(partial(on_rank, net, then, low))
    where = {"raises": "float32 alone", "regions_own": "computes otherwise"}  # the others: at a line
    assert all(where.get(then.__name__, "test_networks_asked_types.py:") in why for _, why in graph.asks if why)


def test_inputs_of_another_type_are_refused_where_types_are_asked() -> None:
    graph, _ = graph_and_tensors(casts)
    with package(compile_network(graph, Grid((("N", 1),))).package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            with torch.autocast("cpu", torch.bfloat16):
                net.Network(mesh)(net.scatter("x", X.bfloat16(), mesh))

        with pytest.raises(ValueError, match=r"x is torch\.float32, got torch\.bfloat16"):
            World(1).run(program)


def test_a_gpus_package_is_refused_where_its_autocast_is_another() -> None:
    """Types were those of a CPU, whose softmax keeps them."""
    for then, refused in ((casts, False), (limits, True)):
        files = compile_network(graph_and_tensors(then)[0], Grid((("N", 1),)), target=read_target("cuda:sm_90"))
        assert ("a GPU's takes" in files.package().files["network.py"]) == refused


def test_a_padding_that_a_convolution_takes_in_is_asked_for_nothing() -> None:
    def padded(m: Any, x: Tensor) -> Tensor:
        y = m.a(F.pad(x, (1, 1, 1, 1)))
        return F.normalize(y.float(), dim=1).type_as(y)

    graph, _ = graph_of(Asks(padded), (torch.randn(2, 4, 6, 6),), name="padded")
    one = compile_network(graph, Grid((("H", 2),)), target=read_target("cuda:sm_90"))
    assert graph.asks and "network.py" in one.package().files


@pytest.mark.parametrize("then", [casts, limits, branches], ids=lambda f: f.__name__)
def test_a_graphs_file_says_what_is_asked(then: Forward, tmp_path: Path) -> None:
    graph, _ = graph_and_tensors(then)
    (tmp_path / "net.yaml").write_text(write_graph(graph))
    again = read_graph(tmp_path / "net.yaml")
    assert again == graph
    asked = [a for call in again.calls for a in call.args if isinstance(a, ByAutocast)]
    assert bool(asked) == (then is not branches)


def test_who_asks_nothing_is_traced_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3))
    assert graph_of(plain, (X,), name="net")[0].asks == ()


class Depth(nn.Module):
    """Stochastic depth by noise like a value, which evaluation doesn't ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return x + (y * (torch.empty_like(y[:, :1, :1, :1]).bernoulli_(0.9) / 0.9) if self.training else y)


def test_a_source_that_asks_in_training_alone_has_both_modes() -> None:
    graph, _ = graph_of(Depth(), (X,), name="net")
    assert graph.modes == ("train", "eval") and graph.asks == (("bfloat16", ""), ("float16", ""))
