"""Rows of a network as tasks of a core group: what forward and backward of a rank's part of a row run on the mesh.

The compiler asks for a row's tasks to have their closed forms, a package to run them. A package has classes of its own
for operations; so a row is known by the name of its operation's class and by the attributes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from convgen.errors import InputError
from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.network.layers import LAYERS
from convgen.sw26010.network.mesh_row import Array, MeshRow, Run
from convgen.sw26010.network.tasks import ConvolutionTask, ProductTask
from convgen.sw26010.target.plan import LocalProblem
from convgen.sw26010.target.volume import plan_rank

FREE = ("View",)  # other names of the same elements


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
    """None where both operands and the result have an index, or the letters of a matrix don't stand together."""
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
    """A linear layer, or anything else that is one product of matrices and has such gradients ([SW] 4.1)."""
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


ROWS: Mapping[str, Callable[[Any, int, Any, Dtype], MeshRow | None]] = {
    "Convolution": _convolution,
    "Contraction": _contraction,
    **LAYERS,
}
