"""Moments that convolutions' kernels make of what they write: those of the result, whatever its tiles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_kernels_norms import ADDED, CHAINS, RECTIFIED
from test_networks_gpu import SM_90
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.choose import choose
from convgen.kernels.facts import facts, launches
from convgen.kernels.load import load_text
from convgen.kernels.moments import moments_refusal, pieces
from convgen.kernels.problem import LocalDim, Problem, Tiled
from convgen.kernels.source import Kernel, kernel_module
from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.network_compiler import compile_network
from convgen.operations.row import EpilogueStep
from convgen.spec.exported import graph_of
from convgen.verify.interpreter import launch

BIAS = EpilogueStep("{x} + {0}", (("channel", 1),), "sum")


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


def with_moments(p: Problem, tiled: Tiled = "batch") -> Kernel | None:
    config, p = choose((p,), SM_90).config, replace(p, moments=tiled)
    return None if moments_refusal(p, config) else Kernel((p,), config, SM_90)


def run(
    kernel: Kernel, x: Tensor, w: Tensor, others: Sequence[Tensor], size: int, patch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and mean and variance of the tiles' moments; of `size` channels of each sample, or where that is 0 of each
    channel of all."""
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
    given = [t.contiguous(memory_format=last) if t.dim() > 1 else t for t in (x, w, *others)]
    parts, counts = module.forward(*given, y, module.Sizes(p.batch, *rows, p.channels, p.filters, 1))
    assert counts.sum() == y.numel() // p.filters and len(counts) == pieces(p, kernel.config)
    shape = (p.batch, p.filters // size) if size else (p.filters,)
    mean, variance = torch.empty(2, *shape, dtype=parts.dtype).unbind()
    if size:
        norm.merge_groups(parts, counts, mean, variance, size)
    else:
        norm.merge(parts, counts, mean, variance)
    return y, mean, variance


@pytest.mark.parametrize("seed", cases_of(24, "moments of kernels"))
def test_they_are_those_of_the_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    dtype = ("float32", "bfloat16", "float16", "float64", "tfloat32")[seed % 5]
    tiled: Tiled = rng.choice(("batch", "samples"))
    epilogue = rng.choice(((), (BIAS,), (BIAS, ADDED), (BIAS, ADDED, RECTIFIED)))
    kernel = None
    while kernel is None:
        p = replace(problem(rng, dtype, rng.choice(("HW", "HW", "DHW"))), epilogue=epilogue)
        kernel = with_moments(p, tiled)
    if rng.random() < 0.3 and kernel.config.family == "box" and ADDED not in epilogue:  # programs that share a tile
        kernel = replace(kernel, config=replace(kernel.config, split=3))
    kind = TORCH_DTYPES[dtype]
    x = torch.randn(p.batch, p.channels, *(d.x for d in p.dims)).to(kind) + 1
    w = torch.randn(p.filters, p.channels, *(d.kernel for d in p.dims)).to(kind)
    w[rng.randrange(p.filters)] = 0  # whose variance is 0
    odd = rng.randrange(p.filters) if rng.random() < 0.4 else None
    if odd is not None:
        w[odd] = torch.nan
    shape = (p.batch, p.filters, *(d.y for d in p.dims))
    drawn = {BIAS: torch.randn(p.filters), ADDED: torch.randn(shape)}
    others = [drawn[step].to(kind) for step in epilogue if step in drawn]
    by_sample = tiled == "samples" and rng.random() < 0.8  # a batch norm may stand behind such tiles, too
    size = rng.choice((1, 4, 8)) if by_sample else 0
    y, mean, variance = run(kernel, x, w, others, size, monkeypatch)
    each = y.double().unflatten(1, (-1, size)).flatten(2) if size else y.double().transpose(0, 1).flatten(1)
    wanted = torch.var_mean(each, -1, correction=0)
    lost = 0 if odd is None else p.batch if size else 1
    close: Any = {"equal_nan": True} | (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 2e-5, "atol": 2e-5}
    )
    for found, want in zip((variance, mean), wanted, strict=True):
        assert torch.equal(found.isnan(), want.isnan()) and int(found.isnan().sum()) == lost
        torch.testing.assert_close(found.double(), want, **close)
    alone: Any = load_text(kernel_module([Kernel((p,), kernel.config, SM_90)]))
    monkeypatch.setattr(alone, "launch", launch)
    again = torch.empty_like(y)
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    given = [t.contiguous(memory_format=last) if t.dim() > 1 else t for t in (x, w, *others)]
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_of_decoders_spill_nothing(dtype: str) -> None:
    """Of AutoencoderKL's decoder, with a bias and a sum behind; of one rank, with boxes around its block, of several
    samples."""
    sizes = [(512, 512, 64, 1, None), (256, 256, 256, 1, None), (128, 128, 512, 1, 3), (512, 512, 4, 8, None)]
    for c, f, h, batch, rim in sizes:
        dims = tuple(LocalDim(name, h + 2 * (rim is not None), h, 3, 1, 1, rim is None) for name in "HW")
        p = Problem(
            phase="forward", batch=batch, channels=c, filters=f, dims=dims, dtype=dtype, memory_format="channels_last",
            epilogue=(BIAS, ADDED), rim=rim,
        )  # fmt: skip
        kernel = with_moments(p, "samples") or with_moments(replace(p, epilogue=(BIAS,)), "samples")
        assert kernel is not None and (kernel.problem.epilogue == p.epilogue or kernel.config.split > 1)
        assert [facts(one, SM_90).spill_bytes for one in launches(kernel, kernel.problem)] == [0]


def test_moments_survive_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of a thousand deviations, where a sum of squares in float32 has no digit left."""
    dims = tuple(LocalDim(name, 20, 20, 3, 1, 1, 1) for name in "HW")
    p = Problem(
        phase="forward", batch=3, channels=16, filters=16, dims=dims, dtype="float32", memory_format="channels_last",
        epilogue=(BIAS,),
    )  # fmt: skip
    kernel = with_moments(p, "samples")
    assert kernel is not None
    x, w = torch.randn(3, 16, 20, 20), torch.randn(16, 16, 3, 3) / 12
    y, mean, variance = run(kernel, x, w, [torch.full((16,), 1000.0)], 4, monkeypatch)
    wanted = torch.var_mean(y.double().unflatten(1, (-1, 4)).flatten(2), -1, correction=0)
    torch.testing.assert_close(variance.double(), wanted[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), wanted[1], rtol=1e-6, atol=0)


def test_what_would_not_pay_is_refused() -> None:
    dims = tuple(LocalDim(name, 5, 5, 1, 1, 1, 0) for name in "HW")
    p = Problem(
        phase="forward", batch=8, channels=64, filters=64, dims=dims, dtype="bfloat16", memory_format="channels_last",
    )  # fmt: skip
    config = replace(choose((p,), SM_90).config)
    assert config.family == "gemm" and not moments_refusal(replace(p, moments="batch"), config)
    refused = moments_refusal(replace(p, moments="samples"), config)
    assert refused is not None and "25 pixels of a sample" in refused
    few = tuple(LocalDim(name, 2, 2, 3, 1, 1, 1) for name in "HW")
    p = replace(p, dims=few, moments="samples")
    refused = moments_refusal(p, choose((replace(p, moments=""),), SM_90).config)
    assert refused is not None and "no fewer bytes" in refused


class Normed(nn.Module):
    """What is normed where it is made; what another reads first; what has a bias; groups; by group, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(16, 16, 3, padding=1, bias=n in (2, 4), groups=4 if n == 3 else 1) for n in range(5)
        )
        self.norms = nn.ModuleList([*(nn.BatchNorm2d(16) for _ in range(4)), nn.GroupNorm(4, 16)])

    def forward(self, x: Tensor) -> Tensor:
        for n, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = conv(x)
            x = norm(torch.tanh(y) if n == 1 else y)
        return x + y


def test_which_convolutions_make_them() -> None:
    graph, _ = graph_of(Normed(), (torch.randn(4, 16, 6, 6),), name="normed")
    one = compile_network(graph, Grid((("N", 2),)), target=SM_90)
    uses = [use for file in one.kernels if file.moments for use in file.uses]
    wanted = {"convs_0": 2, "convs_2": 2, "convs_4": 2}  # float32's products, and TF32's
    assert Counter(row for row, _ in uses) == wanted
    assert {row for f in one.kernels if f.moments == "samples" for row, _ in f.uses} == {"convs_2", "convs_4"}  # alike
    rimmed = [f for f in compile_network(graph, Grid((("H", 2),)), target=SM_90).kernels if f.rim and f.moments]
    assert Counter(row for file in rimmed for row, _ in file.uses) == wanted
