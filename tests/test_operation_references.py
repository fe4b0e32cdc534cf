"""What a row is called after is what it computes: references against torch's own operators; and numbers drawn, merged
and cut where torch has no operator to compare with.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from brute import gather, results, run, scatter, stand
from operation_cases import (
    CASES,
    a_transposed_convolution,
    attention,
    check,
    cross_entropy,
    filled,
    max_pool,
    normal,
    place,
    spatial,
    whole,
)

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.relations import Taps
from convgen.operations.attention import Attention
from convgen.operations.averaged import Averaged
from convgen.operations.contraction import linear, matrix_product
from convgen.operations.convolution import Convolution
from convgen.operations.dropout import Dropout, philox, words
from convgen.operations.indexing import Embedding, IndexRows
from convgen.operations.losses import CrossEntropy, SquaredError
from convgen.operations.max_pooling import MaxPool
from convgen.operations.moments import Deviation, Moments, Normalise
from convgen.operations.pixels import PixelShuffle, PixelUnshuffle
from convgen.operations.pointwise import FUNCTIONS, affine, prelu
from convgen.operations.row import At, standing
from convgen.operations.rows import PadMode, Rolled, Wrapped, flipped, padded, sliced
from convgen.operations.running import RunningStatistics
from convgen.operations.transposed import TransposedConvolution, transposed_convolution
from convgen.operations.views import View, matches

DRAWS = 30 * int(os.environ.get("DRAWS", "1"))


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    found, right = found.detach(), right.detach()
    return found.shape == right.shape and torch.allclose(found, right, rtol=0, atol=1e-11 * float(right.abs().max()))


def test_convolutions() -> None:
    """Padding of two sides, strides, dilation, groups, one to three dimensions."""
    draw = Random("convolutions")
    for dims in (1, 2, 3) * (DRAWS // 10):
        groups, sides = draw.choice((1, 2, 3)), spatial(draw, dims, 6)
        conv = Conv(2, 2 * groups, 3 * groups, sides, groups)
        forward = Convolution("forward", conv)
        x, w = (normal(draw, forward.shapes[t]).requires_grad_() for t in "xw")
        wide = F.pad(x, [p for s in reversed(sides) for p in (s.pad_lo, s.pad_hi)])
        stride, dilation = [s.stride for s in sides], [s.dilation for s in sides]
        y = (F.conv1d, F.conv2d, F.conv3d)[dims - 1](wide, w, None, stride, 0, dilation, groups)
        assert same(forward.reference(x, w)[0], y)
        dy = normal(draw, tuple(y.shape))
        dx, dw = torch.autograd.grad(y, [x, w], dy)
        assert same(Convolution("backward_data", conv).reference(dy, w)[0], dx)
        assert same(Convolution("backward_filter", conv).reference(dy, x)[0], dw)


def test_transposed_convolutions() -> None:
    draw = Random("transposed")
    for _ in range(DRAWS):
        operation, _ = a_transposed_convolution(draw)
        assert isinstance(operation, TransposedConvolution)
        conv, forward = operation.conv, TransposedConvolution("forward", operation.conv)
        x, w = (normal(draw, o.shape) for o in forward.signatures[0].inputs)
        more = [s.output_padding for s in conv.spatial]
        back = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(more) - 1]
        sides = ([getattr(s, side) for s in conv.spatial] for side in ("stride", "pad_lo", "dilation"))
        stride, padding, dilation = sides
        assert same(forward.reference(x, w)[0], back(x, w, None, stride, padding, more, conv.groups, dilation))


def test_output_padding_only_adds_rows_behind() -> None:
    one = transposed_convolution((1, 1, 4), 1, (Spatial("W", 4, 3, stride=2, pad_lo=1, pad_hi=1),), (1,))
    x, w = torch.ones(1, 1, 4, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    (y,) = one.reference(x, w)
    assert y.shape[2] == 8
    assert y.flatten().tolist() == [1, 2, 1, 2, 1, 2, 1, 1]
    assert (one.conv.spatial[0].extent, one.conv.spatial[0].out) == (8, 4)


def test_largest_of_windows() -> None:
    """With ceil_mode: windows as many as torch makes."""
    draw = Random("max pool")
    for _ in range(DRAWS):
        operation, (x,) = max_pool(draw)
        assert isinstance(operation, MaxPool)
        kernel, stride, pad, dilation = (
            [getattr(t, side) for t in operation.taps] for side in ("kernel", "stride", "pad", "dilation")
        )
        pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
        right = {ceil: pool(x, kernel, stride, pad, dilation, ceil) for ceil in (False, True)}
        assert any(torch.equal(operation.reference(x)[0], y) for y in right.values() if y.shape[2:] == operation.out)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_padding(mode: PadMode) -> None:
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).view(2, 3, 4, 5)
    for h, w in (((1, 2), (0, 3)), ((3, 0), (4, 1)), ((0, 0), (2, 2))):
        (y,) = padded(x.shape, [(0, 0), (0, 0), h, w], mode, 7.0).reference(x)
        assert torch.equal(y, F.pad(x, [*w, *h], mode, 7.0 if mode == "constant" else None))


def test_padding_round_the_end() -> None:
    x = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4)
    for below, above in ((1, 2), (3, 0), (0, 4), (4, 4)):
        (y,) = Wrapped((x.shape,) * 3, 2, below, above).reference(x, x, x)
        assert torch.equal(y, F.pad(x, (below, above), "circular"))


def test_rows_put_elsewhere() -> None:
    x = torch.arange(3 * 7, dtype=torch.float64).view(3, 7)
    for start, stop, step in ((0, 7, 1), (1, 6, 2), (2, 7, 3), (6, 7, 2)):
        assert torch.equal(sliced(x.shape, 1, start, stop, step).reference(x)[0], x[:, start:stop:step])
    for by in (-9, -1, 0, 3, 7, 12):
        assert torch.equal(Rolled((x.shape,) * 2, 1, by).reference(x, x)[0], x.roll(by, 1))
    assert torch.equal(flipped(x.shape, 1).reference(x)[0], x.flip(1))
    assert torch.equal(padded(x.shape, [(0, 0), (-2, -1)], "constant").reference(x)[0], x[:, 2:-1])


def test_pixel_shuffles() -> None:
    x = normal(Random(0), (2, 12, 6, 4))
    assert torch.equal(PixelShuffle((2, 12, 6, 4), 2).reference(x)[0], F.pixel_shuffle(x, 2))
    assert torch.equal(PixelUnshuffle((2, 12, 6, 4), 2).reference(x)[0], F.pixel_unshuffle(x, 2))


def test_views_fall_into_the_shortest_matches() -> None:
    assert [(r.x, r.y) for r in matches((4, 1, 6, 5), (2, 2, 30))] == [((0,), (0, 1)), ((2, 3), (2,))]
    assert [(r.x, r.y) for r in matches((2, 6), (3, 4))] == [((0, 1), (0, 1))]
    assert matches((1, 1), (1,)) == ()


def norm(of: Averaged, x: torch.Tensor, *, rms: bool = False) -> torch.Tensor:
    return Normalise(of, 1e-3, rms).reference(x, Moments(of).reference(x)[0])[0]


def test_norms() -> None:
    draw, shape = Random("norms"), (3, 6, 4, 5)
    x, w, b = normal(draw, shape), normal(draw, (6,)), normal(draw, (6,))
    mean, variance = normal(draw, (6,)), normal(draw, (6,)) ** 2
    batch = Averaged(shape, (1,))
    new = RunningStatistics(6, 0.2).reference(mean, variance, Moments(batch).reference(x)[0])
    right = F.batch_norm(x, mean, variance, w, b, True, 0.2, 1e-3)
    assert same(affine(shape).reference(norm(batch, x), w, b)[0], right)
    assert all(same(a, b) for a, b in zip(new, (mean, variance), strict=True))  # torch has changed its own
    assert same(norm(Averaged(shape, (0, 1)), x), F.instance_norm(x, eps=1e-3))
    assert same(norm(Averaged(shape, (0, 1), 3), x), F.group_norm(x, 2, eps=1e-3))
    assert same(norm(Averaged(shape, (0, 1, 2)), x), F.layer_norm(x, (5,), eps=1e-3))
    assert same(norm(Averaged(shape, (0, 1)), x), F.layer_norm(x, (4, 5), eps=1e-3))
    assert same(norm(Averaged(shape, (0, 1, 2)), x, rms=True), F.rms_norm(x, (5,), eps=1e-3))


def test_batch_norm_of_parts_of_the_samples() -> None:
    x = normal(Random("parts"), (4, 6, 5, 3))
    (parts,) = View((4, 6, 5, 3), (2, 2, 6, 5, 3)).reference(x)
    found = norm(Averaged((2, 2, 6, 5, 3), (0, 2)), parts).flatten(0, 1)
    assert same(found, torch.cat([F.batch_norm(half, None, None, training=True, eps=1e-3) for half in x.chunk(2)]))


def test_losses() -> None:
    draw = Random("losses")
    for _ in range(DRAWS):
        operation, (x, target, *weight) = cross_entropy(draw)
        assert isinstance(operation, CrossEntropy)
        loss, count = operation.reference(x, target, *weight)
        settings = {"ignore_index": operation.ignore, "reduction": "none" if operation.each else "mean"}
        if operation.logs:
            right = F.nll_loss(x, target, *weight, **settings)
        else:
            right = F.cross_entropy(x, target, *weight, **settings, label_smoothing=operation.smoothing)
        found = loss if operation.each else loss / count
        assert torch.allclose(found, right, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert same(SquaredError(operation.shape).reference(x, x + 2)[0], torch.tensor(4.0, dtype=torch.float64))


def test_attention_linear_prelu() -> None:
    draw = Random("attention")
    for _ in range(DRAWS):
        operation, (q, k, v, *mask) = attention(draw)
        assert isinstance(operation, Attention)
        if not mask:
            grouped = operation.heads != operation.heads_k
            settings: Any = {"is_causal": operation.causal, "enable_gqa": grouped, "scale": operation.scale}
            right = F.scaled_dot_product_attention(q, k, v, **settings)
            assert same(operation.reference(q, k, v)[0], right)
    x, w, m = normal(draw, (2, 3, 4)), normal(draw, (5, 4)), normal(draw, (2, 4, 6))
    assert same(linear((2, 3, 4), 5).reference(x, w)[0], F.linear(x, w))
    assert same(matrix_product((2,), 3, 4, 6).reference(x, m)[0], x @ m)
    assert same(prelu((2, 3, 4), 3).reference(x, w[0, :3])[0], F.prelu(x, w[0, :3]))


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "softplus", "hardswish", "relu6", "leaky_relu"])
def test_activations(name: str) -> None:
    x = normal(Random(name), (50,)) * 4
    assert torch.equal(FUNCTIONS[name](x), getattr(F, name)(x))


# ---------------------------------------------------------------- random numbers
@pytest.mark.parametrize("number", [int, torch.tensor], ids=["integers", "tensors"])
def test_philox_gives_its_authors_numbers(number: Any) -> None:
    """Random123's known answers of Philox4x32-10."""
    words = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    for counter, key, right in (
        ([0] * 4, [0] * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*words, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        found = philox(tuple(map(number, counter)), tuple(map(number, key)))  # pyright: ignore[reportArgumentType]
        assert tuple(map(int, found)) == right


def test_a_mask_is_of_its_seed_step_and_call() -> None:
    x = torch.ones(200, 50, dtype=torch.float64)

    def mask(seed: int, step: int, call: int = 0, p: float = 0.3) -> torch.Tensor:
        at = At({"d0": (0, 200), "d1": (0, 50)}, (), ())
        return Dropout((200, 50), p, call).local(0, at, x, torch.tensor([seed, step]))[0] > 0

    first = mask(1, 2)
    assert torch.equal(first, mask(1, 2))
    assert abs(float(first.double().mean()) - 0.7) < 0.02
    for other in (mask(2, 2), mask(1, 3), mask(1, 2, call=1), mask(1 + 2**40, 2), mask(-1, 2)):
        assert abs(float((first == other).double().mean()) - 0.58) < 0.03  # independent: 0.7^2 + 0.3^2


def test_words_are_those_of_an_element_s_number_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calls of ATen and by Python's integers, of blocks of wholes with up to 2**43 elements."""
    draw = Random("words")
    for n in range(3 * DRAWS):
        shape = tuple(draw.choice((1, 2, 3, 5, 2 ** draw.randint(3, 16) + 1)) for _ in range(draw.randint(0, 3)))
        lows = [draw.randrange(n) if draw.random() < 0.7 else 0 for n in shape]
        blocks = [(lo, min(n, lo + draw.randint(0, 4))) for lo, n in zip(lows, shape, strict=True)]
        blocks = [(0, n) if n < 6 and draw.random() < 0.5 else b for b, n in zip(blocks, shape, strict=True)]
        seed, step, call = draw.randrange(-(2**63), 2**63), draw.randrange(2**32), draw.randrange(9)
        numbers = torch.zeros((), dtype=torch.int64)
        for (lo, hi), n in zip(blocks, shape, strict=True):
            numbers = numbers[..., None] * n + torch.arange(lo, hi)
        key = (seed % 2**32, (seed >> 32) % 2**32)
        right = [philox((i % 2**32, i >> 32, step, call), key) for i in numbers.flatten().tolist()]
        at = At({f"d{d}": block for d, block in enumerate(blocks)}, (), ())
        monkeypatch.setattr("convgen.operations.dropout.BY_HAND", (0, 10**6)[n % 2])
        found = words(shape, at, torch.tensor([seed, step]), call)
        assert [tuple(w) for w in torch.stack(found, -1).view(-1, 4).tolist()] == right
        assert all(w.shape == numbers.shape for w in found)


# ---------------------------------------------------------------- moments in float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [10, 100, 1000])
def test_merged_moments_keep_the_variance_that_a_sum_of_squares_loses(ratio: int, dtype: torch.dtype) -> None:
    """Mean over deviation of 10 to 1000, of float32 and of bfloat16, over eight ranks: variances of what is given."""
    make = torch.Generator().manual_seed(0)
    exact = ratio + torch.randn(8, 4, 16, 16, generator=make, dtype=torch.float64)
    x, of = exact.to(dtype), Averaged((8, 4, 16, 16), (1,))
    right = x.double().var((0, 2, 3), correction=0)
    grid = Grid((("a", 8),))
    done = run(Moments(of), 0, {"d2": ("a",)}, [scatter(x, grid, (("a",), (), (), ()))])
    (value,) = results(done, [place(Random(0), grid, done.signature.results[0])])
    count, _, m2 = gather(value)
    assert m2.dtype == torch.float32
    merged = float(((m2 / count).double() - right).abs().div(right).max())
    parts = [x.float()[:, :, 2 * i : 2 * i + 2] for i in range(8)]
    total, squares = (torch.stack([(p**k).sum((0, 2, 3)) for p in parts]).sum(0) for k in (1, 2))
    summed = float(((squares / count - (total / count) ** 2).double() - right).abs().div(right).max())
    assert merged < 1e-6
    assert summed > 1e-6 * (ratio / 10) ** 2


def test_norms_of_half_precision_have_moments_of_float32() -> None:
    x, of = (100 + normal(Random(0), (64, 2))).bfloat16(), Averaged((64, 2), (1,))
    grid = Grid((("a", 2),))
    done = run(Moments(of), 0, {"d0": ("a",)}, [scatter(x, grid, ((), ()))])
    (m,) = results(done, [place(Random(0), grid, done.signature.results[0])])
    assert gather(m).dtype == torch.float32
    assert torch.allclose(gather(m)[1], x.float().mean(0))
    made = run(Normalise(of), 0, {}, [scatter(x, grid, ((), ())), m])
    assert made.outs[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["convolution", "transposed convolution", "linear, matrix product", "attention"])
def test_flops_are_shared_out(kind: str) -> None:
    """Where every axis has a role and none copies, ranks together do what one does; two flops a product. Rows that
    windows of several ranks hold count on each, with all of their taps."""
    draw = Random(f"flops {kind}")
    for _ in range(DRAWS):
        operation, _ = CASES[kind](draw)
        for way, signature in enumerate(operation.signatures):
            grid = Grid((("a", draw.randint(1, 3)), ("b", 2)))
            i, k = (draw.choice([i for i, _ in signature.extents]) for _ in grid.names)
            roles = {i: ("a", "b")} if i == k else {i: ("a",), k: ("b",)}
            if signature.fits(roles, grid.sizes):
                shared = [operation.work(way, stand(grid, r, signature, roles).at).flops for r in range(grid.ranks)]
                alone = operation.work(way, stand(Grid(()), 0, signature, {}).at).flops
                again = "convolution" in kind and any(i in "DHW" for i in roles) and sum(shared) > alone
                assert sum(shared) == alone or again, (operation, way, roles)
    one = linear((3, 5), 7)
    assert one.work(0, stand(Grid(()), 0, one.signatures[0], {}).at).flops == 2 * 3 * 5 * 7


def test_every_kind_has_a_reference_of_its_own_shape() -> None:
    """Results are as the signatures say, whichever way."""
    for kind, make in CASES.items():
        operation, given = make(Random(kind))
        for signature in operation.signatures:
            made = operation.reference(*given)
            assert [tuple(t.shape) for t in made] == [o.shape for o in signature.results], kind
            assert [o.integer for o in signature.results] == [not t.is_floating_point() for t in made], kind


def test_deviations_and_rows_by_number() -> None:
    draw = Random("deviations")
    x = normal(draw, (4, 6, 5))
    (m,) = Moments(Averaged((4, 6, 5), (1,))).reference(x)
    spread, mean = Deviation(Averaged((4, 6, 5), (1,)), 1.0, True, True).reference(m)
    assert same(spread, x.std((0, 2), keepdim=True)) and same(mean, x.mean((0, 2), keepdim=True))
    assert same(Deviation(Averaged((4, 6, 5), (1,)), 0.0).reference(m)[0], x.var((0, 2), correction=0))
    number = torch.tensor([[1, -2], [5, 0]])
    assert same(IndexRows((4, 6, 5), 1, (2, 2)).reference(x, number)[0], x[:, number])
    weight = normal(draw, (6, 3))
    assert same(Embedding(6, 3, (2, 2)).reference(weight, number % 6)[0], F.embedding(number % 6, weight))


def test_dilated_windows_that_step_over_all_rows_have_no_gradient() -> None:
    """ATen's own take it to another row, or out of the tensor."""
    draw = Random("stepped over")
    for _ in range(DRAWS):
        taps = (Taps(2, draw.randint(1, 3), 1, 2), Taps(draw.randint(1, 3), 2, 0, 1))
        shape = (draw.randint(1, 3), draw.randint(1, 3), 1, draw.randint(3, 6))
        out = (1, (shape[3] - taps[1].kernel) // 2 + 1)
        check(draw, *filled(draw, MaxPool(shape, taps, out), whole))


@pytest.mark.parametrize("name", CASES)
def test_what_operations_say_of_convolutions_in_them(name: str) -> None:
    """What prices, passes and kernels ask agrees: a convolution is one phase of a layer's, and computes itself."""
    for seed in range(8):
        operation, _ = CASES[name](Random(f"{name} {seed}"))
        signature = operation.signatures[0]
        at = standing(signature, {index: (0, extent) for index, extent in signature.extents})
        (found, *others) = [*operation.convolutions(0, at)] or [None]
        assert (found is not None) >= (operation.convolves is not None) >= operation.takes_steps
        if operation.convolves is not None and found is not None:
            phase, conv = operation.convolves
            assert not others and found[0].convolves == (conv.direct_phase(phase), conv.direct)
            assert operation.name == f"conv_{'transpose_' * conv.transposed}{phase}"
        steps, _, text = operation.kernel_steps
        assert bool(steps) == bool(text) and (not steps or found is not None)
