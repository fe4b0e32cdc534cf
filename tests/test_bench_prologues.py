"""Kernels that normalise and activate what they read, as bench/prologues.py counts them: their texts are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scripts import bench_script
from test_kernels_bound import square
from torch import nn

from convgen.kernels.choose import choose
from convgen.kernels.load import load_text
from convgen.kernels.source import kernel_module
from convgen.spec.target import read_target
from convgen.verify.interpreter import launch

study = bench_script("prologues")
SM_90 = read_target("cuda:sm_90")
VECTOR = "torch.empty(2 * s.channels, dtype=torch.float32, device='meta')"


@pytest.mark.parametrize("activation", ["", "relu", "silu"])
@pytest.mark.parametrize(("taps", "family"), [(3, "box"), (1, "gemm")])
def test_what_is_counted_is_the_convolution_of_what_a_norm_writes(taps: int, family: str, activation: str) -> None:
    p = square("forward", size=6, channels=64, kernel=taps, batch=2, filters=64)
    kernel = choose((p,), SM_90)
    assert kernel.config.family == family
    text = study.with_prologue(kernel_module([kernel]), family, activation)
    module = load_text(text.replace(VECTOR, "VECTOR"))
    generator = torch.Generator().manual_seed(taps)
    scale, shift = torch.randn(2, 64, generator=generator)
    module.VECTOR, module.launch = torch.cat([scale, shift]), launch
    x = torch.randn(2, 64, 6, 6, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)
    w = torch.randn(64, 64, taps, taps, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)
    y = torch.full((2, 64, 6, 6), torch.nan).bfloat16().contiguous(memory_format=torch.channels_last)
    rows = tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims)
    module.forward(x, w, y, module.Sizes(2, *rows, 64, 64, 1))
    normed = x.float() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    normed = {"": normed, "relu": torch.relu(normed), "silu": nn.functional.silu(normed)}[activation].bfloat16()
    wanted = nn.functional.conv2d(normed.double(), w.double(), padding=taps // 2)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=0.2)


def test_a_text_that_is_not_known_has_none() -> None:
    p = replace(square("forward", channels=64), dtype="float32")
    assert study.with_prologue(kernel_module([choose((p,), SM_90)]), "pointer", "relu") == ""
    assert study.with_prologue("", "box", "tanh") == ""
