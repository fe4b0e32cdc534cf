"""The table: what every row says of itself, a line a way to compute it. Nothing else says how it is distributed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.relations import Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.attention import Attention
from convgen.operations.average_pooling import AdaptiveAveragePool, AveragePool
from convgen.operations.averaged import Averaged
from convgen.operations.calls import Along, Apart, Slot
from convgen.operations.contraction import linear, matrix_product
from convgen.operations.convolution import Convolution
from convgen.operations.dropout import Bernoulli, Dropout, Noise
from convgen.operations.indexing import Embedding, GridSample, IndexRows
from convgen.operations.losses import CrossEntropy
from convgen.operations.max_pooling import AdaptiveMaxPool, MaxPool
from convgen.operations.moments import Deviation, Moments, MomentsGradient, Normalise
from convgen.operations.pixels import PixelShuffle
from convgen.operations.pointwise import Pointwise, bias
from convgen.operations.reductions import Reduce
from convgen.operations.row import Operation
from convgen.operations.rows import Concatenate, Rolled, flipped, padded
from convgen.operations.running import RunningStatistics
from convgen.operations.softmax import Softmax
from convgen.operations.transposed import transposed_convolution
from convgen.operations.upsampling import Upsample
from convgen.operations.views import View

X = (8, 6, 9, 9)
SIDE = Spatial("H", 9, 3, stride=2, pad_lo=1, pad_hi=1)
GROUPS = Averaged(X, (0, 1), 3)

TABLE: tuple[tuple[Operation, Sequence[str]], ...] = (
    (Along("amax", (Slot(0), (1,), True), X, (1,), ((8, 1, 9, 9),)), ("x[d0, *, d2, d3] -> y0[d0, *, d2, d3]",)),
    (
        Apart(
            "max_unpool2d",
            (Slot(0), Slot(1), (9, 9)),
            (X, X),
            (("N", "C", "", ""),) * 2,
            (X,),
            (("N", "C", "", ""),),
            (("N", 8), ("C", 6)),
        ),
        ("x0[N, C, *, *], x1[N, C, *, *] -> y0[N, C, *, *]",),
    ),
    (Deviation(Averaged(X, (1,))), ("m[*, d1] -> spread[d1], mean[d1]",)),
    (Bernoulli((8, 6, 1, 1), 0.5), ("seed[*] -> y[d0, d1, d2, d3]",)),
    (Noise((8, 6, 1, 1), "normal"), ("seed[*] -> y[d0, d1, d2, d3]",)),
    (IndexRows(X, 1, (4,)), ("x[d0, *, d2, d3], index[d1] -> y[d0, d1, d2, d3]",)),
    (Embedding(10, 6, (8, 9)), ("weight[*, d2], index[d0, d1] -> y[d0, d1, d2]",)),
    (GridSample(X, (5, 4)), ("x[d0, d1, *, *], grid[d0, d2, d3, *] -> y[d0, d1, d2, d3]",)),
    (
        Convolution("forward", Conv(8, 6, 4, (SIDE,), 2)),
        (
            "x[N, (G,C), taps(H)], w[(G,F), C, *] -> y[N, (G,F), H], sum over C",
            "x[N, ratio(F), taps(H)], w[ratio(F), *, *] -> y[N, F, H]",
        ),
    ),
    (
        Convolution("backward_data", Conv(8, 6, 4, (SIDE,), 2)),
        (
            "y[N, (G,F), read_by(H)], w[(G,F), C, *] -> x[N, (G,C), H], sum over F",
            "y[N, ratio(C), read_by(H)], w[ratio(C), *, *] -> x[N, C, H]",
        ),
    ),
    (
        Convolution("backward_filter", Conv(8, 6, 4, (SIDE,), 2)),
        (
            "y[N, (G,F), H], x[N, (G,C), taps(H)] -> w[(G,F), C, *], sum over N, H",
            "y[N, (G,F), read_by(H)], x[N, (G,C), H] -> w[(G,F), C, *], sum over N, H",
            "y[N, F, H], x[N, ratio(F), taps(H)] -> w[F, *, *], sum over N, H",
            "y[N, F, read_by(H)], x[N, ratio(F), H] -> w[F, *, *], sum over N, H",
        ),
    ),
    (
        transposed_convolution((8, 6, 9), 4, (SIDE,), (1,), 2),
        (
            "x[N, (G,C), read_by(H)], w[(G,C), F, *] -> y[N, (G,F), H], sum over C",
            "x[N, ratio(F), read_by(H)], w[ratio(F), *, *] -> y[N, F, H]",
        ),
    ),
    (MaxPool(X, (Taps(2, 2), Taps(2, 2)), (4, 4)), ["x[d0, d1, taps(d2), taps(d3)] -> y[d0, d1, d2, d3]"]),
    (
        AveragePool(X, (Taps(2, 2), Taps(2, 2)), (4, 4)),
        (
            "x[d0, d1, taps(d2), taps(d3)] -> y[d0, d1, d2, d3]",
            "x[d0, d1, d2, d3] -> y[d0, d1, *, *], sum over d2, d3",
        ),
    ),
    (
        AdaptiveAveragePool(X, (1, 1)),
        (
            "x[d0, d1, ratio(d2), ratio(d3)] -> y[d0, d1, d2, d3]",
            "x[d0, d1, d2, d3] -> y[d0, d1, *, *], sum over d2, d3",
        ),
    ),
    (
        AdaptiveMaxPool(X, (1, 1)),
        (
            "x[d0, d1, ratio(d2), ratio(d3)] -> y[d0, d1, d2, d3], number[d0, d1, d2, d3]",
            "x[d0, d1, d2, d3] -> y[d0, d1, *, *], number[d0, d1, *, *], max over d2, d3",
        ),
    ),
    (
        Upsample((8, 6, 9), (18,), "linear"),
        ("x[d0, d1, table(d2)] -> y[d0, d1, d2]", "x[d0, d1, d2] -> y[d0, d1, *], sum over d2"),
    ),
    (padded((6, 9), [(0, 0), (1, 1)], "constant"), ["x[d0, taps(d1)] -> y[d0, d1]"]),
    (padded((6, 9), [(0, 0), (1, 1)], "reflect"), ["x[d0, table(d1)] -> y[d0, d1]"]),
    (Rolled(((6, 9),) * 2, 1, 2), ["x0[d0, taps(d1)], x1[d0, taps(d1)] -> y[d0, d1]"]),
    (flipped((6, 9), 1), ["x[d0, reverse(d1)] -> y[d0, d1]"]),
    (Concatenate(((6, 9), (6, 2)), 1), ["x0[d0, taps(d1)], x1[d0, taps(d1)] -> y[d0, d1]"]),
    (View((6, 9, 4), (6, 36)), ("x[d0, ratio(d1), *] -> y[d0, d1]", "x[d0a, d1a, d1b] -> y[d0a, (d1a,d1b)]")),
    (PixelShuffle((8, 4, 9, 9), 2), ["x[d0, ratio(d1), ratio(d2), ratio(d3)] -> y[d0, d1, d2, d3]"]),
    (Pointwise("mul", (6, 9), ((6, 9), (6, 1))), ["x0[d0, d1], x1[d0, *] -> y[d0, d1]"]),
    (bias((6, 9, 4)), ["x0[d0, d1, d2], x1[d1] -> y[d0, d1, d2]"]),
    (Dropout((6, 9), 0.5), ["x[d0, d1], seed[*] -> y[d0, d1]"]),
    (
        Moments(GROUPS),
        (
            "x[d0, ratio(d1), d2, d3] -> m[*, d0, d1], merge over d2, d3",
            "x[d0, d1, d2, d3] -> m[*, d0, *], merge over d1, d2, d3",
        ),
    ),
    (MomentsGradient(GROUPS), ["dm[*, d0, ratio(d1)], m[*, d0, ratio(d1)], x[d0, d1, d2, d3] -> dx[d0, d1, d2, d3]"]),
    (Normalise(GROUPS), ["x[d0, d1, d2, d3], m[*, d0, ratio(d1)] -> y[d0, d1, d2, d3]"]),
    (RunningStatistics(6), ["mean[C], variance[C], m[*, C] -> new_mean[C], new_variance[C]"]),
    (linear((8, 6), 4), ["x[a, K], w[F, K] -> y[a, F], sum over K"]),
    (matrix_product((8,), 6, 9, 4), ["x[a, M, K], w[a, K, L] -> y[a, M, L], sum over K"]),
    (Softmax((8, 6, 9), 1), ["x[d0, *, d2] -> y[d0, *, d2]"]),
    (
        Attention(8, 6, 2, 9, 9, 4, 4),
        ["q[N, H, L, *], k[N, ratio(H), *, *], v[N, ratio(H), *, *] -> y[N, H, L, *]"],
    ),
    (Reduce("mean", (8, 6, 9), (2,)), ["x[d0, d1, d2] -> y[d0, d1], sum over d2"]),
    (CrossEntropy((8, 6, 9)), ["x[d0, *, d2], target[d0, d2] -> loss[], count[], sum over d0, d2"]),
)


@pytest.mark.parametrize(("operation", "rules"), TABLE, ids=lambda v: v.name if isinstance(v, Operation) else "")
def test_a_row_is_a_line_a_way(operation: Operation, rules: Sequence[str]) -> None:
    assert [str(s) for s in operation.signatures] == list(rules)


def test_a_signature_that_makes_no_sense_is_refused() -> None:
    n, rows = Made(("N",)), Made(("N",), Taps(3))
    y = Operand("y", (4,), (n,))
    extents = (("N", 4),)
    Signature(extents, (Operand("x", (9,), (rows,)),), (y,))
    for x, result, fact in (
        (Operand("x", (9, 2), (rows,)), y, "1 entries for 2 dimensions"),
        (Operand("x", (9,), (n,)), y, "9 elements are not"),
        (Operand("x", (9,), (Made(("N", "N"), Taps(3)),)), y, "a relation is of one index"),
        (Operand("x", (4,), (n,)), Operand("y", (9,), (rows,)), "blocks of a result are its own"),
    ):
        with pytest.raises(ValueError, match=fact):
            Signature(extents, (x,), (result,))
