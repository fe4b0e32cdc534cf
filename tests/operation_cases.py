"""Random operations, a function a kind, and how one is checked on ranks.

Extents are ragged, small, and some are 1. Operands are whole numbers where an operation is linear, so that sums are
exact in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from random import Random
from typing import Any

import torch
from brute import Value, gather, gradients, results, run, scatter
from generate import uneven

from convgen.algebra.conv import SPATIAL_NAMES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.relations import Blocks, Taps
from convgen.algebra.signature import Operand, Signature
from convgen.operations.attention import Attention
from convgen.operations.average_pooling import AdaptiveAveragePool, AveragePool
from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import Centred, Coefficients
from convgen.operations.bias import AddBias, SumBias
from convgen.operations.bound import Bound
from convgen.operations.calls import Along, Apart, Slot
from convgen.operations.contraction import Contraction, linear, matrix_product
from convgen.operations.convolution import Convolution, Phase
from convgen.operations.dropout import Bernoulli, Dropout, Noise
from convgen.operations.fourier import Fourier
from convgen.operations.fused import Fused
from convgen.operations.indexing import Embedding, GridSample, IndexRows
from convgen.operations.linear_maps import Adjoint
from convgen.operations.local_response import LocalResponseNorm
from convgen.operations.losses import CrossEntropy, SquaredError
from convgen.operations.max_pooling import AdaptiveMaxPool, AdaptiveMaxPoolGradient, MaxPool
from convgen.operations.moments import Deviation, Moments, MomentsGradient, Normalise
from convgen.operations.pixels import PixelShuffle, PixelUnshuffle
from convgen.operations.pointwise import Pointwise, affine, bias, prelu
from convgen.operations.reductions import Reduce
from convgen.operations.row import Operation
from convgen.operations.rows import Concatenate, PadMode, Rolled, Wrapped, flipped, padded, sliced
from convgen.operations.running import PartStatistics, RunningMoments, RunningStatistics
from convgen.operations.softmax import Softmax
from convgen.operations.transposed import TransposedConvolution, transposed_convolution
from convgen.operations.upsampling import Upsample
from convgen.operations.views import Expand, Permute, View
from convgen.program.wide import faults as joined_faults
from convgen.program.wide import joined

Case = tuple[Operation, list[torch.Tensor]]
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")


# ---------------------------------------------------------------- operands
def generator(draw: Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(2**31))


def whole(draw: Random, shape: Sequence[int]) -> torch.Tensor:
    """Whole numbers, no two alike: a maximum has one place."""
    return (torch.randperm(prod(shape), generator=generator(draw)) - prod(shape) // 2).reshape(tuple(shape)).double()


def normal(draw: Random, shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator(draw), dtype=torch.float64)


def few(draw: Random, shape: Sequence[int], among: int) -> torch.Tensor:
    """Whole numbers from few, so that many are equal."""
    return torch.randint(0, among, tuple(shape), generator=generator(draw))


def filled(draw: Random, operation: Operation, numbers: Callable[[Random, Sequence[int]], torch.Tensor]) -> Case:
    return operation, [numbers(draw, o.shape) for o in operation.signatures[0].inputs]


# ---------------------------------------------------------------- kinds
def spatial(draw: Random, dims: int, most: int = 11) -> tuple[Spatial, ...]:
    found: list[Spatial] = []
    for name in SPATIAL_NAMES[dims]:
        while True:
            pads = (draw.randint(0, 3), draw.randint(0, 3))
            s = Spatial(name, draw.randint(1, most), draw.randint(1, 4), draw.randint(1, 3), *pads, draw.randint(1, 2))
            if s.out >= 1:
                break
        found.append(s)
    return tuple(found)


def dims_of(draw: Random) -> tuple[int, int]:
    """How many dimensions of rows, and how many rows at most."""
    return draw.choice(((1, 11), (1, 11), (2, 9), (2, 9), (3, 5)))


def shape_of(draw: Random, dims: int, most: int) -> tuple[int, ...]:
    return tuple(draw.randint(1, most if d > 1 else 4) for d in range(dims))


def convolution(draw: Random) -> Case:
    groups = draw.choice((1, 1, 2, 3, 4))
    per = [groups * draw.randint(1, 3) for _ in "CF"]
    conv = Conv(draw.randint(1, 4), *per, spatial(draw, *dims_of(draw)), groups)
    return filled(draw, Convolution(draw.choice(PHASES), conv), whole)


def bias_of_a_convolution(draw: Random) -> Case:
    """Added to y, and its gradient."""
    operation, _ = convolution(draw)
    assert isinstance(operation, Convolution)
    return filled(draw, draw.choice((AddBias, SumBias))(operation.conv), whole)


def a_transposed_convolution(draw: Random) -> Case:
    while True:
        dims, most = dims_of(draw)
        sides = tuple(
            Spatial(
                name, draw.randint(1, most // 2 + 1), draw.randint(1, 4), draw.randint(1, 3), p, p, draw.randint(1, 2)
            )
            for name in SPATIAL_NAMES[dims]
            for p in (draw.randint(0, 2),)
        )
        more = tuple(draw.randrange(max(s.stride, s.dilation)) for s in sides)
        groups = draw.choice((1, 1, 2, 3))
        shape = (draw.randint(1, 3), groups * draw.randint(1, 3), *(s.extent for s in sides))
        forward = transposed_convolution(shape, groups * draw.randint(1, 3), sides, more, groups)
        if min(s.extent for s in forward.conv.spatial) >= 1:
            return filled(draw, TransposedConvolution(draw.choice(PHASES), forward.conv), whole)


def pool_taps(
    draw: Random, ceil_mode: bool, dilations: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Taps, ...], tuple[int, ...]]:
    """Shape of x, taps, rows out."""
    while True:
        sides = spatial(draw, *dims_of(draw))
        if len(sides) == 3 and any(s.kernel > s.extent for s in sides):
            continue  # ATen's average in three dimensions refuses, padding or not
        taps = tuple(Taps(s.kernel, s.stride, min(s.pad_lo, s.kernel // 2), draw.choice(dilations)) for s in sides)
        out: list[int] = []
        for s, t in zip(sides, taps, strict=True):
            rows = s.extent + 2 * t.pad - t.reach - 1
            n = (-(-rows // t.stride) if ceil_mode else rows // t.stride) + 1
            out.append(n - (ceil_mode and (n - 1) * t.stride >= s.extent + t.pad))
        if min(out) >= 1 and all(s.extent + 2 * t.pad > t.reach for s, t in zip(sides, taps, strict=True)):
            shape = (draw.randint(1, 3), draw.randint(1, 4), *(s.extent for s in sides))
            return shape, taps, tuple(out)


def max_pool(draw: Random) -> Case:
    return filled(draw, MaxPool(*pool_taps(draw, draw.random() < 0.3, (1, 2))), whole)


def average_pool(draw: Random) -> Case:
    ceil_mode = draw.random() < 0.5
    found = pool_taps(draw, ceil_mode, (1,))
    divisor = draw.choice((None, None, 5)) if len(found[1]) > 1 else None
    return filled(draw, AveragePool(*found, ceil_mode, draw.random() < 0.5, divisor), whole)


def out_rows(draw: Random, dims: int, most: int) -> tuple[int, ...]:
    return draw.choice(((1,) * dims, tuple(draw.randint(1, most) for _ in range(dims))))


def adaptive_average_pool(draw: Random) -> Case:
    dims, most = dims_of(draw)
    shape = shape_of(draw, 2 + dims, most)
    return filled(draw, AdaptiveAveragePool(shape, out_rows(draw, dims, most)), whole)


def adaptive_max_pool(draw: Random) -> Case:
    dims, most = dims_of(draw)
    shape = shape_of(draw, 2 + dims, most)
    operation = AdaptiveMaxPool(shape, out_rows(draw, dims, min(most, 5)))
    return operation, [draw.choice((whole, partial(few, among=3)))(draw, shape).double()]


def adaptive_max_pool_gradient(draw: Random) -> Case:
    forward, (x,) = adaptive_max_pool(draw)
    assert isinstance(forward, AdaptiveMaxPool)
    y, number = forward.reference(x)
    return AdaptiveMaxPoolGradient(forward.shape, forward.out), [whole(draw, y.shape), number]


def upsample(draw: Random) -> Case:
    mode = draw.choice(("nearest", "nearest-exact", "linear", "bicubic", "linear-aa", "bicubic-aa"))
    dims, most = (2, 7) if "cubic" in mode or "aa" in mode else dims_of(draw)
    shape = shape_of(draw, 2 + dims, most)
    least = 1 + ("aa" in mode)  # of one column, or to one, ATen's own takes the rows for channels that come last
    shape = (*shape[:-1], max(shape[-1], least))
    corners = "nearest" not in mode and draw.random() < 0.5
    if draw.random() < 0.5:
        scales = tuple(draw.choice((0.7, 1.5, 2.0, 2.6)) if int(0.7 * n) >= least else 2.0 for n in shape[2:])
        size = tuple(int(n * s) for n, s in zip(shape[2:], scales, strict=True))
        return filled(draw, Upsample(shape, size, mode, corners, scales), whole)
    size = tuple(draw.randint(least, 2 * most) for _ in range(dims))
    return filled(draw, Upsample(shape, size, mode, corners), whole)


def adjoint(draw: Random) -> Case:
    of, _ = draw.choice((upsample, adaptive_average_pool, average_pool))(draw)
    assert isinstance(of, Upsample | AdaptiveAveragePool | AveragePool)
    return filled(draw, Adjoint(of), whole)


def pad(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(2, 4), 7)
    mode: PadMode = draw.choice(("constant", "reflect", "replicate"))
    most = [{"constant": 3, "reflect": n - 1, "replicate": 3}[mode] for n in shape]
    sides = [(draw.randint(0, min(m, 3)), draw.randint(0, min(m, 3))) if draw.random() < 0.7 else (0, 0) for m in most]
    if mode != "reflect" and draw.random() < 0.3:
        sides = [(draw.randint(-((n - 1) // 2), 2), draw.randint(-((n - 1) // 2), 2)) for n in shape]
    return filled(draw, padded(shape, sides, mode, draw.choice((0.0, 3.0))), whole)


def some_rows(draw: Random) -> Case:
    """Slice, flip."""
    shape = shape_of(draw, draw.randint(1, 4), 9)
    d = draw.randrange(len(shape))
    start = draw.randrange(shape[d])
    operation = draw.choice(
        (
            sliced(shape, d, start, draw.randint(start + 1, shape[d]), draw.randint(1, 3)),
            flipped(shape, d),
        )
    )
    return filled(draw, operation, whole)


def concatenate(draw: Random) -> Case:
    shape, count = shape_of(draw, draw.randint(1, 4), 5), draw.randint(1, 4)
    d = draw.randrange(len(shape))
    shapes = tuple((*shape[:d], draw.randint(1, 5), *shape[d + 1 :]) for _ in range(count))
    return filled(draw, Concatenate(shapes, d), whole)


def round_the_end(draw: Random) -> Case:
    """Circular padding, roll; of one tensor as several operands."""
    shape = shape_of(draw, draw.randint(1, 4), 9)
    d = draw.randrange(len(shape))
    if draw.random() < 0.5:
        operation: Operation = Wrapped((shape,) * 3, d, *(draw.randint(0, min(shape[d], 3)) for _ in range(2)))
    else:
        operation = Rolled((shape,) * 2, d, draw.randint(-2 * shape[d], 2 * shape[d]))
    return filled(draw, operation, whole)


def view(draw: Random) -> Case:
    """Primes, joined in one way and in another."""
    primes = [draw.choice((1, 2, 2, 3, 3, 5)) for _ in range(draw.randint(1, 5))]

    def joined() -> tuple[int, ...]:
        shape: list[int] = []
        for p in primes:
            if shape and draw.random() < 0.4:
                shape[-1] *= p
            else:
                shape.append(p)
        return tuple(shape)

    return filled(draw, View(joined(), joined()), whole)


def permute(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 5), 5)
    return filled(draw, Permute(shape, tuple(draw.sample(range(len(shape)), len(shape)))), whole)


def expand(draw: Random) -> Case:
    out = shape_of(draw, draw.randint(1, 4), 5)
    shape = tuple(draw.choice((1, n)) for n in out[draw.randrange(len(out)) :])
    return filled(draw, Expand(shape, out), whole)


def pixel_shuffle(draw: Random) -> Case:
    n, c, h, w = shape_of(draw, 4, 5)
    r = draw.randint(1, 3)
    both = (PixelShuffle((n, c * r * r, h, w), r), PixelUnshuffle((n, c, h * r, w * r), r))
    return filled(draw, draw.choice(both), whole)


def pointwise(draw: Random) -> Case:
    """Broadcast in any way: add, gate, quotients, activations."""
    shape = shape_of(draw, draw.randint(1, 4), 5)
    unary = ("relu", "root", "sigmoid", "tanh", "silu", "gelu", "softplus", "exp", "square", "relu6", "hardswish")
    function = draw.choice((*unary, "add", "sub", "mul", "mul", "leaky_relu"))
    operands = 2 if function in ("add", "sub", "mul") else 1
    shapes = [shape] * operands
    if operands > 1:
        shapes[draw.randrange(2)] = tuple(draw.choice((1, n)) for n in shape[draw.randrange(len(shape)) :])
    settings = (0.2,) if function == "leaky_relu" else ()
    return filled(draw, Pointwise(function, shape, tuple(shapes), (), settings), normal)


def bias_and_affine(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(2, 4), 5)
    d = draw.randrange(len(shape))
    both = (bias(shape, d), affine(shape, d), prelu(shape, draw.choice((1, shape[1]))))
    return filled(draw, draw.choice(both), whole)


def dropout(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 4), 4)
    seed = torch.tensor([draw.randrange(-(2**63), 2**63), draw.randrange(2**20)])
    return Dropout(shape, draw.choice((0.0, 0.1, 0.5, 0.9)), draw.randrange(100)), [whole(draw, shape), seed]


def averaged(draw: Random) -> Averaged:
    """Batch, instance, group, layer."""
    shape = shape_of(draw, draw.randint(2, 5), 5)
    group = draw.randint(1, 4)
    by_group = Averaged((shape[0], shape[1] * group, *shape[2:]), (0, 1), group)
    keep = draw.choice(((1,), (0, 1), tuple(range(draw.randint(0, len(shape) - 1)))))
    return draw.choice((Averaged(shape, keep), by_group))


def moments(draw: Random) -> Case:
    return filled(draw, Moments(averaged(draw)), whole)


def moments_given(draw: Random, of: Averaged) -> torch.Tensor:
    """Some moments: a count, a mean, a positive sum of squares."""
    m = normal(draw, of.moments)
    m[0], m[2] = of.count, m[2].abs() * of.count + 1
    return m


def parted(draw: Random) -> Averaged:
    """Parts of samples, and of rows too; some without elements."""
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(2, 4)))
    dims = tuple(d for d in range(len(shape)) if d != 1 and (d == 0 or draw.random() < 0.5))
    sizes = [tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 2))) for _ in dims]
    blocks = tuple((d, Blocks(shape[d], s)) for d, s in zip(dims, sizes, strict=True))
    return Averaged(shape, tuple(sorted((1, *dims))), 1, blocks)


def part_moments(draw: Random) -> Case:
    return filled(draw, Moments(parted(draw)), normal)


def parts_given(draw: Random, of: Averaged, operation: Any) -> Case:
    """Some moments, those of parts without elements zeros, as they come."""
    m = moments_given(draw, of)
    for k, d in enumerate(of.keep, 1):
        if d in of.blocks:
            there = torch.tensor([len(of.blocks[d].row(o)) > 0 for o in range(of.blocks[d].count)])
            m = m * there.view([-1 if j == k else 1 for j in range(m.dim())])
    return operation, [m if o.name == "m" else normal(draw, o.shape) for o in operation.signatures[0].inputs]


def part_moments_gradient(draw: Random) -> Case:
    of = parted(draw)
    return parts_given(draw, of, MomentsGradient(of))


def part_coefficients(draw: Random) -> Case:
    of = parted(draw)
    return parts_given(draw, of, Coefficients(of.extents, 1e-3, draw.random() < 0.7, draw.random() < 0.7))


def part_centred(draw: Random) -> Case:
    return filled(draw, Centred(parted(draw)), normal)


def part_statistics(draw: Random) -> Case:
    of = parted(draw)
    while of.least == 1:
        of = parted(draw)
    return parts_given(draw, of, PartStatistics(of))


def part_update(draw: Random) -> Case:
    return filled(draw, RunningStatistics(draw.randint(1, 6), 0.3, of_parts=True), normal)


def part_running(draw: Random) -> Case:
    return filled(draw, RunningMoments(parted(draw).extents), normal)


def moments_gradient(draw: Random) -> Case:
    of = averaged(draw)
    return MomentsGradient(of), [normal(draw, of.moments), moments_given(draw, of), normal(draw, of.shape)]


def normalise(draw: Random) -> Case:
    of = averaged(draw)
    return Normalise(of, 1e-3, draw.random() < 0.3), [normal(draw, of.shape), moments_given(draw, of)]


def running_statistics(draw: Random) -> Case:
    channels = draw.randint(1, 9)
    m = moments_given(draw, Averaged((2, channels, draw.randint(2, 5)), (1,)))
    return RunningStatistics(channels, 0.3), [normal(draw, (channels,)), normal(draw, (channels,)) ** 2, m]


def contraction(draw: Random) -> Case:
    lead = shape_of(draw, draw.randint(0, 3), 4)
    rows, inner, columns = (draw.randint(1, 5) for _ in range(3))
    scalar = Contraction("MK,MK->", (("M", rows), ("K", inner)))  # a sum over all indices
    kinds = (linear((*lead, inner), columns), matrix_product(lead, rows, inner, columns), scalar)
    return filled(draw, draw.choice(kinds), whole)


def fourier(draw: Random) -> Case:
    dims, most = dims_of(draw)
    shape = [*shape_of(draw, dims + 1, most)]
    d, kind, length = draw.randrange(dims + 1), draw.choice(("real", "complex", "back")), draw.randint(1, most)
    shape[d] = length // 2 + 1 if kind == "back" else length
    forward = kind == "real" or (kind == "complex" and draw.random() < 0.5)
    return filled(draw, Fourier(tuple(shape), d, kind, forward, draw.randrange(3), length), normal)


def softmax(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 4), 5)
    return filled(draw, Softmax(shape, draw.randrange(len(shape)), draw.random() < 0.5), normal)


def attention(draw: Random) -> Case:
    heads_k, batch = draw.randint(1, 3), draw.randint(1, 3)
    heads = heads_k * draw.choice((1, 1, 2, 3))
    masked = (draw.choice((1, batch)), draw.choice((1, heads))) if draw.random() < 0.4 else None
    sizes = [draw.randint(1, 7) for _ in range(4)]
    return filled(
        draw, Attention(batch, heads, heads_k, *sizes, masked, draw.random() < 0.4, draw.choice((None, 0.5))), normal
    )


def reduce(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 4), 5)
    over = tuple(sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape)))))
    return filled(draw, Reduce(draw.choice(("sum", "squares", "mean")), shape, over, draw.random() < 0.5), whole)


def cross_entropy(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(2, 4), 5)
    logs, each = draw.random() < 0.3, draw.random() < 0.3
    x, target = normal(draw, shape), few(draw, (shape[0], *shape[2:]), shape[1])
    ignore = draw.choice((-100, 0))
    target[few(draw, target.shape, 4) == 0] = ignore
    weight = [normal(draw, (shape[1],)).abs()] if draw.random() < 0.4 else []
    smoothing = 0.0 if logs else draw.choice((0.0, 0.1))
    return CrossEntropy(shape, ignore, smoothing, bool(weight), logs, each), [x, target, *weight]


def along(draw: Random) -> Case:
    """Maxima, sums along, sorting: dimensions that are whole."""
    shape = shape_of(draw, draw.randint(1, 4), 5)
    d = draw.randrange(len(shape))
    gone, one = (*shape[:d], *shape[d + 1 :]), (*shape[:d], 1, *shape[d + 1 :])
    k = draw.randint(1, shape[d])
    several = (*shape[:d], k, *shape[d + 1 :])
    op, args, results, integers = draw.choice(
        (
            ("amax", ((d,), True), (one,), ()),
            ("max.dim", (d, False), (gone, gone), (1,)),
            ("cumsum", (d, None), (shape,), ()),
            ("topk", (k, d, True, True), (several, several), (1,)),
            ("argmax", (d, False), (gone,), (0,)),
            ("logsumexp", ((d,), False), (gone,), ()),
        )
    )
    return filled(draw, Along(op, (Slot(0), *args), shape, (d,), results, integers), whole)


def apart(draw: Random) -> Case:
    """A recurrent layer, samples apart."""
    samples, steps, width, hidden = (draw.randint(1, 5) for _ in range(4))
    shapes = ((samples, steps, width), (1, samples, hidden), (3 * hidden, width), (3 * hidden, hidden))
    args = (Slot(0), Slot(1), (Slot(2), Slot(3)), False, 1, 0.0, True, False, True)
    dims, results = (("N", "", ""), ("", "N", "")), ((samples, steps, hidden), (1, samples, hidden))
    whole_ones = (("", ""),) * 2
    return filled(draw, Apart("gru.input", args, shapes, dims + whole_ones, results, dims, (("N", samples),)), normal)


def by_number(draw: Random) -> Case:
    """Gathered, scattered and added along a dimension; a product of two rows and a matrix for each result."""
    if draw.random() < 0.3:
        rows, a, b, made = (draw.randint(1, 5) for _ in range(4))
        shapes = ((rows, a), (rows, b), (made, a, b), (made,))
        dims = (("d0", ""), ("d0", ""), ("d1", "", ""), ("d1",))
        extents = (("d0", rows), ("d1", made))
        args = tuple(map(Slot, range(4)))
        return filled(draw, Apart("bilinear", args, shapes, dims, ((rows, made),), (("d0", "d1"),), extents), normal)
    shape = shape_of(draw, draw.randint(2, 4), 5)
    d, many = draw.randrange(len(shape)), draw.randint(1, 5)
    names = tuple("" if k == d else f"d{k}" for k in range(len(shape)))
    extents = tuple((i, n) for i, n in zip(names, shape, strict=True) if i)
    other = (*shape[:d], many, *shape[d + 1 :])
    numbers = few(draw, (many,), shape[d])
    if draw.random() < 0.4:
        apart = Apart(
            "index_add", (Slot(0), d, Slot(1), Slot(2), 1), (shape, (many,), other), (names, ("",), names), (shape,),
            (names,), extents, (), (True, False, True),
        )  # fmt: skip
        return apart, [whole(draw, shape), numbers, whole(draw, other)]
    there = few(draw, other, shape[d])
    if draw.random() < 0.5:
        apart = Apart(
            "gather", (Slot(0), d, Slot(1), False), (shape, other), (names, names), (other,), (names,), extents, (),
            (True, False),
        )  # fmt: skip
        return apart, [whole(draw, shape), there]
    apart = Apart(
        "scatter_add", (Slot(0), d, Slot(1), Slot(2)), (shape, other, other), (names,) * 3, (shape,), (names,), extents,
        (), (True, False, True),
    )  # fmt: skip
    return apart, [whole(draw, shape), there, whole(draw, other)]


def deviation(draw: Random) -> Case:
    of = replace(averaged(draw), size=1)
    operation = Deviation(of, draw.choice((0.0, 0.5)), draw.random() < 0.5, draw.random() < 0.5)
    return operation, [moments_given(draw, of)]


def bernoulli(draw: Random) -> Case:
    seed = torch.tensor([draw.randrange(-(2**63), 2**63), draw.randrange(2**20)])
    return Bernoulli(shape_of(draw, draw.randint(1, 4), 4), draw.choice((0.0, 0.3, 0.8)), draw.randrange(100)), [seed]


def noise(draw: Random) -> Case:
    seed = torch.tensor([draw.randrange(-(2**63), 2**63), draw.randrange(2**20)])
    shape, dtype = shape_of(draw, draw.randint(1, 4), 4), draw.choice(("float64", "float64", "float32", "bfloat16"))
    return Noise(shape, draw.choice(("uniform", "normal")), draw.randrange(100), dtype), [seed]


def index_rows(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 4), 5)
    d, index = draw.randrange(len(shape)), shape_of(draw, draw.randint(0, 2), 4)
    return IndexRows(shape, d, index), [whole(draw, shape), few(draw, index, 2 * shape[d]) - shape[d]]


def embedding(draw: Random) -> Case:
    rows, index = draw.randint(1, 6), shape_of(draw, draw.randint(1, 2), 4)
    operation = Embedding(rows, draw.randint(1, 5), index, draw.choice((-1, 0)))
    return operation, [whole(draw, (rows, operation.features)), few(draw, index, rows)]


def grid_sample(draw: Random) -> Case:
    dims, most = draw.choice(((2, 6), (3, 4)))
    shape, out = shape_of(draw, 2 + dims, most), tuple(draw.randint(1, most) for _ in range(dims))
    operation = GridSample(shape, out, draw.randrange(2), draw.randrange(2), draw.random() < 0.5)
    return filled(draw, operation, normal)


def squared_error(draw: Random) -> Case:
    return filled(draw, SquaredError(shape_of(draw, draw.randint(1, 4), 5)), normal)


def fused(draw: Random) -> Case:
    """A batch norm's last row or a convolution, functions of elements, and a row that reads rows of these."""
    while True:
        dims, most = draw.choice(((1, 11), (2, 9)))
        sides = spatial(draw, dims, most)
        groups = draw.choice((1, 1, 2))
        conv = Conv(draw.randint(1, 4), *(groups * draw.randint(1, 2) for _ in "CF"), sides, groups)
        first = Convolution("forward", conv)
        y = first.shapes["y"]
        bounds = [
            Bound(first, ("x", "w"), ("a",)),
            Bound(bias(y), ("a", "b"), ("b0",)),
            Bound(Pointwise("tanh", y, (y,)), ("b0",), ("c",)),
        ]
        if draw.random() < 0.4:
            bounds = [
                Bound(Centred(Averaged(y, (1,))), ("x", "p"), ("a",)),
                Bound(Pointwise("sigmoid", y, (y,)), ("a",), ("c",)),
            ]
        rows = tuple(replace(s, extent=n) for s, n in zip(spatial(draw, dims, most), y[2:], strict=True))
        more = [Bound(Convolution("forward", Conv(y[0], y[1], draw.randint(1, 3), rows)), ("c", "v"), ("y",))]
        if draw.random() < 0.3:
            forward = transposed_convolution(
                (*y[:2], *(s.extent for s in rows)), 2, tuple(replace(s, pad_hi=s.pad_lo) for s in rows), (0,) * dims, 1
            )
            more = [Bound(TransposedConvolution("forward", forward.conv), ("c", "v"), ("y",))]
        if min((*more[0].operation.signatures[0].results[0].shape, *y)) < 1:
            continue
        operation = joined([*bounds, *more]).operation
        assert isinstance(operation, Fused)
        if not any(joined_faults(operation)):
            return filled(draw, operation, normal)


def local_response_norm(draw: Random) -> Case:
    shape = (draw.randint(1, 5), draw.randint(1, 9), *(draw.randint(1, 4) for _ in range(draw.randint(1, 2))))
    operation = LocalResponseNorm(shape, draw.randint(1, 6), draw.uniform(0.1, 2.0), draw.choice([0.5, 0.75, 1.0]), 1.5)
    return operation, [normal(draw, shape)]


CASES: Mapping[str, Callable[[Random], Case]] = {
    "convolution": convolution,
    "bias of a convolution": bias_of_a_convolution,
    "transposed convolution": a_transposed_convolution,
    "max pool": max_pool,
    "local response norm": local_response_norm,
    "average pool": average_pool,
    "adaptive average pool": adaptive_average_pool,
    "adaptive max pool": adaptive_max_pool,
    "adaptive max pool's gradient": adaptive_max_pool_gradient,
    "upsample": upsample,
    "adjoint of a linear map": adjoint,
    "pad": pad,
    "slice, flip": some_rows,
    "concatenate": concatenate,
    "round the end": round_the_end,
    "view": view,
    "permute": permute,
    "expand": expand,
    "pixel shuffle": pixel_shuffle,
    "pointwise": pointwise,
    "bias, affine, prelu": bias_and_affine,
    "dropout": dropout,
    "moments": moments,
    "moments of parts": part_moments,
    "moments of parts' gradient": part_moments_gradient,
    "coefficients of parts": part_coefficients,
    "centred by parts": part_centred,
    "statistics of parts": part_statistics,
    "update by parts": part_update,
    "running moments of parts": part_running,
    "moments' gradient": moments_gradient,
    "normalise": normalise,
    "running statistics": running_statistics,
    "linear, matrix product": contraction,
    "fourier": fourier,
    "softmax": softmax,
    "attention": attention,
    "sum, mean": reduce,
    "cross entropy": cross_entropy,
    "squared error": squared_error,
    "along a dimension": along,
    "apart": apart,
    "by number": by_number,
    "deviation": deviation,
    "bernoulli": bernoulli,
    "noise": noise,
    "index": index_rows,
    "embedding": embedding,
    "grid sample": grid_sample,
    "rows as one": fused,
}


# ---------------------------------------------------------------- roles and storage
def a_grid(draw: Random) -> Grid:
    while True:
        sizes = [draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 3))]
        if prod(sizes) <= 8:
            return Grid(tuple((f"a{i}", uneven(draw, n)) for i, n in enumerate(sizes)))


def free_roles(draw: Random, signature: Signature, grid: Grid) -> dict[str, Axes]:
    """Each axis any index or none."""
    while True:
        roles: dict[str, Axes] = {}
        for axis in draw.sample(grid.names, len(grid.names)):
            index = draw.choice([*signature.extent, None])
            if index is not None:
                roles[index] = (*roles.get(index, ()), axis)
        if signature.fits(roles, grid.sizes):
            return roles


def free_storage(draw: Random, dims: int, grid: Grid) -> tuple[Axes, ...]:
    axes: list[Axes] = [()] * dims
    for axis in draw.sample(grid.names, len(grid.names)):
        d = draw.randrange(dims + 1)
        if d < dims:
            axes[d] = (*axes[d], axis)
    return tuple(axes)


def stored(draw: Random, grid: Grid, tensor: torch.Tensor) -> Value:
    return scatter(tensor.detach(), grid, free_storage(draw, tensor.dim(), grid))


def place(draw: Random, grid: Grid, operand: Operand) -> Value:
    """Where an operand goes, without any elements."""
    return Value(grid, operand.shape, free_storage(draw, len(operand.shape), grid), [])


# ---------------------------------------------------------------- the check
def check(draw: Random, operation: Operation, given: list[torch.Tensor]) -> None:
    way = draw.randrange(len(operation.signatures))
    signature, grid = operation.signatures[way], a_grid(draw)
    roles = free_roles(draw, signature, grid)
    where = f"{operation}, way {way}, {grid}, roles {roles}"
    for t, operand in zip(given, signature.inputs, strict=True):
        t.requires_grad_(operand.gradient)
    expected = operation.reference(*given)

    done = run(operation, way, roles, [stored(draw, grid, t) for t in given])
    for s, leaves, outs in zip(done.stands, done.leaves, done.outs, strict=True):
        assert operation.work(way, s.at).elements == sum(t.numel() for t in (*leaves, *outs)), where
    found = results(done, [place(draw, grid, o) for o in signature.results])
    for value, right in zip(found, expected, strict=True):
        assert close(gather(value), right.detach()), where

    dys = [few(draw, o.shape, 9).double() - 4 if o.requires_grad else None for o in expected]
    wanted = reference_gradients(given, expected, dys)
    if not signature.partial(roles) or signature.reduction == "sum":
        to = [place(draw, grid, o) for o in signature.inputs]
        vjp = gradients(done, [None if dy is None else stored(draw, grid, dy) for dy in dys], to)
        for value, right in zip(vjp, wanted, strict=True):
            assert right is None or close(gather(value), right), f"vjp of {where}"

    tensors = dict(zip((o.name for o in signature.inputs), given, strict=True))
    for operand, right, dy in zip(signature.results, expected, dys, strict=True):
        tensors |= {operand.name: right} | ({} if dy is None else {f"d{operand.name}": dy})
    for name, derived in operation.gradients.items():
        right = wanted[[o.name for o in signature.inputs].index(name)]
        check_derived(draw, grid, derived.operation, [tensors[t] for t in derived.reads], right, where)


def check_derived(
    draw: Random, grid: Grid, row: Operation, given: list[torch.Tensor], right: torch.Tensor | None, where: str
) -> None:
    """A gradient's own row, with roles of its own."""
    way = draw.randrange(len(row.signatures))
    roles = free_roles(draw, row.signatures[way], grid)
    done = run(row, way, roles, [stored(draw, grid, t) for t in given])
    (found,) = results(done, [place(draw, grid, o) for o in row.signatures[way].results])
    assert right is None or close(gather(found), right), f"{row}, way {way}, roles {roles}: gradient of {where}"


def reference_gradients(
    given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], dys: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Autograd's, of the reference; None for what has none."""
    pairs = [(o, dy) for o, dy in zip(made, dys, strict=True) if dy is not None]
    some = [k for k, t in enumerate(given) if t.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(given)
    if pairs and some:
        asked = [given[k] for k in some]
        grads = torch.autograd.grad([o for o, _ in pairs], asked, [dy for _, dy in pairs], materialize_grads=True)
        for k, g in zip(some, grads, strict=True):
            found[k] = g
    return found


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the order of sums, measured by the largest entry; numbers of something exactly."""
    if found.dtype != right.dtype or found.shape != right.shape or not right.is_floating_point():
        return torch.equal(found, right)
    finite = right.isfinite()
    scale = max(1.0, float(right[finite].abs().max())) if bool(finite.any()) else 1.0
    return torch.allclose(found, right, rtol=0, atol=1e-12 * scale)
