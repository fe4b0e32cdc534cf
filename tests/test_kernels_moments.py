"""Moments that convolutions' kernels make of what they write: those of the result, whatever its tiles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_kernels_norms import CHAINS
from test_networks_gpu import SM_90
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.choose import choose
from convgen.kernels.facts import facts, launches
from convgen.kernels.load import load_text
from convgen.kernels.moments import has_moments
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.verify.interpreter import launch


def problem(rng: random.Random, dtype: str, names: str = "HW") -> Problem:
    dims: list[LocalDim] = []
    for name in names:
        x, kernel, stride = rng.randint(3, 9), rng.choice((1, 3)), rng.choice((1, 1, 2))
        dims.append(LocalDim(name, x, (x + 2 * (kernel // 2) - kernel) // stride + 1, kernel, stride, 1, kernel // 2))
    channels, filters = rng.choice((8, 16, 40)), rng.choice((8, 24, 72))
    return Problem(
        phase="forward", batch=rng.randint(1, 5), channels=channels, filters=filters, dims=tuple(dims), dtype=dtype,
        memory_format="channels_last",
    )  # fmt: skip


def with_moments(p: Problem) -> Kernel | None:
    config = choose((p,), SM_90).config
    return Kernel((replace(p, moments=True),), config, SM_90) if has_moments(p, config) else None


def run(kernel: Kernel, x: Tensor, w: Tensor, patch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """y, and mean and variance of the tiles' moments."""
    module: Any = load_text(kernel_module([kernel]))
    norm: Any = load_text(CHAINS["alone"].text)
    patch.setattr(module, "launch", launch)
    patch.setattr(norm, "launch", launch)
    p = kernel.problem
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    y = torch.full((p.batch, p.filters, *(d.y for d in p.dims)), torch.nan, dtype=x.dtype).contiguous(
        memory_format=last
    )
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    given = (t.contiguous(memory_format=last) for t in (x, w))
    parts, counts = module.forward(*given, y, module.Sizes(p.batch, *rows, p.channels, p.filters, 1))
    assert counts.sum() == y.numel() // p.filters
    mean, variance = torch.empty(2, p.filters, dtype=parts.dtype).unbind()
    norm.merge(parts, counts, mean, variance)
    return y, mean, variance


@pytest.mark.parametrize("seed", cases_of(24, "moments of kernels"))
def test_they_are_those_of_the_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    dtype = ("float32", "bfloat16", "float16", "float64", "tfloat32")[seed % 5]
    kernel = None
    while kernel is None:
        p = problem(rng, dtype, rng.choice(("HW", "HW", "DHW")))
        kernel = with_moments(p)
    if rng.random() < 0.3 and kernel.config.family == "box":  # programs that share a tile
        kernel = replace(kernel, config=replace(kernel.config, split=3))
    kind = TORCH_DTYPES[dtype]
    x = torch.randn(p.batch, p.channels, *(d.x for d in p.dims)).to(kind) + 1
    w = torch.randn(p.filters, p.channels, *(d.kernel for d in p.dims)).to(kind)
    w[rng.randrange(p.filters)] = 0  # whose variance is 0
    odd = rng.randrange(p.filters) if rng.random() < 0.4 else None
    if odd is not None:
        w[odd] = torch.nan
    y, mean, variance = run(kernel, x, w, monkeypatch)
    wanted = torch.var_mean(y.double().transpose(0, 1).flatten(1), 1, correction=0)
    close: Any = {"equal_nan": True} | (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 2e-5, "atol": 2e-5}
    )
    for found, want in zip((variance, mean), wanted, strict=True):
        assert torch.equal(found.isnan(), want.isnan()) and int(found.isnan().sum()) == (odd is not None)
        torch.testing.assert_close(found.double(), want, **close)
    plain = replace(p, moments=False)
    alone: Any = load_text(kernel_module([Kernel((plain,), kernel.config, SM_90)]))
    monkeypatch.setattr(alone, "launch", launch)
    again = torch.empty_like(y)
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    given = [t.contiguous(memory_format=last) for t in (x, w)]
    alone.forward(*given, again, alone.Sizes(p.batch, *rows, p.channels, p.filters, 1))
    assert torch.equal(y.nan_to_num(), again.nan_to_num())


def test_kernels_spill_nothing() -> None:
    """Of ResNet-50's convolutions, some."""
    sizes = [(64, 256, 1, 1, 56), (64, 64, 3, 1, 56), (128, 128, 3, 2, 56), (512, 2048, 1, 1, 7), (512, 512, 3, 1, 7)]
    for c, f, k, s, h in sizes:
        dims = tuple(LocalDim(name, h, (h - 1) // s + 1, k, s, 1, k // 2) for name in "HW")
        p = Problem(
            phase="forward", batch=16, channels=c, filters=f, dims=dims, dtype="bfloat16", memory_format="channels_last"
        )
        kernel = with_moments(p)
        assert kernel is not None
        assert [facts(one, SM_90).spill_bytes for one in launches(kernel, kernel.problem)] == [0]


class Normed(nn.Module):
    """What is normed where it is made; what another reads first; what has a bias; groups."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(16, 16, 3, padding=1, bias=n == 2, groups=4 if n == 3 else 1) for n in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for n, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = conv(x)
            x = norm(torch.tanh(y) if n == 1 else y)
        return x


def test_which_convolutions_make_them() -> None:
    graph, _ = graph_of(Normed(), (torch.randn(4, 16, 6, 6),), name="normed")
    one = compile_network(graph, Grid((("N", 2),)), target=SM_90)
    uses = [use for file in one.kernels if file.moments for use in file.uses]
    assert [row for row, _ in uses][: len(uses) // 2] == ["convs_0"]  # twice: float32's products, and TF32's
    assert not any(file.moments for file in compile_network(graph, Grid((("H", 2),)), target=SM_90).kernels if file.rim)
