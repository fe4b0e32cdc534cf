"""Networks under torch.autocast: types of outputs and gradients are torch's, and nothing is further from float64."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from free_networks import free_network, imported
from networks_on_ranks import draw_parameters, package
from operation_cases import a_grid
from sampling import cases_of
from test_networks_free import a_network
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.operations.calls import Slot
from convgen.packages import kernel_modules
from convgen.spec.autocast import SURE, asked
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.target import read_target
from convgen.verify.interpreter import launch
from convgen.verify.virtual import World


class Residual(nn.Module):
    """Convolutions, batch norms, a sum, pooling, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.c, self.d = nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.b(self.a(x))), 3, 2, 1)
        x = F.relu(x + self.d(self.c(x)))
        return self.head(x.mean((2, 3)))


class Decoder(nn.Module):
    """Transposed convolutions, group norms, SiLU, upsampling, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.up, self.c = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(F.silu(self.n(self.a(x))), 2)
        y = torch.cat([self.up(y), F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")], 1)
        return self.c(y)


class Next(nn.Module):
    """Layer norms of channels that lie last, GELU, a scale of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(4, 8, 7, padding=3, groups=4), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.scale * self.down(F.gelu(self.up(self.n(x.permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2)


class Attends(nn.Module):
    """Attention over pixels, written out and by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        q, k, v = self.qkv(self.n(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y + torch.softmax(q @ k.transpose(1, 2) * 8**-0.5, -1) @ v
        return x + self.out(y).transpose(1, 2).reshape(x.shape)


class Losses(nn.Module):
    """Losses within the network, of a logit a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Conv2d(4, 5, 3, padding=1), nn.PReLU(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.p(self.a(x))
        labels = x[:, :1].squeeze(1).gt(0).long()
        return F.cross_entropy(y, labels), F.mse_loss(y, x.mean(1, keepdim=True).expand_as(y)), y.sum(), y.exp().mean()


class Regions(nn.Module):
    """A part without autocast, as its norm is written with `.float()`, and one that has it always."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        with torch.autocast("cpu", enabled=False):
            z = self.b(y.float())
        z = z * torch.rsqrt(y.float().square().mean(1, keepdim=True) + 1e-6).type_as(z)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = self.c(z)
        return z, w


MODULES: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual, "decoder": Decoder, "next": Next, "attends": Attends, "losses": Losses, "regions": Regions,
}  # fmt: skip
# By operator of SURE: arguments, and shapes of operands.
CALLS: dict[str, tuple[tuple[Any, ...], list[tuple[int, ...]]]] = {
    **{
        f"conv{d}d": ((Slot(0), Slot(1), None, (1,) * d, (0,) * d, (1,) * d, 1), [(2, 4, *[5] * d), (4, 4, *[3] * d)])
        for d in (1, 2, 3)
    },
    **{
        f"conv_transpose{d}d{'.input' if d > 1 else ''}": (
            (Slot(0), Slot(1), None, (1,) * d, (0,) * d, (0,) * d, 1, (1,) * d), [(2, 4, *[5] * d), (4, 4, *[3] * d)],
        )
        for d in (1, 2, 3)
    },
    "linear": ((Slot(0), Slot(1), None), [(2, 3), (4, 3)]),
    "matmul": ((Slot(0), Slot(1)), [(2, 3), (3, 4)]),
    "mm": ((Slot(0), Slot(1)), [(2, 3), (3, 4)]),
    "bmm": ((Slot(0), Slot(1)), [(2, 2, 3), (2, 3, 4)]),
    "addmm": ((Slot(0), Slot(1), Slot(2), 1, 1), [(2, 4), (2, 3), (3, 4)]),
    "baddbmm": ((Slot(0), Slot(1), Slot(2), 1, 1), [(2, 2, 4), (2, 2, 3), (2, 3, 4)]),
    "cross_entropy_loss": ((Slot(0), Slot(1), None, 1, -100, 0.0), [(5, 7), (5,)]),
    "max_pool2d": ((Slot(0), (2, 2), (), (0, 0), (1, 1), False), [(2, 4, 8, 8)]),
    "adaptive_avg_pool2d": ((Slot(0), (1, 1)), [(2, 4, 8, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", SURE)
def test_what_is_sure_is_what_torch_does(op: str, device: str) -> None:
    args, shapes = CALLS[op]
    dtypes = ["int64" if op == "cross_entropy_loss" and k else "float32" for k in range(len(shapes))]
    assert asked(op, args, shapes, dtypes, device) == SURE[op]


X = torch.randn(4, 4, 16, 8, generator=torch.Generator().manual_seed(5))


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    module = MODULES[kind]()
    draw_parameters(module)
    return module


def step(module: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Outputs, gradients of parameters, and of x."""
    x = x.clone().requires_grad_()
    ys = tree_flatten(module(x))[0]
    torch.autograd.backward(ys, [torch.ones_like(y) * 0.5 for y in ys])
    assert x.grad is not None
    return ys, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, x.grad


def off(a: Tensor, b: Tensor, least: float = 1e-30) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(least))


@cache
def graph_and_tensors(kind: str) -> tuple[Graph, dict[str, Tensor]]:
    return graph_of(made(kind), (X,), name="net")


@pytest.mark.parametrize("grid", [{"N": 1}, {"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2}], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_types_and_numbers_are_torchs(kind: str, grid: dict[str, int]) -> None:
    """Without autocast, and in both types: no further from float64 than twice what the module is, and some units in
    the last place."""
    exact = step(made(kind), X) if kind == "regions" else step(made(kind).double(), X.double())
    graph, tensors = graph_and_tensors(kind)
    with package(compile_network(graph, Grid(tuple(grid.items()))).package().files) as net:
        for dtype in (None, torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                wanted = step(made(kind), X)
            found = World(Grid(tuple(grid.items())).ranks).run(partial(on_rank, net, graph, kind, tensors, dtype))
            unit = torch.finfo(torch.bfloat16 if kind == "regions" else dtype or torch.float32).eps
            for ys, grads in found:
                compare(ys, grads, wanted, exact, unit)


def on_rank(
    net: Any, graph: Graph, kind: str, tensors: dict[str, Tensor], dtype: torch.dtype | None, end: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients, whole."""
    mesh = net.init_mesh("cpu", transport=end)
    model = net.Network(mesh)
    model.load_full(made(kind).state_dict() | {n: t for n, t in tensors.items() if n in model._known})
    x = net.scatter("x", X, mesh).requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        ys = tree_flatten(model(x))[0]
    whole = [net.gather(name, y, mesh) for (name, _), y in zip(graph.outputs, ys, strict=True)]
    torch.autograd.backward(whole, [torch.ones_like(y) * 0.5 for y in whole])
    assert x.grad is not None and x.grad.dtype == torch.float32
    return [y.detach() for y in whole], model.full_gradients()


def compare(ys: list[Tensor], grads: dict[str, Tensor], wanted: Any, exact: Any, unit: float) -> None:
    assert [y.dtype for y in ys] == [y.dtype for y in wanted[0]]
    for y, true, theirs in zip(ys, exact[0], wanted[0], strict=True):
        assert off(y, true) <= 1.5 * off(theirs, true) + 4 * unit
    assert {n: g.dtype for n, g in grads.items()} == {n: g.dtype for n, g in wanted[1].items()}
    least = 1e-2 * max(float(g.norm()) for g in exact[1].values())  # of a bias before a norm it is nothing
    for n, g in exact[1].items():
        ours, theirs = off(grads[n], g, least), off(wanted[1][n], g, least)
        assert ours <= 2 * theirs + 16 * unit, (n, ours, theirs)


def a_valid_network(draw: Random) -> tuple[nn.Module, Tensor]:
    while True:
        module, x = a_network(draw)
        try:
            deepcopy(module)(x)
        except RuntimeError:  # a kernel may be larger than what is drawn for it
            continue
        return module, x


@pytest.mark.parametrize("seed", cases_of(24, "free programs under autocast"))
def test_free_programs_compute_as_the_module(seed: int, tmp_path: Path) -> None:
    """Any roles, storage and travel: together no further from float64 than thrice what the module is."""
    draw = Random(f"autocast {seed}")
    module, x = a_valid_network(draw)
    exact = step(deepcopy(module).double(), x.double())
    graph, _ = graph_of(deepcopy(module), (x,), name="net")
    grid, state = a_grid(draw), deepcopy(module.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = step(module, x)
    net = imported(free_network(draw, graph, grid).package().files, tmp_path)

    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(state)
        block = net.scatter("x", x, mesh)
        with torch.autocast("cpu", torch.bfloat16):
            y = net.gather("output", model(block), mesh)
        y.backward(torch.ones_like(y) * 0.5)
        return y.detach(), model.full_gradients()

    for y, grads in World(grid.ranks).run(program):
        assert y.dtype == wanted[0][0].dtype
        assert {n: g.dtype for n, g in grads.items()} == {n: g.dtype for n, g in wanted[1].items()}
        assert off(y, exact[0][0]) <= 3 * off(wanted[0][0], exact[0][0]) + 0.02
        every, ours, theirs = (
            torch.cat([of[n].flatten().double() for n in grads]) for of in (exact[1], grads, wanted[1])
        )
        assert off(ours, every) <= 3 * off(theirs, every) + 0.02


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2}, {"C": 2}], ids=str)
@pytest.mark.parametrize("kind", ["residual", "decoder", "next", "attends"])
def test_a_gpus_package_takes_operands_as_a_gpu_does(kind: str, grid: dict[str, int]) -> None:
    """Norms and softmax are of float32 there; kernels of float32 leave low types to ATen, and a
    batch norm's, of any type, run in the interpreter."""
    exact = step(made(kind).double(), X.double())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = step(made(kind), X)
    graph, tensors = graph_and_tensors(kind)
    one = compile_network(graph, Grid(tuple(grid.items())), target=read_target("cuda:sm_90"))
    norms = [row.bound.autocast for row in one.program.rows if row.bound.operation.name.startswith("moments")]
    assert all(set(of) == {"float32"} for of in norms) != (kind == "residual")  # a batch norm is as it is
    with package(one.package().files) as net:
        for kernels in kernel_modules(net):
            kernels.launch = launch
        net.NET.device = "cpu"
        for ys, grads in World(2).run(partial(on_rank, net, graph, kind, tensors, torch.bfloat16)):
            assert [y.dtype for y in ys] == [torch.float32 if kind == "next" else torch.bfloat16]
            assert off(ys[0], exact[0][0]) <= 2 * off(wanted[0][0], exact[0][0]) + 0.02
            each = (torch.cat([of[n].flatten().double() for n in exact[1]]) for of in (exact[1], grads, wanted[1]))
            every, ours, theirs = each
            assert off(ours, every) <= 2 * off(theirs, every) + 0.02


class Normed(nn.Module):
    """A product without bias, and a norm of what autocast makes low."""

    def __init__(self, norm: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.a, self.norm, self.last = nn.Conv2d(4, 8, 1, bias=False), norm, last

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.norm(y.permute(0, 2, 3, 1) if self.last else y)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: Normed(nn.LayerNorm(8), last=True),
    "layer without bias": lambda: Normed(nn.LayerNorm(8, bias=False), last=True),
    "layer of rows": lambda: Normed(nn.LayerNorm((16, 8)), last=False),
    "group": lambda: Normed(nn.GroupNorm(2, 8), last=False),
    "plain group": lambda: Normed(nn.GroupNorm(2, 8, affine=False), last=False),
    "instance": lambda: Normed(nn.InstanceNorm2d(8, affine=True), last=False),
}


@pytest.mark.parametrize("grid", [{"N": 2}, {"C": 2}], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_a_rank_has_rounds_once(kind: str, grid: dict[str, int]) -> None:
    """What is normalised together lies on one rank, on one axis at least: no further from float64 than torch is."""
    mine, torchs = [], []
    for seed in range(2):
        draw, module = torch.Generator().manual_seed(seed), NORMS[kind]()
        draw_parameters(module)
        x, dy = (torch.randn(4, *([c, 16, 8] if not of or not module.last else [16, 8, c]), generator=draw)
                 for c, of in ((4, False), (8, True)))  # fmt: skip
        for found, of in zip(errors(module, x, dy, grid), (mine, torchs), strict=True):
            of.append(found)
    splits = grid == {"C": 2} and kind.startswith("layer") and kind != "layer of rows"  # moments are merged
    margin = 1.6 if splits else 1.1
    for ours, theirs in zip(zip(*mine, strict=True), zip(*torchs, strict=True), strict=True):
        assert sum(ours) <= margin * sum(theirs) + 4e-3, (kind, ours, theirs)


def errors(
    module: nn.Module,
    x: Tensor,
    dy: Tensor,
    grid: dict[str, int],
) -> tuple[list[float], list[float]]:
    """How far y and parameters' gradients are from float64 under autocast, of two ranks and of torch."""
    state = deepcopy(module.state_dict())
    graph, _ = graph_of(deepcopy(module), (x,), name="net")
    of_x = "input" if isinstance(module, nn.Sequential) else "x"

    def run(of: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = of(x)
        y.backward(dy.to(y.dtype))
        return y.detach(), {n: p.grad for n, p in of.named_parameters() if p.grad is not None}

    true = run(deepcopy(module).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs = run(module, x)
    with package(compile_network(graph, Grid(tuple(grid.items()))).package().files) as net:

        def program(end: Any) -> Any:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(state)
            with torch.autocast("cpu", torch.bfloat16):
                y = net.gather("output", model(net.scatter(of_x, x, mesh)), mesh)
            y.backward(dy.to(y.dtype))
            return y.detach(), model.full_gradients()

        ours = World(2).run(program)[0]
    assert ours[0].dtype == theirs[0].dtype
    ours, theirs = ([off(f[0], true[0]), *(off(f[1][n], g) for n, g in true[1].items())] for f in (ours, theirs))
    return ours, theirs


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 4, 9, 8)),
    "convolution in groups": (lambda: nn.Conv1d(4, 8, 3, 2, groups=2), (4, 4, 13)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1), (4, 4, 5, 6)),
    "transposed, with rows that no product reaches": (lambda: nn.ConvTranspose2d(4, 6, 1, 2, 0, 1), (4, 4, 5, 6)),
    "linear": (lambda: nn.Linear(5, 6), (4, 5)),
    "linear of tokens": (lambda: nn.Linear(5, 6), (4, 3, 5)),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_and_its_bias_round_once(kind: str) -> None:
    """The bias takes most of the product away, so that a rounding of the product alone would be seen; all that is read
    is of bfloat16."""
    make, shape = PRODUCTS[kind]
    draw, module = (
        torch.Generator().manual_seed(3),
        nn.Sequential(make(), nn.Identity() if "no product" in kind else nn.ReLU()),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_((1 + torch.rand(p.shape, generator=draw) / 8).bfloat16())
        x = (1 + torch.rand(shape, generator=draw) / 8).bfloat16().float()
        along = x.dim() - 1 if kind.startswith("linear") else 1
        bias = module[0].bias.zero_()
        bias -= (module(x).movedim(along, 0).flatten(1).amax(1) * 0.9375).bfloat16()
        dy = torch.randn(module(x).shape, generator=draw).bfloat16().float()
    ours, theirs = errors(module, x, dy, {"N": 2})
    margin = 0.1 if "no product" in kind else 1e-3  # there the bias is added to what is rounded
    assert all(a <= 1.1 * b + margin for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
