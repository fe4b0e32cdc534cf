"""Layers element by element and normalisation on the mesh: against float64, events against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.errors import InputError
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.pointwise.normalise import (
    Norm,
    norm_counts,
    norm_seconds,
    run_norm,
    run_norm_backward,
    scale_program,
    sums_program,
)
from convgen.sw26010.pointwise.stream import Kind, Stream, run_stream, stream_counts, stream_program, stream_seconds

dtypes = st.sampled_from(["float32", "float64"])
EXPECTED: dict[Kind, Any] = {
    "relu": lambda x: {"y": np.maximum(x, 0)},
    "relu_backward": lambda x, dy: {"dx": np.where(x > 0, dy, 0)},
    "add": lambda a, b: {"y": a + b},
    "momentum": lambda w, v, g: {"w": w - (0.9 * v + 0.01 * g), "v": 0.9 * v + 0.01 * g},
}
READS = {"relu": 1, "relu_backward": 2, "add": 2, "momentum": 3}


@settings(max_examples=40)
@given(st.sampled_from(list(EXPECTED)), st.integers(1, 3000), dtypes, st.integers(0, 99))
def test_streams_are_what_numpy_says(kind: Kind, elements: int, dtype: Any, seed: int) -> None:
    stream = Stream(kind, elements, dtype)
    rng = np.random.default_rng(seed)
    operands = [rng.standard_normal(elements).astype(dtype) for _ in range(READS[kind])]
    found, counts = run_stream(stream, *operands)
    for name, wanted in EXPECTED[kind](*(o.astype(np.float64) for o in operands)).items():
        assert np.abs(found[name] - wanted).max() <= (1e-15 if dtype == "float64" else 2.0**-22) * 4
    assert counts == stream_counts(stream)


def test_long_streams_come_in_pieces_that_fit() -> None:
    stream = Stream("momentum", 64 * 2560 + 4 * 63, "float64")
    assert stream.piece == 2560 and stream.ldm_bytes <= 60 * 1024
    _, counts = run_stream(stream, *np.zeros((3, stream.elements)))
    assert counts == stream_counts(stream)
    assert counts.get_bytes == 3 * 8 * stream.elements and counts.put_bytes == 2 * 8 * stream.elements
    rates = taken_rates()
    assert stream_seconds(stream, rates) > 5 * 8 * stream.elements / rates.group.dma_bytes_per_s
    assert "cpe.momentum(w, v, g, 0.01, 0.9)" in stream_program(stream)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), dtypes, st.integers(0, 99))
def test_normalisation_is_pytorch_s(n: int, c: int, pixels: int, dtype: Any, seed: int) -> None:
    check_norm(Norm(n, c, pixels, dtype), seed)


@pytest.mark.parametrize("pixels", [3841, 7683])
def test_long_planes_come_in_pieces(pixels: int) -> None:
    check_norm(Norm(1, 3, pixels, "float32"), 0)


def check_norm(norm: Norm, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal(norm.shape).astype(norm.dtype) for _ in range(2))
    scale, shift = rng.standard_normal(norm.c), rng.standard_normal(norm.c)
    y, forth = run_norm(norm, x, scale, shift)
    dx, back = run_norm_backward(norm, x, dy, scale)
    assert forth == norm_counts(norm, backward=False) and back == norm_counts(norm, backward=True)
    if norm.n * norm.pixels < 2:
        return  # PyTorch refuses one value a channel
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    weights = (torch.tensor(scale), torch.tensor(shift))
    wanted = torch.nn.functional.batch_norm(leaf, None, None, *weights, training=True, eps=norm.eps)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    assert leaf.grad is not None
    # Few values a channel may be close together, and the quotient by their spread grows.
    spread = float(1 / np.sqrt(x.astype(np.float64).var(axis=(0, 2)).min() + norm.eps))
    unit = (1e-13 if norm.dtype == "float64" else 1e-6) * max(1.0, spread) ** 3
    assert np.abs(y - wanted.detach().numpy()).max() <= unit
    assert np.abs(dx - leaf.grad.numpy()).max() <= unit * 10


def test_normalisation_reads_x_twice_and_writes_once() -> None:
    norm, rates = Norm(4, 64, 784), taken_rates()
    elements = 4 * 64 * 784
    forth, back = norm_counts(norm, backward=False), norm_counts(norm, backward=True)
    assert forth.dma_bytes == 3 * 4 * elements + 64 * 4 * 8
    assert back.dma_bytes == 5 * 4 * elements + 64 * 5 * 8
    assert norm_seconds(norm, rates, backward=True) > norm_seconds(norm, rates, backward=False)
    assert "add_products" in sums_program(norm, backward=True) and "cpe.scale(" in scale_program(norm, backward=False)


def test_what_is_no_layer_is_refused() -> None:
    with pytest.raises(InputError, match="0 elements"):
        Stream("relu", 0)
    with pytest.raises(InputError, match="reads a, b"):
        run_stream(Stream("add", 4), np.zeros(4))
    with pytest.raises(InputError, match="has 3 elements"):
        run_stream(Stream("relu", 4), np.zeros(3))
    with pytest.raises(InputError, match="extent below 1"):
        Norm(1, 0, 1)
    with pytest.raises(InputError, match="the normalisation has"):
        run_norm(Norm(1, 2, 3), np.zeros((1, 3, 2)), np.ones(2), np.ones(2))
