"""What layers between convolutions do on the mesh: PyTorch's results in float64, events equal to closed forms.

`run_operation` itself compares a run's events with the closed form; the counts that come back are compared once more.
"""

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
from convgen.sw26010.operations.batch_norm import Norm, run_norm, run_norm_backward
from convgen.sw26010.operations.channels import ChannelMap, ChannelSums
from convgen.sw26010.operations.concatenation import Concatenation
from convgen.sw26010.operations.inner_product import InnerProduct, run_inner_product
from convgen.sw26010.operations.local_response import LocalResponse
from convgen.sw26010.operations.rows import RowShift, RowSums
from convgen.sw26010.operations.softmax_loss import MOST_CLASSES, SoftmaxLoss
from convgen.sw26010.operations.stream import Kind, Stream
from convgen.sw26010.operations.task import Operation, operation_seconds, run_operation

dtypes = st.sampled_from(["float32", "float64"])
seeds = st.integers(0, 99)
CONSTANTS: dict[Kind, tuple[float, ...]] = {
    "times": (0.25,), "dropout": (1 / 0.7,), "sgd": (0.1, 0.01), "momentum": (0.1, 0.9, 0.01),
}  # fmt: skip
EXPECTED: dict[Kind, Any] = {
    "relu": lambda x: {"y": np.maximum(x, 0)},
    "relu_backward": lambda x, dy: {"dx": np.where(x > 0, dy, 0)},
    "add": lambda a, b: {"y": a + b},
    "times": lambda x: {"y": x / 4},
    "dropout": lambda x, mask: {"y": x * mask / 0.7},
    "sgd": lambda w, g: {"w": w - 0.1 * (g + 0.01 * w)},
    "momentum": lambda w, v, g: {"w": w - 0.1 * (0.9 * v + g + 0.01 * w), "v": 0.9 * v + g + 0.01 * w},
}
READS = {"relu": 1, "relu_backward": 2, "add": 2, "times": 1, "dropout": 2, "sgd": 2, "momentum": 3}


def draws(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def ran(operation: Operation, *operands: Any) -> dict[str, Any]:
    """Its results; events are the closed form's, and it takes time."""
    found, counts = run_operation(operation, *operands)
    assert counts == operation.cost() and operation_seconds(operation, taken_rates()) > 0
    return found


def near(found: Any, wanted: Any, dtype: str, unit: float = 1e-12) -> None:
    """Within `unit` in double, or 2^28 times as far in float."""
    wanted = wanted.detach().numpy() if isinstance(wanted, torch.Tensor) else np.asarray(wanted)
    error = np.abs(found.reshape(wanted.shape) - wanted).max()
    assert error <= (unit if dtype == "float64" else unit * 2.0**28) * max(1.0, np.abs(wanted).max())


@settings(max_examples=40)
@given(st.sampled_from(list(EXPECTED)), st.integers(1, 3000), dtypes, seeds)
def test_streams_are_what_numpy_says(kind: Kind, elements: int, dtype: Any, seed: int) -> None:
    stream = Stream(kind, elements, dtype, CONSTANTS.get(kind, ()))
    operands = draws(seed, dtype, *[(elements,)] * READS[kind])
    found = ran(stream, *operands)
    for name, wanted in EXPECTED[kind](*(o.astype(np.float64) for o in operands)).items():
        near(found[name], wanted, dtype, 1e-14)


def test_long_streams_come_in_pieces_that_fit() -> None:
    stream = Stream("momentum", 64 * 2560 + 4 * 63, "float64", (0.01, 0.9, 0.0))
    assert stream.piece == 2560 and stream.ldm_bytes <= 60 * 1024
    _, counts = run_operation(stream, *np.zeros((3, stream.elements)))
    assert counts.get_bytes == 3 * 8 * stream.elements and counts.put_bytes == 2 * 8 * stream.elements
    assert "cpe.momentum(w, v, g, 0.01, 0.9, 0.0)" in stream.program()


def test_steps_of_sgd_are_pytorch_s() -> None:
    w, *gradients = draws(0, "float64", *[(301,)] * 4)
    for momentum in (0.0, 0.9):
        leaf = torch.nn.Parameter(torch.tensor(w))
        solver = torch.optim.SGD([leaf], lr=0.1, momentum=momentum, weight_decay=0.01)
        mine, v = w, np.zeros(301)
        for g in gradients:
            leaf.grad = torch.tensor(g)
            solver.step()
            if momentum:
                made = ran(Stream("momentum", 301, "float64", (0.1, 0.9, 0.01)), mine, v, g)
                mine, v = made["w"], made["v"]
            else:
                mine = ran(Stream("sgd", 301, "float64", (0.1, 0.01)), mine, g)["w"]
            near(mine, leaf, "float64", 1e-14)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 20), st.integers(1, 40), dtypes, seeds)
def test_batch_normalisation_is_pytorch_s(n: int, c: int, pixels: int, dtype: Any, seed: int) -> None:
    check_norm(Norm(n, c, pixels, dtype), seed)


@pytest.mark.parametrize(("n", "pixels"), [(1, 3841), (9, 7683)])
def test_long_planes_come_in_pieces(n: int, pixels: int) -> None:
    check_norm(Norm(n, 3, pixels, "float32"), 0)


def check_norm(norm: Norm, seed: int, mean: float = 0.0) -> None:
    x, dy = draws(seed, norm.dtype, *[(norm.n, norm.c, norm.pixels)] * 2)
    x += norm.pixels**0 * np.asarray(mean, norm.dtype)
    scale, shift = draws(seed + 1, "float64", (norm.c,), (norm.c,))
    y, moments, forth = run_norm(norm, x, scale, shift)
    found, back = run_norm_backward(norm, x, dy, scale, moments)
    assert forth == norm.cost(backward=False) and back == norm.cost(backward=True)
    exact = x.astype(np.float64)
    near(moments[:, 1], exact.mean(axis=(0, 2)), "float64", 1e-14)
    near(moments[:, 2], np.square(exact - exact.mean(axis=(0, 2), keepdims=True)).sum(axis=(0, 2)), "float64", 1e-10)
    if norm.n * norm.pixels < 2:
        return  # PyTorch refuses one value a channel
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    weights = [torch.tensor(w, requires_grad=True) for w in (scale, shift)]
    wanted = F.batch_norm(leaf, None, None, *weights, training=True, eps=norm.eps)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    # Few values a channel may be close together, and the quotient by their spread grows.
    spread = float(1 / np.sqrt(exact.var(axis=(0, 2)).min() + norm.eps))
    unit = 1e-14 * max(1.0, spread) ** 3 * (1 + abs(mean))
    near(y, wanted, norm.dtype, unit)
    for name, gradient in zip(("dx", "dscale", "dshift"), (leaf.grad, *(w.grad for w in weights)), strict=True):
        near(found[name], gradient, norm.dtype, 10 * unit)


def test_a_large_mean_leaves_the_variance_its_digits() -> None:
    check_norm(Norm(5, 9, 33, "float64"), 0, mean=1e6)


def test_normalisation_reads_x_twice_and_writes_once() -> None:
    norm, rates = Norm(4, 64, 784), taken_rates()
    elements = 4 * 64 * 784
    forth, back = norm.cost(backward=False), norm.cost(backward=True)
    assert forth.dma_bytes == 3 * 4 * elements + 64 * 8 * (3 + 8 * 3)
    assert back.dma_bytes == 5 * 4 * elements + 64 * 8 * (2 + 8 + 8 * 4)
    assert norm.seconds(rates, backward=True) > norm.seconds(rates, backward=False)


@settings(max_examples=20)
@given(st.integers(1, 10), st.integers(1, 20), st.integers(1, 60), dtypes, seeds)
def test_a_bias_of_planes_and_its_gradient(n: int, c: int, pixels: int, dtype: Any, seed: int) -> None:
    x, b = draws(seed, dtype, (n, c, pixels), (c, 1))
    y = ran(ChannelMap(n, c, pixels, dtype, "shift"), x, b)["y"]
    near(y, x.astype(np.float64) + b[None], dtype, 1e-14)
    near(ran(ChannelSums(n, c, pixels, dtype, "total"), x)["sums"][:, 0], x.sum(axis=(0, 2), dtype=np.float64), dtype)


@st.composite
def responses(draw: Any) -> LocalResponse:
    n, c, pixels = draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(1, 70))
    numbers = draw(st.floats(1e-4, 2.0)), draw(st.floats(0.1, 2.0)), draw(st.floats(0.5, 2.0))
    return LocalResponse(n, c, pixels, draw(st.integers(1, 12)), *numbers, draw(dtypes))


@settings(max_examples=30)
@given(responses(), seeds)
def test_local_response_normalisation_is_pytorch_s(layer: LocalResponse, seed: int) -> None:
    check_response(layer, seed)


@pytest.mark.parametrize(("c", "size"), [(96, 5), (700, 5), (2000, 4), (9000, 3), (60, 60), (30, 200)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_many_channels_come_in_blocks_with_those_beside_them(c: int, size: int, dtype: Any) -> None:
    layer = LocalResponse(2, c, 33, size, 0.5, 0.75, 1.0, dtype)
    check_response(layer, 0)


def check_response(layer: LocalResponse, seed: int) -> None:
    shape = layer.n, layer.c, layer.pixels
    x, dy = draws(seed, layer.dtype, shape, shape)
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    wanted = F.local_response_norm(leaf, layer.size, layer.alpha, layer.beta, layer.k)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    near(ran(layer, x)["y"], wanted, layer.dtype)
    back = LocalResponse(*shape, layer.size, layer.alpha, layer.beta, layer.k, layer.dtype, backward=True)
    near(ran(back, x, dy)["dx"], leaf.grad, layer.dtype)


def test_alexnet_s_normalisation_has_all_channels_and_long_transfers() -> None:
    layer = LocalResponse(16, 96, 55 * 55, 5)
    assert layer.block == 96 and min(layer.cost().get) >= 100
    assert layer.cost().get_bytes == layer.cost().put_bytes == 4 * 16 * 96 * 55 * 55


@settings(max_examples=30)
@given(st.integers(1, 150), st.integers(1, 70), dtypes, seeds)
def test_softmax_with_cross_entropy_is_pytorch_s(n: int, classes: int, dtype: Any, seed: int) -> None:
    (x,) = draws(seed, dtype, (n, classes))
    labels = np.random.default_rng(seed).integers(-1, classes, (n, 1))  # -1: doesn't count
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(leaf, torch.tensor(labels[:, 0]), reduction="sum", ignore_index=-1)
    (loss * 3).backward()
    found = ran(SoftmaxLoss(n, classes, dtype, -1), x, labels)
    near(found["loss"][0, 0], loss, dtype)
    assert found["loss"][0, 1] == (labels >= 0).sum()
    near(found["p"], leaf.softmax(1), dtype)
    back = SoftmaxLoss(n, classes, dtype, -1, backward=True)
    near(ran(back, found["p"], labels, [[3.0]])["dx"], leaf.grad, dtype)


@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 60), st.integers(1, 60), dtypes, seeds)
def test_inner_products_are_pytorch_s(n: int, inputs: int, outputs: int, dtype: Any, seed: int) -> None:
    x, w, dy = draws(seed, dtype, (n, inputs), (outputs, inputs), (n, outputs))
    exact_x, exact_w, exact_dy = (t.astype(np.float64) for t in (x, w, dy))
    for phase, first, second, wanted in (
        ("forward", x, w, exact_x @ exact_w.T),
        ("backward_data", dy, w, exact_dy @ exact_w),
        ("backward_filter", dy, x, exact_dy.T @ exact_x),
    ):
        product = InnerProduct(n, inputs, outputs, phase, dtype)  # type: ignore[arg-type]
        done = run_inner_product(product, first, second)
        assert done.counts == product.cost() and product.seconds(taken_rates()) > 0
        near(done.c, wanted, dtype)
    with pytest.raises(InputError, match=f"backward_filter of {inputs} to {outputs} reads"):
        run_inner_product(product, x[:, :0], w)


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 90), dtypes, seeds)
def test_a_bias_of_rows_and_its_gradient(rows: int, columns: int, dtype: Any, seed: int) -> None:
    check_rows(rows, columns, dtype, seed)


def test_long_rows_come_in_strips_and_many_rows_in_tiles() -> None:
    check_rows(3, 4097, "float32", 0)
    check_rows(1100, 2200, "float64", 0)


def check_rows(rows: int, columns: int, dtype: Any, seed: int) -> None:
    x, b = draws(seed, dtype, (rows, columns), (columns,))
    near(ran(RowShift(rows, columns, dtype), x, b)["y"], x.astype(np.float64) + b, dtype, 1e-14)
    near(ran(RowSums(rows, columns, dtype), x)["sums"], x.sum(axis=0, dtype=np.float64), "float64")


@settings(max_examples=20)
@given(st.integers(1, 5), st.lists(st.integers(1, 900), min_size=1, max_size=4), dtypes, seeds)
def test_concatenation_and_back(n: int, parts: list[int], dtype: Any, seed: int) -> None:
    check_concatenation(n, tuple(parts), dtype, seed)


def test_long_parts_come_in_pieces() -> None:
    check_concatenation(70, (9000, 1, 16000), "float32", 0)
    check_concatenation(64, (7681, 15361), "float64", 0)


def check_concatenation(n: int, parts: tuple[int, ...], dtype: Any, seed: int) -> None:
    operands = draws(seed, dtype, *[(n, part) for part in parts])
    together = Concatenation(n, parts, dtype)
    whole = ran(together, *operands)["whole"]
    assert np.array_equal(whole, np.concatenate(operands, axis=1)) and together.piece * whole.itemsize <= 60 * 1024
    found = ran(Concatenation(n, parts, dtype, backward=True), whole)
    assert all(np.array_equal(part, given) for part, given in zip(found.values(), operands, strict=True))


def test_large_scores_do_not_overflow() -> None:
    found = ran(SoftmaxLoss(1, 3, "float64"), [[1e4, 0.0, -1e4]], [[2]])
    assert found["loss"][0, 0] == 2e4 and np.array_equal(found["p"], [[1.0, 0.0, 0.0]])


def test_what_is_no_operation_is_refused() -> None:
    for make, words in (
        (lambda: Stream("relu", 0), "extents from 1"),
        (lambda: Stream("relu", 4, "float16"), "extents from 1, of float32 or float64"),  # type: ignore[arg-type]
        (lambda: Stream("momentum", 4), "momentum has no constants"),
        (lambda: Stream("times", 4, constants=(float("nan"),)), "times has nan"),
        (lambda: run_operation(Stream("add", 4), np.zeros(4)), "reads a, b; 1 operands are given"),
        (lambda: run_operation(Stream("relu", 4), np.zeros(3)), r"x is \[3\], the Stream has \[4\]"),
        (lambda: ChannelSums(1, 0, 1, "float64"), "extents from 1"),
        (lambda: run_norm(Norm(1, 2, 3), np.zeros((1, 3, 2)), np.ones(2), np.ones(2)), "ChannelSums has"),
        (lambda: LocalResponse(1, 4, 4, 3, beta=float("inf")), "beta inf"),
        (lambda: LocalResponse(1, 9000, 4, 4000, backward=True), "don't fit into LDM"),
        (lambda: Concatenation(2, ()), "extents from 1"),
        (lambda: RowSums(2, 0), "extents from 1"),
        (lambda: SoftmaxLoss(1, MOST_CLASSES + 1), "don't fit into LDM"),
        (lambda: run_operation(SoftmaxLoss(1, 3), np.zeros((1, 3)), [[3]]), "label 3 is none of 3 classes"),
        (lambda: run_operation(SoftmaxLoss(1, 3), np.zeros((1, 3)), [[0.5]]), "label 0.5 is none of 3 classes"),
    ):
        with pytest.raises(InputError, match=words):
            make()
