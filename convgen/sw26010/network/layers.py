"""Rows that are no products as tasks of a core group: element by element, biases, pooling, norms, the loss, dropout.

Source: [SW] 4.4 for pooling; operations/ says where the others are from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from convgen.errors import InputError
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.network.mesh_row import Array, Made, MeshRow, Run
from convgen.sw26010.network.tasks import LoopTask, OperationTask
from convgen.sw26010.operations.channels import ChannelMap, ChannelSums
from convgen.sw26010.operations.concatenation import Concatenation
from convgen.sw26010.operations.local_response import LocalResponse
from convgen.sw26010.operations.rows import RowShift, RowSums
from convgen.sw26010.operations.softmax_loss import SoftmaxLoss
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.pooling.windows import Pool, Windows


def _inside(at: Any, operand: int) -> tuple[int, ...]:
    """Extents of a rank's part of an operand."""
    return tuple(hi - lo for lo, hi in at.inside[operand])


def _pixels(shape: Sequence[int]) -> tuple[int, int, int]:
    """[N, C, ...] as planes."""
    return shape[0], shape[1], prod(shape[2:])


# ---- Element by element ----


def _pointwise(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """ReLU, sums of two of one shape, and biases."""
    name = getattr(operation, "op", None) or operation.function
    shape = tuple(at.extent(f"d{d}") for d in range(len(operation.shape)))
    if not prod(shape):
        return None
    if name == "relu" and operation.shapes == (operation.shape,):
        return _rectified(prod(shape), dtype)
    plain = name == "add" or (name == "add.Tensor" and operation.args[2:] in ((), (1,)))
    if not plain or len(operation.shapes) != 2 or getattr(operation, "settings", ()) or len(shape) < 2:
        return None
    if operation.shapes == (operation.shape,) * 2:
        return _added(prod(shape), dtype)
    vector, places = operation.shapes[1], getattr(operation, "places", ())
    by_channel = vector == operation.shape[1:2] and (places == ((), (1,)) or (not places and len(shape) == 2))
    return _biased(shape, dtype) if operation.shapes[0] == operation.shape and by_channel else None


def _rectified(elements: int, dtype: Dtype) -> MeshRow:
    there, back = (OperationTask(Stream(kind, elements, dtype)) for kind in ("relu", "relu_backward"))

    def compute(run: Run, x: Array) -> Made:
        y = run(there, x.reshape(-1)).reshape(x.shape)
        return (y,), (y,)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
        return (run(back, kept[0].reshape(-1), dy.reshape(-1)).reshape(dy.shape),)

    return MeshRow((there,), ((back,),), compute, gradients)


def _added(elements: int, dtype: Dtype) -> MeshRow:
    task = OperationTask(Stream("add", elements, dtype))

    def compute(run: Run, a: Array, b: Array) -> Made:
        return (run(task, a.reshape(-1), b.reshape(-1)).reshape(a.shape),), ()

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
        return dy, dy

    return MeshRow((task,), ((), ()), compute, gradients)


def _biased(shape: Sequence[int], dtype: Dtype) -> MeshRow:
    """x + b over dimension 1, and the sum of dy over the others."""
    n, c, pixels = _pixels(shape)
    is_matrix = len(shape) == 2
    shift = RowShift(n, c, dtype) if is_matrix else ChannelMap(n, c, pixels, dtype, "shift")
    sums = RowSums(n, c, dtype) if is_matrix else ChannelSums(n, c, pixels, dtype, "total")
    there, back = OperationTask(shift, "bias"), OperationTask(sums, "bias")

    def compute(run: Run, x: Array, b: Array) -> Made:
        vector = b if is_matrix else b.astype(np.float64).reshape(c, 1)
        return (run(there, x, vector).reshape(shape),), ()

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array | None, ...]:
        return dy, run(back, dy).reshape(c).astype(dtype) if wanted[1] else None

    return MeshRow((there,), ((), (back,)), compute, gradients)


def _dropped(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """The management core draws the mask, which is an operand in the place of the seed."""
    elements, factor = prod(_inside(at, 0)), 1 / (1 - operation.p) if operation.p < 1 else 0.0
    if not elements or not factor:
        return None
    mask = LoopTask("Dropout", elements * np.dtype(dtype).itemsize)
    task = OperationTask(Stream("dropout", elements, dtype, (factor,)))

    def compute(run: Run, x: Array, there: Array) -> Made:
        run(mask, there)
        return (run(task, x.reshape(-1), there.reshape(-1)).reshape(x.shape),), (there,)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array | None, ...]:
        return run(task, dy.reshape(-1), kept[0].reshape(-1)).reshape(dy.shape), None

    return MeshRow((mask, task), ((task,),), compute, gradients)


def _concatenated(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """Channels of several values side by side."""
    shapes = [_inside(at, k) for k in range(len(operation.shapes))]
    if operation.d != 1 or not all(map(prod, shapes)) or operation.starts[0]:
        return None
    parts = tuple(prod(shape[1:]) for shape in shapes)
    there, back = (
        OperationTask(Concatenation(shapes[0][0], parts, dtype, backward), "copies") for backward in (False, True)
    )

    def compute(run: Run, *xs: Array) -> Made:
        made = run(there, *(x.reshape(x.shape[0], -1) for x in xs))
        return (made.reshape(shapes[0][0], -1, *shapes[0][2:]),), ()

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array | None, ...]:
        found: Any = run(back, dy.reshape(dy.shape[0], -1))
        several: Sequence[Array] = found if len(shapes) > 1 else (found,)
        return tuple(g.reshape(shape) for g, shape in zip(several, shapes, strict=True))

    return MeshRow((there,), ((),) * len(shapes), compute, gradients, shared=(back,))


# ---- Pooling ----


def _pooling(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """Square windows without dilation, with as much padding above as on the left ([SW] 4.4)."""
    average, taps = type(operation).__name__ == "AveragePool", {*operation.taps}
    if len(operation.shape) != 4 or len(taps) != 1 or way:
        return None
    (tap,) = taps
    paddings = {inside[0] - window[0] for inside, window in zip(at.inside[0][2:], at.windows[0][2:], strict=True)}
    out = tuple(at.extent(f"d{d}") for d in range(4))
    if len(paddings) != 1 or tap.dilation != 1:
        return None
    if average:
        counts = {n for d in (2, 3) for n in operation.counts(d)[slice(*at.blocks[f"d{d}"])]}
        if operation.divisor is not None or counts != {tap.kernel}:
            return None
    n, c, h, w = _inside(at, 0)
    kind = "average" if average else "max"
    try:
        windows = Windows(n, c, h, w, tap.kernel, tap.stride, paddings.pop(), kind, dtype)
    except InputError:
        return None
    return _pooled(windows) if windows.out_shape == out else None  # others begin in the padding behind x


def _pooled(windows: Windows) -> MeshRow:
    there, back = (OperationTask(Pool(windows, backward), "pooling") for backward in (False, True))
    finds = windows.kind == "max"

    def compute(run: Run, x: Array) -> Made:
        return (run(there, x),), (x,) if finds else ()

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
        return (run(back, *kept, dy),)

    return MeshRow((there,), ((back,),), compute, gradients)


def _whole_pooling(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """The mean of a whole square plane."""
    whole = at.inside[0][2:] == tuple((0, n) for n in operation.shape[2:])
    if len(operation.shape) != 4 or {*operation.out} != {1} or operation.shape[2] != operation.shape[3] or not whole:
        return None
    n, c, h, w = _inside(at, 0)
    try:
        return _pooled(Windows(n, c, h, w, h, h, 0, "average", dtype))
    except InputError:
        return None


# ---- Norms ----


def _one_a_channel(of: Any, shape: Sequence[int]) -> bool:
    """Whether a rank has each channel's numbers once: those of the whole tensor, or of the only part that it holds."""
    keep: tuple[int, ...] = of.keep
    parted: set[int] = {*of.blocks}
    alone = of.size == 1 and 1 in keep and {*keep} - {1} == parted
    return alone and prod(shape) == 3 * shape[1 + keep.index(1)]


def _moments(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """Count, mean and squared deviations of every channel; the gradient is that of the row behind (`_spread`)."""
    of, shape = operation.of, _inside(at, 0)
    made = (3, *(at.extent(of.index(d)) for d in of.keep))
    if len(shape) < 2 or not prod(shape) or not _one_a_channel(of, made):
        return None
    n, c, pixels = _pixels(shape)
    there = OperationTask(ChannelSums(n, c, pixels, dtype, "moments"), "normalisation")
    back = OperationTask(ChannelMap(n, c, pixels, dtype, "normalise"), "normalisation")

    def compute(run: Run, x: Array) -> Made:
        m = np.ascontiguousarray(run(there, x.reshape(n, c, pixels)).T).astype(dtype).reshape(made)
        return (m,), (m, x)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dm: Array) -> tuple[Array, ...]:
        return (_spread(run, back, dm, kept[0], kept[1]),)

    return MeshRow((there,), ((back,),), compute, gradients)


def _spread(run: Run, task: OperationTask, dm: Array, m: Array, x: Array) -> Array:
    """dmean / n + 2 (x - mean) dM2."""
    (count, mean, _), (_, dmean, dm2) = (t.reshape(3, -1).astype(np.float64) for t in (m, dm))
    return _mapped(run, task, x, 2 * dm2, mean, dmean / count)


def _mapped(run: Run, task: OperationTask, x: Array, scale: Array, mean: Array, shift: Array) -> Array:
    """(x - mean) * scale + shift, of a number of each a channel."""
    return run(task, x.reshape(_pixels(x.shape)), np.stack([scale, mean, shift], axis=1)).reshape(x.shape)


def _sums_by_channel(run: Run, task: OperationTask, dy: Array, x: Array, mean: Array) -> Array:
    """Of dy, and of dy (x - mean)."""
    pixels = _pixels(x.shape)
    return run(task, dy.reshape(pixels), x.reshape(pixels), mean[:, None]).T


def _moments_gradient(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    shape = _inside(at, 2)
    if len(shape) < 2 or not prod(shape) or not _one_a_channel(operation.of, _inside(at, 1)):
        return None
    task = OperationTask(ChannelMap(*_pixels(shape), dtype, "normalise"), "normalisation")

    def compute(run: Run, dm: Array, m: Array, x: Array) -> Made:
        return (_spread(run, task, dm, m, x),), ()

    return MeshRow((task,), (), compute, lambda *_: ())


def _centred(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """(x - mean) a + b. Backward is a dy, and three numbers a channel, made of sums."""
    shape, numbers = _inside(at, 0), _inside(at, 1)
    if len(shape) < 2 or not prod(shape) or not _one_a_channel(operation.of, numbers):
        return None
    pixels = _pixels(shape)
    there = OperationTask(ChannelMap(*pixels, dtype, "normalise"), "normalisation")
    sums = OperationTask(ChannelSums(*pixels, dtype, "products"), "normalisation")

    def compute(run: Run, x: Array, p: Array) -> Made:
        mean, scale, shift = p.reshape(3, -1).astype(np.float64)
        return (_mapped(run, there, x, scale, mean, shift),), (x, p)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array | None, ...]:
        x, p = kept
        mean, scale, _ = p.reshape(3, -1).astype(np.float64)
        zeros, dx, dp = np.zeros_like(mean), None, None
        if wanted[0]:
            dx = _mapped(run, there, dy, scale, zeros, zeros)
        if wanted[1]:
            total, along = _sums_by_channel(run, sums, dy, x, mean)
            dp = np.stack([-scale * total, along, total]).astype(dtype).reshape(numbers)
        return dx, dp

    return MeshRow((there,), ((there,), (sums,)), compute, gradients)


def _evaluated(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """(x - mean) w / deviation + b, with mean and deviation of buffers; dw and db are sums over each channel."""
    shape = _inside(at, 0)
    if len(shape) < 2 or not prod(shape):
        return None
    pixels = _pixels(shape)
    there = OperationTask(ChannelMap(*pixels, dtype, "normalise"), "normalisation")
    sums = OperationTask(ChannelSums(*pixels, dtype, "products"), "normalisation")

    def numbers(vectors: Sequence[Array]) -> tuple[Array, Array, Array, Array]:
        mean, variance, *more = (v.reshape(-1).astype(np.float64) for v in vectors)
        inverse = (variance + operation.eps) ** -0.5
        scale = inverse * more[0] if operation.weight else inverse
        return mean, inverse, scale, more[-1] if operation.bias else np.zeros_like(mean)

    def compute(run: Run, x: Array, *vectors: Array) -> Made:
        mean, _, scale, shift = numbers(vectors)
        return (_mapped(run, there, x, scale, mean, shift),), (x, *vectors)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array | None, ...]:
        x, *vectors = kept
        mean, inverse, scale, _ = numbers(vectors)
        zeros, found = np.zeros_like(mean), list[Array | None]()
        dx = _mapped(run, there, dy, scale, zeros, zeros) if wanted[0] else None
        for n, want in enumerate(wanted[3:], 1):
            total, along = _sums_by_channel(run, sums, dy, x, mean) if want else (zeros, zeros)
            of_weight = operation.weight and n == 1
            found.append((along * inverse if of_weight else total).astype(dtype) if want else None)
        return dx, None, None, *found

    vectors = operation.weight + operation.bias
    return MeshRow((there,), ((there,), (), (), *((sums,),) * vectors), compute, gradients)


def _local_response(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """Normalisation across channels, of all of them."""
    shape = _inside(at, 0)
    if not prod(shape) or shape[1] != operation.shape[1] or at.extent("d1") != shape[1]:
        return None
    sizes = (*_pixels(shape), operation.size, operation.alpha, operation.beta, operation.k, dtype)
    try:
        there, back = (
            OperationTask(LocalResponse(*sizes, backward), "local response normalisation") for backward in (False, True)
        )
    except InputError:
        return None

    def compute(run: Run, x: Array) -> Made:
        return (run(there, x).reshape(shape),), (x,)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
        return (run(back, kept[0], dy).reshape(shape),)

    return MeshRow((there,), ((back,),), compute, gradients)


# ---- The loss ----

NO_CLASS = -1  # in memory, of samples that are ignored: a float may not have the number that the operation has for them


def _cross_entropy(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """The sum over samples whose labels are not ignored, and how many they are."""
    shape = _inside(at, 0)
    options = (operation.smoothing, operation.weighted, operation.logs, operation.each)
    if len(shape) != 2 or not prod(shape) or any(options):
        return None
    n, classes = shape
    try:
        there, back = (
            OperationTask(SoftmaxLoss(n, classes, dtype, NO_CLASS, backward), "loss") for backward in (False, True)
        )
    except InputError:
        return None

    def takes(x: Array, labels: Array) -> bool:
        return bool((((labels >= 0) & (labels < classes)) | (labels == operation.ignore)).all())

    def compute(run: Run, x: Array, labels: Array) -> Made:
        given = np.where(labels == operation.ignore, NO_CLASS, labels).astype(dtype).reshape(n, 1)
        p, sums = run(there, x, given)
        loss, count = sums.astype(dtype).reshape(2)
        return (np.array(loss), np.array(count)), (p, given)

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dloss: Array) -> tuple[Array | None, ...]:
        return run(back, *kept, dloss.astype(np.float64).reshape(1, 1)), None

    return MeshRow((there,), ((back,),), compute, gradients, takes=takes)


LAYERS: Mapping[str, Callable[[Any, int, Any, Dtype], MeshRow | None]] = {
    "Elementwise": _pointwise,
    "Pointwise": _pointwise,
    "Dropout": _dropped,
    "Concatenate": _concatenated,
    "MaxPool": _pooling,
    "AveragePool": _pooling,
    "AdaptiveAveragePool": _whole_pooling,
    "Moments": _moments,
    "MomentsGradient": _moments_gradient,
    "Centred": _centred,
    "EvaluatedNorm": _evaluated,
    "LocalResponseNorm": _local_response,
    "CrossEntropy": _cross_entropy,
}
