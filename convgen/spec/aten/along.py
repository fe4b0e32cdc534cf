"""Operators along a whole dimension: maxima, cumulative sums, sorting; variances and norms; rows by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from convgen.operations.averaged import Averaged
from convgen.operations.calls import Along, Slot
from convgen.operations.indexing import Embedding, GridSample, IndexRows
from convgen.operations.moments import Deviation, Moments
from convgen.operations.reductions import Reduce
from convgen.spec.aten import picks
from convgen.spec.aten.reader import Reader, Tensor, knows, wide_of
from convgen.spec.graph import FLOATS, Call, Ref

LARGEST_FIRST = (
    "topk",
    "sort",
    "sort.stable",
    "max.dim",
    "min.dim",
    "median.dim",
    "kthvalue",
    "cummax",
    "cummin",
    "mode",
)


def dims_of(given: Any, count: int) -> tuple[int, ...]:
    """The dimensions that an argument names: one, several, or all."""
    if given is None or given == ():
        return tuple(range(count))
    several = cast("Sequence[int]", given if isinstance(given, tuple) else (given,))
    return tuple(sorted({int(d) % max(count, 1) for d in several}))


# By operator: the place of its dimension, or dimensions, among the arguments.
ALONG = {
    "max.dim": 1, "min.dim": 1, "amax": 1, "amin": 1, "argmax": 1, "argmin": 1, "cumsum": 1, "cumprod": 1,
    "logsumexp": 1,
    "logcumsumexp": 1, "prod.dim_int": 1, "topk": 2, "sort": 1, "sort.stable": 2, "median.dim": 1, "kthvalue": 2,
    "mode": 1,
    "any.dim": 1, "all.dim": 1, "any.dims": 1, "all.dims": 1, "softmax.int": 1, "log_softmax.int": 1, "softmin": 1,
    "cummax": 1, "cummin": 1, "nansum": 1, "nanmean": 1, "sum.dim_IntList": 1, "count_nonzero.dim_IntList": 1,
    "aminmax": 1, "quantile.scalar": 2, "nanquantile.scalar": 2, "argsort": 1, "argsort.stable": 2,
}  # fmt: skip


@knows(*(op for op in ALONG if op not in ("softmax.int", "log_softmax.int", "sum.dim_IntList")))
def along(reader: Reader, call: Call) -> bool:
    x = reader.of(call.args[0])
    if not x.shape:
        return False
    return along_dims(reader, call, x, dims_of(call.args[ALONG[call.op]], len(x.shape)))


def along_dims(reader: Reader, call: Call, x: Tensor, over: tuple[int, ...]) -> bool:
    if 0 in x.shape:  # of nothing a product is 1, and a row makes zeros
        return False
    first = next(v for v in call.results if v is not None)
    shape = reader.tensors[first.name].shape
    if len(shape) not in (len(x.shape), len(x.shape) - len(over)):
        return False
    made = [None if v is None else reader.tensors[v.name] for v in call.results]
    late = (1,) if call.op in LARGEST_FIRST else ()
    integers = tuple(k for k, t in enumerate(made) if (t is not None and t.dtype not in FLOATS) or k in late)
    operation = Along(call.op, (Slot(0), *call.args[1:]), x.shape, over, tuple(shape for _ in made), integers, x.floats)
    reader.add(operation, [x], [t.name if t else "" for t in made])
    return True


@knows("tril", "triu")
def triangle(reader: Reader, call: Call) -> bool:
    x = reader.of(call.args[0])
    return along_dims(reader, call, x, (len(x.shape) - 2, len(x.shape) - 1))


@knows("max", "min")
def of_all(reader: Reader, call: Call) -> bool:
    """The maximum of one tensor over all dimensions; elementwise maxima have overloads."""
    x = reader.of(call.args[0])
    return bool(x.shape) and call.op in ("max", "min") and along_dims(reader, call, x, tuple(range(len(x.shape))))


@knows(
    "var", "var.dim", "var.correction", "std", "std.dim", "std.correction", "var_mean.correction", "std_mean.correction"
)
@knows("var_mean", "var_mean.dim", "std_mean", "std_mean.dim")
def deviation(reader: Reader, call: Call) -> bool:
    x, (base, _, kind) = reader.of(call.args[0]), call.op.partition(".")
    if not x.floats or not x.shape or 0 in x.shape:
        return False
    given = None if kind == "" else call.args[1]
    kept = bool(call.args[3]) if kind else False
    correction: Any = call.args[2] if kind else call.args[1]
    if kind != "correction":
        correction = int(bool(correction))
    over = dims_of(given, len(x.shape))
    of = Averaged(x.shape, tuple(d for d in range(len(x.shape)) if d not in over))
    name = next(v.name for v in call.results if v is not None)
    m = reader.made(f"{name}_moments", of.moments, wide_of(x))
    reader.add(Moments(of), [x], [m.name])
    makes = [v.name if v else "" for v in call.results]
    operation = Deviation(of, 1.0 if correction is None else float(correction), base.startswith("std"), kept)
    reader.add_in(m.dtype, operation, [m], [*makes, ""][:2])
    return True


@knows("linalg_vector_norm", "norm.ScalarOpt_dim")
def vector_norm(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    order, y = float(2 if call.args[1] is None else call.args[1]), reader.tensors[result.name]  # type: ignore[arg-type]
    if y.dtype != x.dtype or not x.floats:
        return False
    over, kept = dims_of(call.args[2], len(x.shape)), bool(call.args[3])
    if order not in (1.0, 2.0):
        return along_dims(reader, call, x, over)
    if order == 1:
        size = reader.made(f"{y.name}_abs", x.shape, x.dtype)
        reader.elementwise("abs", (Ref(x.name),), size)
        reader.add(Reduce("sum", x.shape, over, kept), [size], [y.name])
        return True
    total = reader.made(f"{y.name}_squares", y.shape, wide_of(x))
    reader.add(Reduce("squares", x.shape, over, kept), [x], [total.name])
    root(reader, total, y)
    return True


def root(reader: Reader, x: Tensor, y: Tensor) -> None:
    """The square root in x's type, then in y's, with gradient 0 at 0, as in norms."""
    from convgen.operations.pointwise import Pointwise

    reader.add_in(x.dtype, Pointwise("root", x.shape, (x.shape,)), [x], [y.name])


@knows("renorm")
def renorm(reader: Reader, call: Call) -> bool:
    """renorm(x, p, dim, maxnorm): slices of one dimension, scaled down to a norm where theirs is larger."""
    x, (result,) = reader.of(call.args[0]), call.results
    _, order, given, most = call.args
    if result is None or not x.floats:
        return False
    (d,) = dims_of(given, len(x.shape))
    shape = tuple(n if k == d else 1 for k, n in enumerate(x.shape))

    def made(op: str, *args: Any, dtype: str = x.dtype) -> Ref:
        y = reader.made(f"{result.name}_{op.partition('.')[0]}", shape, dtype)
        reader.elementwise(op, args, y, smooth=dtype == x.dtype)
        return Ref(y.name)

    norm = reader.made(f"{result.name}_norm", shape, x.dtype)
    args = (Ref(x.name), order, tuple(k for k in range(len(x.shape)) if k != d), True, None)
    of = replace(result, name=norm.name, shape=shape)
    vector_norm(reader, replace(call, op="linalg_vector_norm", args=args, results=(of,)))
    share = made("reciprocal", made("add.Scalar", Ref(norm.name), 1e-7, 1))  # as ATen has it
    large = made("gt.Scalar", Ref(norm.name), most, dtype="bool")
    by = made("where.ScalarOther", large, made("mul.Scalar", share, most), 1.0)
    return reader.elementwise("mul.Tensor", (Ref(x.name), by), reader.tensors[result.name])


@knows("index.Tensor", "index_select")
def index(reader: Reader, call: Call) -> bool:
    """Rows of one dimension by a tensor of numbers."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    if call.op == "index_select":
        d, number = int(call.args[1]) % max(len(x.shape), 1), reader.of(call.args[2])  # type: ignore[arg-type]
    else:
        given = call.args[1]
        assert isinstance(given, tuple)
        there = [k for k, one in enumerate(given) if one is not None]
        if len(there) != 1:
            return picks.index(reader, call)
        d, number = there[0], reader.of(given[there[0]])
    if number.dtype not in ("int64", "int32") or (call.op == "index_select" and not (x.shape and number.shape)):
        return False
    reader.add(IndexRows(x.shape, d, number.shape), [x, number], [result.name])
    return True


@knows("embedding")
def embedding(reader: Reader, call: Call) -> bool:
    weight, number, padding, by_count, _ = call.args
    weight, number = reader.of(weight), reader.of(number)
    (result,) = call.results
    assert result is not None
    if by_count:
        return False
    rows, features = weight.shape
    reader.add(Embedding(rows, features, number.shape, int(padding)), [weight, number], [result.name])  # type: ignore[arg-type]
    return True


@knows("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(reader: Reader, call: Call) -> bool:
    x, grid, mode, padding, corners = call.args
    x, grid = reader.of(x), reader.of(grid)
    (result,) = call.results
    assert result is not None
    operation = GridSample(x.shape, grid.shape[1:-1], int(mode), int(padding), bool(corners))  # type: ignore[arg-type]
    reader.add(operation, [x, grid], [result.name])
    return True
