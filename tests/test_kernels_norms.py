"""Kernels of batch norms: right in Triton's interpreter, alone and in networks, and without spills."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
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
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.operations.element_texts import ONE, RELU
from convgen.operations.row import EpilogueStep
from convgen.packages import kernel_modules
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text

RELU_BACK = ONE["relu"].back.format(y="{0}", dy="{x}")
RECTIFIED = EpilogueStep(RELU, back="result")
ADDED = EpilogueStep("{x} + {0}", (("element", 1),), "sum")
CHAINS = {
    "alone": NormFile("norm_1", (), "", ""),
    "relu": NormFile("norm_2", (RECTIFIED,), RELU_BACK, "relu"),
    "add relu": NormFile("norm_3", (ADDED, RECTIFIED), RELU_BACK, "add and relu"),
}
EPS = 1e-5


def run(
    name: str, x: Tensor, w: Any, b: Any, other: Any, dy: Tensor, patch: pytest.MonkeyPatch, pieces: int = 256
) -> dict[str, Tensor]:
    """By the kernels: y, the sum's masked gradient, gradients of weight and bias, dx. In at most so many pieces:
    few have several tiles each."""
    module = load_text(CHAINS[name].text)
    patch.setattr(module, "launch", launch)
    patch.setattr(module, "PIECES", pieces)
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, variance = x.new_empty(2, x.shape[1], dtype=wide).unbind()
    module.moments(x, mean, variance)
    others = [] if other is None else [other]
    y, dx = torch.empty_like(x), torch.empty_like(x)
    module.apply(x, mean, variance, w, b, EPS, others, y)
    sums, g = mean.new_empty(3, x.shape[1]), torch.empty_like(x) if others else None
    module.sums(x, mean, variance, w, b, EPS, y if others else None, dy, g, sums)
    count = x.numel() // x.shape[1]
    given, masked = (dy, name == "relu") if g is None else (g, False)
    module.dx(x, mean, variance, w, b, EPS, given, masked, sums, count, True, dx)
    more = torch.empty_like(dx)
    module.dx(x, mean, variance, w, b, EPS, given, masked, sums, count, True, more, before=x)
    found = {"y": y, "dw": sums[1], "db": sums[2], "dx": dx, "dx and x": more}
    return found if g is None else found | {"dother": g}


def oracle(name: str, x: Tensor, w: Any, b: Any, other: Any, dy: Tensor) -> dict[str, Tensor]:
    """By autograd in float64; of what is near 0 the sign is the kernels', which round before."""
    x, dy = x.double().requires_grad_(), dy.double()
    w = torch.ones(x.shape[1]).double().requires_grad_() if w is None else w.double().requires_grad_()
    b = torch.zeros(x.shape[1]).double().requires_grad_() if b is None else b.double().requires_grad_()
    y = nn.functional.batch_norm(x, None, None, w, b, True, 0.0, EPS)
    found: dict[str, Tensor] = {}
    if other is not None:
        other = other.double().requires_grad_()
        y = y + other
    y = torch.relu(y) if name != "alone" else y
    y.backward(dy)
    found = {"y": y.detach(), "dw": w.grad, "db": b.grad, "dx": x.grad, "dx and x": x.grad + x.detach()}
    return found if other is None else found | {"dother": other.grad}


def drawn(rng: random.Random, dtype: torch.dtype, name: str) -> tuple[Any, ...]:
    shape = rng.choice(((3, 5, 7, 5), (2, 70, 9, 13), (1, 16, 3, 2, 4), (5, 130, 4, 3), (2, 1, 31, 33)))
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    near = rng.choice((0.0, 3.0))

    def normal() -> Tensor:
        return (torch.randn(shape) + near).to(dtype).contiguous(memory_format=last)

    kinds = [rng.choice((dtype, torch.float32, None)) for _ in "wb"]
    vectors = [None if kind is None else torch.randn(shape[1]).to(kind) for kind in kinds]
    return normal(), *vectors, normal() if name == "add relu" else None, normal()


@pytest.mark.parametrize("seed", cases_of(24, "norm kernels"))
def test_kernels_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    name = list(CHAINS)[seed % 3]
    dtype = rng.choice((torch.float64, torch.float32, torch.bfloat16, torch.float16))
    given = drawn(rng, dtype, name)
    found, wanted = run(name, *given, monkeypatch, rng.choice((1, 2, 256))), oracle(name, *given)
    if dtype in (torch.bfloat16, torch.float16) and name != "alone":  # which result is 0 is as the kernel rounds
        same = (found["y"] > 0) == (wanted["y"] > 0)
        assert same.double().mean() > 0.99
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for what, t in found.items():
        scale = wanted[what].abs().max() + 1
        assert ((t.double() - wanted[what]).abs().max() / scale) < tolerance, what


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_a_few_numbers_a_channel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addends of averages of parts, the union of ranks' moments, running statistics, and rounded gradients."""
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = load_text(CHAINS["alone"].text)
    monkeypatch.setattr(module, "launch", launch)
    dtype = (torch.float64, torch.float32, torch.bfloat16)[seed % 3]
    wide = torch.promote_types(dtype, torch.float32)
    near: Any = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}[wide]
    channels, ranks = rng.choice((3, 17, 150)), rng.randint(1, 5)
    parts = [torch.randn(rng.randint(1, 3), channels, rng.randint(1, 4), 3) + 2 for _ in range(ranks)]
    parts = [p.to(dtype).contiguous(memory_format=torch.channels_last) for p in parts]
    counts = torch.tensor([p.numel() // channels for p in parts])
    total = int(counts.sum())
    own, averaged = torch.empty(ranks, 2, channels, dtype=wide), torch.empty(ranks, 2, channels, dtype=wide)
    for p, of, more in zip(parts, own, averaged, strict=True):
        module.moments(p, of[0], of[1], more, total)
        variance, mean = torch.var_mean(p.double(), (0, 2, 3), correction=0)
        count = p.numel() // channels
        share = count / total
        torch.testing.assert_close(of, torch.stack([mean, variance]).to(wide), **near)
        unbiased = variance * (count / max(count - 1, 1))
        torch.testing.assert_close(more, (torch.stack([mean, unbiased]) * share).to(wide), **near)
    mean, variance = torch.empty(2, channels, dtype=wide).unbind()
    module.union(own.view(ranks, -1), (counts / total).to(wide), mean, variance)
    every = torch.cat([p.double().transpose(0, 1).reshape(channels, -1) for p in parts], 1)
    torch.testing.assert_close(variance, every.var(1, correction=0).to(wide), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean, every.mean(1).to(wide), rtol=1e-5, atol=1e-5)
    for momentum in (0.1, 0.7, 1.0):
        for count in (0, total + 1):
            running = torch.randn(channels).to(dtype), torch.rand(channels).to(dtype)
            new = mean, variance if not count else variance * (count / (count - 1))
            wanted = [a.clone().lerp_(b.to(dtype), momentum) for a, b in zip(running, new, strict=True)]
            module.renew(running, mean, variance, momentum, count)
            assert momentum < 1 or torch.equal(running[0], mean.to(dtype))  # which it meets
            for got, want in zip(running, wanted, strict=True):
                torch.testing.assert_close(got, want, **(near if dtype != torch.bfloat16 else {}))
    x, dy = parts[0], torch.randn_like(parts[0])
    sums, (dw, db) = mean.new_empty(3, channels), torch.empty(2, channels, dtype=dtype).unbind()
    module.sums(x, mean, variance, None, None, EPS, None, dy, None, sums, (dw, db))
    assert torch.equal(dw, sums[1].to(dtype)) and torch.equal(db, sums[2].to(dtype))
    torch.testing.assert_close(sums[2], dy.double().sum((0, 2, 3)).to(wide), **near)


def test_moments_survive_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of a thousand deviations, where a sum of squares in float32 has no digit left."""
    x = (torch.randn(3, 6, 20, 30) + 1000).contiguous(memory_format=torch.channels_last)
    module = load_text(CHAINS["alone"].text)
    monkeypatch.setattr(module, "launch", launch)
    mean, variance = torch.empty(2, 6).unbind()
    module.moments(x, mean, variance)
    wanted = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), wanted[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), wanted[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_channel(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 6, 4).contiguous(memory_format=torch.channels_last)
    x[1, 3, 2, 1] = odd
    dy = torch.randn(2, 5, 6, 4).contiguous(memory_format=torch.channels_last)
    found, wanted = run("relu", x, None, None, None, dy, monkeypatch), oracle("relu", x, None, None, None, dy)
    for what in ("y", "dx"):
        assert torch.equal(found[what].isnan(), wanted[what].isnan()), what


def recorded(held: list[Launch], function: Any, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
    held.append(Launch(function, grid, args, more))


def test_kernels_spill_nothing() -> None:
    for name, file in CHAINS.items():
        module = load_text(file.text)
        held: list[Launch] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                module, "launch", lambda f, grid, *args, held=held, **more: held.append(Launch(f, grid, args, more))
            )
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.empty((16, 256, 56, 56), dtype=dtype, device="meta", memory_format=torch.channels_last)
                mean, variance = torch.empty((2, 256), device="meta").unbind()
                sums = torch.empty((3, 256), device="meta")
                w, others = torch.empty(256, dtype=dtype, device="meta"), [x] if name == "add relu" else []
                module.moments(x, mean, variance, sums, 50176)
                module.union(mean[:8].view(2, 4), mean[:2], mean[:2], variance[:2])
                module.renew((w, w), mean, variance, 0.1, 50176)
                module.apply(x, mean, variance, w, w, EPS, others, x)
                given = x if others else None
                module.sums(x, mean, variance, w, w, EPS, given, x, given, sums, (w, w))
                module.dx(x, mean, variance, w, w, EPS, x, name == "relu", sums, 50176, True, x)
        assert len(held) == 16
        for one in held[:: 1 if name == "relu" else 3]:
            found = facts(one, SM_90.known())
            assert found.spill_bytes == 0, (name, one.name)
            if one.name in ("norm_apply", "norm_dx"):
                assert found.widest_global_load_bytes == 16, (name, one.name)


@pytest.mark.parametrize(("shape", "group"), [((512, 64, 112, 112), 0), ((1 << 17, 64, 4, 4), 16)])
def test_any_number_of_rows_and_samples_is_launched(shape: tuple[int, ...], group: int) -> None:
    """A GPU's launches have 65,535 programs at most along their second and third dimensions."""
    module, held = load_text(CHAINS["alone"].text), list[Launch]()
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    mean, variance = torch.empty((2, shape[0], shape[1] // group) if group else (2, shape[1]), device="meta").unbind()
    sums, of_groups = torch.empty((3, shape[1]), device="meta"), torch.empty((2, *mean.shape), device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", lambda f, grid, *args, **more: held.append(Launch(f, grid, args, more)))
        if group:
            module.moments_of_groups(x, mean, variance, group)
        else:
            module.moments(x, mean, variance)
        module.apply(x, mean, variance, None, None, EPS, (), x, group)
        more = {"group": group, "of_groups": of_groups} if group else {}
        module.sums(x, mean, variance, None, None, EPS, None, x, None, sums, **more)
        module.dx(x, mean, variance, None, None, EPS, x, False, sums, 1, not group, x, group)
    assert len(held) == 6 and max(one.grid[0] for one in held) > 1 << 16
    assert all(max((*one.grid, 1)[1:]) < 1 << 16 for one in held)


# ---- In networks ----


class Drawn(nn.Module):
    """Convolutions with norms, some rectified, some added to what others read, whose outputs others read too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = c = 8 * rng.randint(1, 2)
        kinds = [
            "relu",
            "add relu",
            "both",
            "add",
            "in place relu",
            "relu6",
            "norm first",
            "silu",
            "add silu",
            "before",
        ]
        self.kinds = [rng.choice(kinds) for _ in range(3)]
        self.convs = nn.ModuleList(nn.Conv2d(c, c, rng.choice((1, 3)), padding="same", bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, affine=rng.random() < 0.8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(zip(self.convs, self.norms, strict=True))

        def normed(x: Tensor) -> Tensor:
            conv, norm = next(layers)
            return norm(conv(x))

        for kind in self.kinds:
            if kind == "both":
                x = torch.relu(normed(x) + normed(x))
            elif kind == "before":
                conv, norm = next(layers)
                x = x + conv(torch.relu(norm(x)))
            elif kind == "norm first":
                y = normed(x)
                x = torch.relu(y) + 0.5 * y
            else:
                y = normed(x)
                if "in place" in kind:
                    y += x
                y = x + y if "add" in kind else y
                x = nn.functional.relu6(y) if kind == "relu6" else torch.relu(y) if "relu" in kind else y
                x = nn.functional.silu(x) if "silu" in kind else x
        return x


@pytest.mark.parametrize("seed", cases_of(12, "norms in networks"))
def test_drawn_networks_are_right(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Drawn(rng)
    shape = (rng.choice((1, 3, 4)), module.channels, rng.choice((4, 5)), rng.choice((3, 6)))
    graph, tensors = graph_of(module, (torch.randn(shape),), name="drawn")
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"N": 2, "W": 2}, {"C": 2})).items()))
    statistics = "global" if shape[0] == 1 else rng.choice(("global", "local", "spatial"))
    one = compile_network(graph, grid, statistics=statistics, target=SM_90)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


NAMES = ("norm_merge", "norm_renew", "norm_apply", "norm_sums", "norm_add", "norm_dx")


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.of_a, self.of_b = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.of_b(self.b(torch.relu(self.of_a(self.a(x))))) + x)


def test_a_network_launches_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels a norm forward and three backward; moments are the convolutions', rectifiers and the sum none."""
    graph, tensors = graph_of(Bottleneck(), (torch.randn(4, 16, 6, 6),), name="bottleneck")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 2),)), statistics="local", target=SM_90)
    assert [file.said for file in one.norm_kernels] == ["", "relu", "add and relu"]
    with loaded(one, tensors, tmp_path) as package:
        assert len([m for m in kernel_modules(package) if ".norm_" in m.__name__]) == 3
        found: list[Launch] = []
        step_on_no_device(package, monkeypatch, launched=found)
    names = [one.name for one in found if one.name.startswith("norm_")]
    # On two ranks; a product makes the gradient that it reads itself.
    assert Counter(names) == dict.fromkeys(NAMES, 2 * 2) | {"norm_dx": 2}
    assert one_on_a_cpu(one).norm_kernels == ()


def one_on_a_cpu(one: CompiledNetwork) -> CompiledNetwork:
    from convgen.spec.target import read_target

    return replace(one, target=read_target("cpu"))
