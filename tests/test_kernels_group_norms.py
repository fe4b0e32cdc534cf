"""Kernels of group and instance norms: right in Triton's interpreter, alone and in networks, and without spills."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, step_on_no_device
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.facts import Launch, facts
from convgen.kernels.load import load_text
from convgen.kernels.norms import NormFile
from convgen.network_compiler import compile_network
from convgen.operations.calls import Elementwise, Slot
from convgen.packages import kernel_modules
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text

EPS = 1e-5
ACTIVATIONS = {"relu": torch.relu, "silu": nn.functional.silu, "hardswish": nn.functional.hardswish}


def file_of(name: str) -> NormFile:
    """Kernels of a norm with an activation behind it, or none."""
    if not name:
        return NormFile("norm_1", (), "", "")
    of = Elementwise(name, (Slot(0),), (2, 2), ((2, 2),))
    step, back = of.as_epilogue(0), of.back_of_result() or of.back_of_input()
    assert step is not None and back is not None
    return NormFile("norm_2", (step,), back.text, name, of.back_of_result() is None)


def run(
    name: str, x: Tensor, w: Any, b: Any, dy: Tensor, size: int, patch: pytest.MonkeyPatch, pieces: int = 256
) -> dict[str, Tensor]:
    """By the kernels: y, gradients of weight and bias, dx. In at most so many pieces: few have several tiles each."""
    module = load_text(file_of(name).text)
    patch.setattr(module, "launch", launch)
    patch.setattr(module, "PIECES", pieces)
    wide, groups = torch.promote_types(x.dtype, torch.float32), x.shape[1] // size
    mean, variance = x.new_empty(2, x.shape[0], groups, dtype=wide).unbind()
    module.moments_of_groups(x, mean, variance, size)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    module.apply(x, mean, variance, w, b, EPS, (), y, size)
    by_channel, of_groups = mean.new_empty(x.shape[0], 2, x.shape[1]), mean.new_empty(2, x.shape[0], groups)
    module.sums(x, mean, variance, w, b, EPS, None, dy, None, by_channel, group=size, of_groups=of_groups)
    count = x.numel() // mean.numel()
    module.dx(x, mean, variance, w, b, EPS, dy, bool(name), of_groups, count, False, dx, size)
    more = torch.empty_like(dx)
    module.dx(x, mean, variance, w, b, EPS, dy, bool(name), of_groups, count, False, more, size, x)
    dw, db = by_channel.sum(0)
    return {"y": y, "dw": dw, "db": db, "dx": dx, "dx and x": more}


def oracle(name: str, x: Tensor, w: Any, b: Any, dy: Tensor, size: int) -> dict[str, Tensor]:
    """By autograd in float64."""
    x, dy = x.double().requires_grad_(), dy.double()
    w = torch.ones(x.shape[1]).double().requires_grad_() if w is None else w.double().requires_grad_()
    b = torch.zeros(x.shape[1]).double().requires_grad_() if b is None else b.double().requires_grad_()
    y = nn.functional.group_norm(x, x.shape[1] // size, w, b, EPS)
    y = ACTIVATIONS[name](y) if name else y
    y.backward(dy)
    return {"y": y.detach(), "dw": w.grad, "db": b.grad, "dx": x.grad, "dx and x": x.grad + x.detach()}


def drawn(rng: random.Random, dtype: torch.dtype) -> tuple[Any, ...]:
    shape, size = rng.choice(
        (((3, 6, 7, 5), 3), ((2, 70, 9, 13), 5), ((1, 16, 3, 2, 4), 16), ((2, 130, 4, 3), 1), ((2, 128, 33, 31), 4))
    )
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    near = rng.choice((0.0, 3.0))

    def normal() -> Tensor:
        return (torch.randn(shape) + near).to(dtype).contiguous(memory_format=last)

    kinds = [rng.choice((dtype, torch.float32, None)) for _ in "wb"]
    vectors = [None if kind is None else torch.randn(shape[1]).to(kind) for kind in kinds]
    return normal(), *vectors, normal(), size


@pytest.mark.parametrize("seed", cases_of(24, "group norm kernels"))
def test_kernels_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    name = ("", *ACTIVATIONS)[seed % 4]
    dtype = rng.choice((torch.float64, torch.float32, torch.bfloat16, torch.float16))
    given = drawn(rng, dtype)
    found, wanted = run(name, *given, monkeypatch, rng.choice((1, 2, 256))), oracle(name, *given)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for what, t in found.items():
        scale = wanted[what].abs().max() + 1
        assert ((t.double() - wanted[what]).abs().max() / scale) < tolerance, what


def test_moments_survive_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of a thousand deviations, where a sum of squares in float32 has no digit left."""
    x = (torch.randn(3, 6, 20, 30) + 1000).contiguous(memory_format=torch.channels_last)
    module = load_text(file_of("").text)
    monkeypatch.setattr(module, "launch", launch)
    mean, variance = torch.empty(2, 3, 2).unbind()
    module.moments_of_groups(x, mean, variance, 3)
    wanted = torch.var_mean(x.double().reshape(3, 2, -1), 2, correction=0)
    torch.testing.assert_close(variance.double(), wanted[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), wanted[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_no_number_stays_in_its_group(odd: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 6, 6, 4).contiguous(memory_format=torch.channels_last)
    x[1, 3, 2, 1] = odd
    dy = torch.randn(2, 6, 6, 4).contiguous(memory_format=torch.channels_last)
    found, wanted = run(name, x, None, None, dy, 2, monkeypatch), oracle(name, x, None, None, dy, 2)
    for what in ("y", "dx"):
        assert torch.equal(found[what].isnan(), wanted[what].isnan()), what


def test_kernels_spill_nothing() -> None:
    module, held = load_text(file_of("silu").text), list[Launch]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", lambda f, grid, *args, **more: held.append(Launch(f, grid, args, more)))
        for dtype, size in ((torch.bfloat16, 8), (torch.float32, 256)):
            x = torch.empty((2, 256, 128, 128), dtype=dtype, device="meta", memory_format=torch.channels_last)
            mean, variance = torch.empty((2, 2, 256 // size), device="meta").unbind()
            sums, of_groups = torch.empty((2, 2, 256), device="meta"), torch.empty((2, *mean.shape), device="meta")
            w = torch.empty(256, dtype=dtype, device="meta")
            module.moments_of_groups(x, mean, variance, size)
            module.apply(x, mean, variance, w, w, EPS, (), x, size)
            module.sums(x, mean, variance, w, w, EPS, None, x, None, sums, group=size, of_groups=of_groups)
            module.dx(x, mean, variance, w, w, EPS, x, True, of_groups, 131072, False, x, size)
    assert Counter(one.name for one in held) == dict.fromkeys(NAMES, 2)
    for one in held:
        found = facts(one, SM_90.known())
        assert found.spill_bytes == 0, one.name
        if one.name in ("norm_apply", "norm_dx"):
            assert found.widest_global_load_bytes == 16, one.name


NAMES = ("norm_moments", "norm_groups", "norm_apply", "norm_sums", "norm_add_groups", "norm_dx")


# ---- In networks ----


class Drawn(nn.Module):
    """Convolutions with norms by group, activated or not, whose results others read, too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = c = 8 * rng.randint(1, 2)
        kinds = ("silu", "relu", "hardswish", "none", "both", "gelu", "add silu", "alone")
        self.kinds = [rng.choice(kinds) for _ in range(3)]
        self.convs = nn.ModuleList(nn.Conv2d(c, c, rng.choice((1, 3)), padding="same") for _ in range(6))
        self.norms = nn.ModuleList(
            rng.choice((nn.GroupNorm(rng.choice((1, 2, 4, c)), c), nn.InstanceNorm2d(c, affine=rng.random() < 0.5)))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(zip(self.convs, self.norms, strict=True))
        for kind in self.kinds:
            conv, norm = next(layers)
            y = norm(conv(x))
            if kind == "both":
                conv, norm = next(layers)
                x = torch.relu(y + norm(conv(x)))
            elif kind == "alone":
                x = nn.functional.silu(y) + 0.5 * y
            elif kind == "none":
                x = y
            elif kind == "add silu":
                x = nn.functional.silu(y + x)
            else:
                x = getattr(nn.functional, kind)(y)
        return x


@pytest.mark.parametrize("seed", cases_of(16, "norms by group in networks"))
def test_drawn_networks_are_right(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Drawn(rng)
    for p in module.norms.parameters():
        nn.init.normal_(p, 0.5, 0.5)
    shape = (rng.choice((1, 3, 4)), module.channels, rng.choice((4, 5)), rng.choice((3, 6)))
    graph, tensors = graph_of(module, (torch.randn(shape),), name="drawn")
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"H": 2, "W": 2}, {"C": 2}, {"C": 2, "H": 2}, {"C": 3})).items()))
    one = compile_network(graph, grid, target=SM_90)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.of_a, self.of_b = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.of_a(self.a(x)))
        return nn.functional.silu(self.of_b(self.b(x)))


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2}])
def test_a_network_launches_them(grid: dict[str, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels a norm forward, as the convolution before it makes moments by tiles, and three backward, wherever
    these are; scale, shift and activation none."""
    graph, tensors = graph_of(Block(), (torch.randn(4, 16, 16, 16),), name="block")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid(tuple(grid.items())), target=SM_90)
    assert [file.said for file in one.norm_kernels] == ["", "silu"]
    with loaded(one, tensors, tmp_path) as package:
        assert len([m for m in kernel_modules(package) if ".norm_" in m.__name__]) == 2
        found: list[Launch] = []
        step_on_no_device(package, monkeypatch, launched=found)
    names = [one.name for one in found if one.name.startswith("norm_")]
    union = {"norm_union": 2 * 2} if "H" in grid else {}
    assert Counter(names) == dict.fromkeys(NAMES[1:], 2 * 2) | union  # two norms on two ranks


class Residual(nn.Module):
    """A block whose norms' moments convolutions make behind a bias, and a sum; two norms of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(groups, 16) for groups in (4, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        y = self.convs[1](nn.functional.silu(self.norms[0](x)))
        x = x + y
        return self.convs[2](nn.functional.silu(self.norms[1](x))) + self.norms[2](x)


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2, "W": 2}, {"C": 2}], ids=["N", "HW", "C"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_make_moments_of_sums_and_halos(grid: dict[str, int], dtype: str) -> None:
    manual_seed: Any = torch.manual_seed
    manual_seed(1)
    module = Residual()
    for p in module.norms.parameters():
        nn.init.normal_(p, 0.5, 0.5)
    nn.init.constant_(module.convs[0].bias, 30.0)  # type: ignore[arg-type]
    graph, tensors = graph_of(module, (torch.randn(2, 16, 9, 22),), name="residual")
    one = compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), target=SM_90)
    making = {row for file in one.kernels if file.moments for row, _ in file.uses}
    assert making == (set() if "C" in grid else {"convs_0", "add"})  # there partial sums
    assert {file.rim for file in one.kernels if file.moments} == ({"x"} if "H" in grid else {""} if making else set())
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2}])
def test_dx_is_added_to_what_skips_the_norm(
    grid: dict[str, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a value that a norm and a sum behind it read, its gradients are added by the norm's kernel."""
    graph, tensors = graph_of(Residual(), (torch.randn(2, 16, 16, 16),), name="residual")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid(tuple(grid.items())), target=SM_90)
    with loaded(one, tensors, tmp_path) as package:
        found: list[Launch] = []
        step_on_no_device(package, monkeypatch, launched=found)
    added = Counter(one.constants["ADD"] for one in found if one.name == "norm_dx")
    assert added == {True: 2 * 2, False: 2}  # of three norms on two ranks: the first and one of the two of one value
