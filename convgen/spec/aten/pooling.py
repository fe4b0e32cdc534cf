"""Pooling, adaptive pooling, interpolation."""

from __future__ import annotations

from math import prod
from typing import Any

from convgen.algebra.relations import Taps
from convgen.operations.average_pooling import AdaptiveAveragePool, AveragePool
from convgen.operations.calls import Apart
from convgen.operations.max_pooling import AdaptiveMaxPool, MaxPool
from convgen.operations.upsampling import Upsample
from convgen.spec.aten.reader import Reader, Tensor, knows, many, one_sample, slots
from convgen.spec.graph import Call


@knows("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
@one_sample
def max_pool(reader: Reader, call: Call) -> bool:
    """max_pool(x, kernel, stride, padding, dilation, ceil_mode); if places are read, rows are not split."""
    x, (result, *rest) = reader.of(call.args[0]), call.results
    n = int(call.op[8])
    if len(x.shape) != n + 2:
        return False
    if result is None or any(rest):
        return _places(reader, call, (1,))
    _, kernel, stride, padding, dilation, _ = call.args
    kernels = many(kernel, n)
    taps = zip(kernels, many(stride or kernels, n), many(padding, n), many(dilation, n), strict=True)
    y = reader.tensors[result.name]
    reader.add(MaxPool(x.shape, tuple(Taps(*t) for t in taps), y.shape[2:]), [x], [y.name])
    return True


@knows("max_unpool2d", "max_unpool3d")
def max_unpool(reader: Reader, call: Call) -> bool:
    """max_unpool(x, places, size, ...)."""
    return len(reader.of(call.args[0]).shape) == int(call.op[10]) + 2 and _places(reader, call, ())


@knows("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(reader: Reader, call: Call) -> bool:
    """fractional_max_pool(x, kernel, size, samples[N, C, dimensions]); `samples` say where windows begin."""
    return len(reader.of(call.args[0]).shape) == int(call.op[19]) + 2 and _places(reader, call, (1,))


def _places(reader: Reader, call: Call, integers: tuple[int, ...]) -> bool:
    """Add an operator with places among all rows: split over samples and channels, not over rows."""
    xs: list[Tensor] = []
    args = tuple(slots(a, reader, xs) for a in call.args)
    made = [None if v is None else reader.tensors[v.name] for v in call.results]
    y = next(t for t in made if t is not None)
    names = {len(t.shape): ("N", "C", *("",) * (len(t.shape) - 2)) for t in (*xs, y)}
    operation = Apart(
        call.op,
        args,
        tuple(x.shape for x in xs),
        tuple(names[len(x.shape)] for x in xs),
        (y.shape,) * len(made),
        (names[len(y.shape)],) * len(made),
        (("N", y.shape[0]), ("C", y.shape[1])),
        integers,
        tuple(x.floats for x in xs),
        prod(y.shape[2:]),
    )
    reader.add(operation, xs, [t.name if t else "" for t in made])
    return True


@knows("avg_pool1d", "avg_pool2d", "avg_pool3d")
@one_sample
def avg_pool(reader: Reader, call: Call) -> bool:
    """avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor), of floats."""
    x, (result,) = reader.of(call.args[0]), call.results
    n = int(call.op[8])
    if result is None or len(x.shape) != n + 2 or not x.floats:  # of integers ATen cuts means off
        return False
    _, kernel, stride, padding, ceil_mode, include, *divisor = call.args
    kernels = many(kernel, n)
    taps = tuple(Taps(*t) for t in zip(kernels, many(stride or kernels, n), many(padding, n), strict=True))
    y = reader.tensors[result.name]
    own = divisor[0] if divisor else None
    reader.add(AveragePool(x.shape, taps, y.shape[2:], bool(ceil_mode), bool(include), own), [x], [y.name])  # type: ignore[arg-type]
    return True


@knows("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
@one_sample
def adaptive_avg_pool(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    if result is None or len(x.shape) != int(call.op[17]) + 2:
        return False
    y = reader.tensors[result.name]
    reader.add(AdaptiveAveragePool(x.shape, y.shape[2:]), [x], [y.name])
    return True


@knows("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@one_sample
def adaptive_max_pool(reader: Reader, call: Call) -> bool:
    x, (result, *numbers) = reader.of(call.args[0]), call.results
    if result is None or len(x.shape) != int(call.op[17]) + 2:
        return False
    y = reader.tensors[result.name]
    number = (
        numbers[0].name if numbers and numbers[0] is not None else reader.made(f"{y.name}_at", y.shape, "int64").name
    )
    reader.add(AdaptiveMaxPool(x.shape, y.shape[2:]), [x], [y.name, number])
    return True


@knows(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
def upsample(reader: Reader, call: Call) -> bool:
    """upsample_MODE(x, size, [align_corners], scales...), or .vec with one list of scale factors."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    y = reader.tensors[result.name]
    base, _, kind = call.op.partition(".")
    rest = list(call.args[2:])
    nearest = "nearest" in base
    if not (nearest or x.floats):
        return False  # of integers ATen rounds weights and sums
    corners = False if nearest else bool(rest.pop(0))
    n = len(y.shape) - 2
    given = rest[0] if kind == "vec" and isinstance(rest[0], tuple) else tuple(rest) if kind != "vec" else ()
    scales = tuple(float(s) for s in given if s is not None)  # type: ignore[arg-type]
    mode: Any = (
        "nearest-exact" if "exact" in base else "nearest" if nearest else "bicubic" if "cubic" in base else "linear"
    )
    mode += "-aa" * base.endswith("_aa")
    operation = Upsample(x.shape, y.shape[2:], mode, corners, scales if len(scales) == n else None)
    reader.add(operation, [x], [y.name])
    return True
