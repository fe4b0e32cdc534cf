"""Pooling over overlapping windows on the mesh: PyTorch's results, events equal to closed forms, at odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from convgen.errors import InputError
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.operations.task import operation_seconds, run_operation
from convgen.sw26010.pooling.windows import Pool, Windows


@st.composite
def poolings(draw: Any) -> Windows:
    kernel = draw(st.integers(1, 5))
    padding = draw(st.integers(0, kernel // 2))
    least = max(1, kernel - 2 * padding)
    h, w = draw(st.integers(least, 17)), draw(st.integers(least, 17))
    kind, dtype = draw(st.sampled_from(["max", "average"])), draw(st.sampled_from(["float32", "float64"]))
    n, c, stride = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 6))
    return Windows(n, c, h, w, kernel, stride, padding, kind, dtype)


@settings(max_examples=40)
@given(poolings(), st.integers(0, 99))
def test_windows_are_pytorch_s(windows: Windows, seed: int) -> None:
    check(windows, seed)


def check(windows: Windows, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few different values: equal ones in a window are common.
    x = rng.integers(-3, 4, (windows.n, windows.c, windows.h, windows.w)).astype(windows.dtype)
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    k, s, p = windows.kernel, windows.stride, windows.padding
    wanted = F.max_pool2d(leaf, k, s, p) if windows.kind == "max" else F.avg_pool2d(leaf, k, s, p)
    dy = rng.standard_normal(windows.out_shape).astype(windows.dtype)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    y, dx = both(windows, x, dy)
    assert leaf.grad is not None
    unit = 1e-14 if windows.dtype == "float64" else 2.0**-21
    assert np.abs(y - wanted.detach().numpy()).max() <= unit * 4
    assert np.abs(dx - leaf.grad.numpy()).max() <= unit * k**2 * 4


def both(windows: Windows, x: Any, dy: Any) -> tuple[Any, Any]:
    """y and dx; events are those of the closed forms."""
    forward, backward = Pool(windows), Pool(windows, backward=True)
    made, forth = run_operation(forward, x)
    found, back = run_operation(backward, *((x,) if windows.kind == "max" else ()), dy)
    assert forth == forward.cost() and back == backward.cost()
    return made["y"], found["dx"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gradient_stays_inside_where_all_of_a_window_is_minus_infinity(dtype: Any) -> None:
    windows = Windows(1, 2, 7, 9, 3, 2, 1, "max", dtype)
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 9)).astype(dtype)
    x[0, 0, :3, :4], x[0, 0, 5:, 7:], x[0, 1] = -np.inf, -np.inf, -np.inf
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    wanted = F.max_pool2d(leaf, 3, 2, 1)
    dy = np.arange(1, wanted.numel() + 1, dtype=dtype).reshape(windows.out_shape)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    assert leaf.grad is not None
    y, dx = both(windows, x, dy)
    assert np.array_equal(y, wanted.detach().numpy().astype(dtype))
    assert np.array_equal(dx, leaf.grad.numpy().astype(dtype))


@pytest.mark.parametrize(("kind", "w"), [("max", 700), ("average", 1500)])
def test_large_planes_come_in_blocks_of_rows(kind: Any, w: int) -> None:
    windows = Windows(1, 2, 23, w, 3, 2, 1, kind)
    assert windows.together < windows.out_shape[2] and windows.together_backward < 23
    check(windows, 0)


def test_the_most_rows_fit_and_one_more_does_not() -> None:
    """Of planes of any height: not every number of rows is tried."""
    windows = Windows(1, 1, 2**31 - 1, 1, 2, 1, 1)
    assert (windows.together, windows.together_backward) == (2559, 1919)
    low = Windows(1, 1, 7, 3, 2, 1)
    assert (low.together, low.together_backward) == (6, 7)


def test_alexnet_s_pooling_reads_a_plane_once() -> None:
    windows = Windows(64, 96, 55, 55, 3, 2)
    counts = Pool(windows).cost()
    assert windows.together == 27 and counts.get == {55 * 55 * 4: 64 * 96 * 55 * 55 * 4}
    rates = taken_rates()
    back = Pool(windows, backward=True)
    assert operation_seconds(back, rates) > operation_seconds(Pool(windows), rates)
    assert "cpe.gather_max(" in back.program()


def test_what_cannot_be_pooled_is_refused() -> None:
    for arguments, words in (
        ((1, 1, 2, 2, 3, 1), "leaves a window without elements"),
        ((1, 1, 9, 9, 3, 1, 2), "padding 2"),
        ((1, 1, 4, 9000, 3, 1), "don't fit into LDM"),
        ((1, 0, 4, 4, 3, 1), "cannot pool"),
    ):
        with pytest.raises(InputError, match=words):
            Windows(*arguments)
    windows = Windows(1, 1, 4, 4, 2, 1)
    with pytest.raises(InputError, match="reads x, dy; 1 operands"):
        run_operation(Pool(windows, backward=True), np.zeros(windows.out_shape))
    with pytest.raises(InputError, match="the Pool has"):
        run_operation(Pool(windows), np.zeros((1, 1, 4, 5)))
