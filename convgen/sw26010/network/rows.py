"""Rows of a network as tasks of a core group: what forward and backward of a rank's part of a row run on the mesh.

The same row is asked by the compiler, for its closed forms, and by a package, whose operations are classes of its own:
a row is known by the name of its class, and by what it says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.network.tasks import ConvolutionTask, PoolingTask, ProductTask, StreamTask, Task
from convgen.sw26010.pointwise.stream import Stream
from convgen.sw26010.pooling.windows import Windows
from convgen.sw26010.target.plan import LocalProblem
from convgen.sw26010.target.volume import plan_rank

Array = NDArray[Any]
Run = Callable[..., Any]  # runs a task on operands, and counts: the only result, or all of them

FREE = ("View",)  # other names of the same elements


@dataclass(frozen=True)
class MeshRow:
    """A rank's part of a row, on the mesh.

    Attributes:
        forward: its tasks, in order.
        backward: by operand, those of its gradient; none where it is the result's.
        compute: results, and what backward reads, by a function that runs a task.
        gradients: of the operands that are wanted, of what was kept and of results' gradients.
    """

    forward: tuple[Task, ...]
    backward: tuple[tuple[Task, ...], ...]
    compute: Callable[..., tuple[tuple[Array, ...], tuple[Array | None, ...]]]
    gradients: Callable[..., tuple[Array | None, ...]]


def mesh_row(operation: Any, way: int, at: Any, dtype: str) -> MeshRow | None:
    """The row on the mesh; None where no program of it does that: the management core does.

    Args:
        operation, way, at: as `Operation.local` has them.
        dtype: of its operands that are floats.
    """
    known = ROWS.get(type(operation).__name__)
    if known is None or dtype not in ("float32", "float64"):
        return None
    return known(operation, way, at, dtype)


# ---- Convolutions ----

_READS: Mapping[str, str] = {"forward": "xw", "backward_data": "yw", "backward_filter": "yx"}
_MAKES: Mapping[str, str] = {"forward": "y", "backward_data": "x", "backward_filter": "w"}


def _convolution(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """A phase; gradients of forward are the two others. None where a block cuts groups, or a row is too long."""
    local, samples = operation.convolved(way, at), at.inside[0][0][1] - at.inside[0][0][0]
    if local is None or len(local.dims) > 3 or not samples:
        return None
    axes = [Axis(x, y, kernel, stride, below, dilation) for x, y, kernel, stride, dilation, below in local.dims]
    rows, columns = axes[-2:] if len(axes) > 1 else (Axis(1, 1, 1), axes[0])
    depth = axes[0] if len(axes) == 3 else None
    extents = {"x": [a.extent for a in axes], "w": [a.kernel for a in axes], "y": [a.out for a in axes]}
    leads = {
        "x": (samples, local.groups * local.channels), "w": (local.groups * local.filters, local.channels),
        "y": (samples, local.groups * local.filters),
    }  # fmt: skip

    def task(phase: str) -> ConvolutionTask:
        sizes = (samples, local.channels, local.filters, local.groups)
        return ConvolutionTask(LocalProblem(cast(Phase, phase), *sizes, rows, columns, dtype, depth))

    own = operation.phase
    tasks = {phase: task(phase) for phase in (_READS if own == "forward" else (own,))}
    try:
        for one in tasks.values():
            plan_rank(one.problem, 1)
    except InputError:
        return None

    def phase(run: Run, name: str, *operands: Array) -> Array:
        """One dimension is a row of columns."""
        flat = [
            t.reshape(*leads[letter], 1, *extents[letter]) if len(axes) == 1 else t
            for t, letter in zip(operands, _READS[name], strict=True)
        ]
        made = _MAKES[name]
        return run(tasks[name], *flat).reshape(*leads[made], *extents[made])

    def compute(run: Run, x: Array, w: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        return (phase(run, own, x, w),), (x, w)

    def gradients(
        run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array
    ) -> tuple[Array | None, Array | None]:
        x, w = kept
        dx = phase(run, "backward_data", dy, w) if wanted[0] else None
        return dx, phase(run, "backward_filter", dy, x) if wanted[1] else None

    back = tuple((tasks[p],) for p in ("backward_data", "backward_filter") if p in tasks)
    return MeshRow((tasks[own],), back if own == "forward" else (), compute, gradients)


# ---- Products ----


@dataclass(frozen=True)
class _Product:
    """`subscripts` as einsum has them, as one product of two matrices: A of the result's first letters."""

    task: ProductTask
    swapped: bool
    shapes: tuple[tuple[int, int], tuple[int, int]]  # of the operands as matrices, in their own order
    made: tuple[int, ...]

    def of(self, run: Run, *operands: Array) -> Array:
        matrices = [t.reshape(shape) for t, shape in zip(operands, self.shapes, strict=True)]
        return run(self.task, *matrices[:: -1 if self.swapped else 1]).reshape(self.made)


def _product(subscripts: str, extent: Mapping[str, int], dtype: Dtype) -> _Product | None:
    """None: an index that all three have, or letters of a matrix that don't stand together."""
    operands, result = subscripts.split("->")
    first, second = operands.split(",")
    summed = [i for i in first if i in second and i not in result]
    if any(i in first and i in second for i in result) or not summed or len(summed) + len(result) != len(extent):
        return None
    for swapped, (a, b) in ((False, (first, second)), (True, (second, first))):
        inner = "".join(i for i in a if i in summed)
        rows, columns = (side.replace(inner, "") for side in (a, b))
        if result == rows + columns and inner in b and a in (rows + inner, inner + rows):
            if b not in (inner + columns, columns + inner) or not rows or not columns:
                continue
            sizes = [prod(extent[i] for i in letters) for letters in (rows, columns, inner)]
            turned = (a != rows + inner, b != inner + columns)
            task = ProductTask(sizes[0], sizes[1], sizes[2], turned, dtype)
            shapes = [
                (sizes[2], n) if letters.startswith(inner) else (n, sizes[2])
                for letters, n in ((a, sizes[0]), (b, sizes[1]))
            ]
            one, other = shapes[:: -1 if swapped else 1]
            return _Product(task, swapped, (one, other), tuple(extent[i] for i in result))
    return None


def _contraction(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """A linear layer, or what else is one product of matrices; gradients are products too ([SW] 4.1)."""
    extent = {i: at.extent(i) for i, _ in operation.extents}
    operands, result = operation.subscripts.split("->")
    first, second = operands.split(",")
    texts = (operation.subscripts, f"{result},{second}->{first}", f"{result},{first}->{second}")
    found = [_product(text, extent, dtype) for text in texts]
    if any(one is None for one in found) or not all(extent.values()):
        return None
    forward, dx, dw = cast("list[_Product]", found)

    def compute(run: Run, x: Array, w: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        return (forward.of(run, x, w),), (x, w)

    def gradients(
        run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array
    ) -> tuple[Array | None, Array | None]:
        x, w = kept
        return dx.of(run, dy, w) if wanted[0] else None, dw.of(run, dy, x) if wanted[1] else None

    return MeshRow((forward.task,), ((dx.task,), (dw.task,)), compute, gradients)


# ---- Element by element ----


def _elements(at: Any, operation: Any) -> int:
    return prod(at.extent(f"d{d}") for d in range(len(operation.shape)))


def _pointwise(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """ReLU, and sums of two of one shape."""
    name = getattr(operation, "op", None) or operation.function
    count = _elements(at, operation)
    if not count:
        return None
    if name == "relu" and operation.shapes == (operation.shape,):
        there, back = (StreamTask(Stream(kind, count, dtype)) for kind in ("relu", "relu_backward"))

        def rectify(run: Run, x: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
            y = run(there, x)
            return (y,), (y,)

        def rectify_back(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
            return (run(back, kept[0], dy),)

        return MeshRow((there,), ((back,),), rectify, rectify_back)
    plain = name == "add" or (name == "add.Tensor" and operation.args[2:] in ((), (1,)))
    if plain and operation.shapes == (operation.shape,) * 2 and not getattr(operation, "settings", ()):
        added = StreamTask(Stream("add", count, dtype))

        def add(run: Run, a: Array, b: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
            return (run(added, a, b),), ()

        def pass_on(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
            return dy, dy

        return MeshRow((added,), ((), ()), add, pass_on)
    return None


# ---- Pooling ----


def _pooling(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """Square windows without dilation, of rows that have as much padding above as columns beside ([SW] 4.4)."""
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
    n, c, h, w = (hi - lo for lo, hi in at.inside[0])
    try:
        windows = Windows(n, c, h, w, tap.kernel, tap.stride, paddings.pop(), "average" if average else "max", dtype)
    except InputError:
        return None
    return _pooled(windows) if windows.out_shape == out else None  # others begin in the padding behind x


def _pooled(windows: Windows) -> MeshRow:
    there, back = PoolingTask(windows, backward=False), PoolingTask(windows, backward=True)
    finds = windows.kind == "max"

    def compute(run: Run, x: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        return (run(there, x),), (x,) if finds else ()

    def gradients(run: Run, wanted: Sequence[bool], kept: Sequence[Array], dy: Array) -> tuple[Array, ...]:
        return (run(back, dy, *kept),)

    return MeshRow((there,), ((back,),), compute, gradients)


def _whole_pooling(operation: Any, way: int, at: Any, dtype: Dtype) -> MeshRow | None:
    """The mean of a whole square plane; one of every element is that element."""
    whole = at.inside[0][2:] == tuple((0, n) for n in operation.shape[2:])
    if len(operation.shape) != 4 or {*operation.out} != {1} or operation.shape[2] != operation.shape[3] or not whole:
        return None
    n, c = (hi - lo for lo, hi in at.inside[0][:2])
    h, w = operation.shape[2:]
    try:
        return _pooled(Windows(n, c, h, w, h, h, 0, "average", dtype))
    except InputError:
        return None


ROWS: Mapping[str, Callable[[Any, int, Any, Dtype], MeshRow | None]] = {
    "Convolution": _convolution,
    "Contraction": _contraction,
    "Elementwise": _pointwise,
    "Pointwise": _pointwise,
    "MaxPool": _pooling,
    "AveragePool": _pooling,
    "AdaptiveAveragePool": _whole_pooling,
}
