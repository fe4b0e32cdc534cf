"""Elements picked by tensors of numbers: gathered, scattered, put; along other dimensions blocks are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from convgen.operations.calls import Apart
from convgen.operations.row import numbered
from convgen.spec.aten.reader import Reader, Tensor, knows, slots
from convgen.spec.graph import FLOATS, Call, Ref

T = TypeVar("T")


def _apart(reader: Reader, call: Call, dims: Sequence[Sequence[str]], made: Sequence[str]) -> bool:
    """Add the operator as one row that is split by every index in `dims`, of operands, and in `made`, of its result."""
    found: list[Tensor] = []
    args = tuple(slots(a, reader, found) for a in call.args)
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    extents = tuple((i, n) for i, n in zip(made, y.shape, strict=True) if i)
    if not extents or 0 in y.shape:
        return False
    operation = Apart(
        call.op,
        args,
        tuple(t.shape for t in found),
        tuple(tuple(one) for one in dims),
        (y.shape,),
        (tuple(made),),
        extents,
        () if y.dtype in FLOATS else (0,),
        tuple(t.floats for t in found),
    )
    reader.add(operation, found, [y.name])
    return True


@knows("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_reduce.two")
def along_one(reader: Reader, call: Call) -> bool:
    """Picks along one dimension are split along the others where all operands have the same extent."""
    tensors = [reader.of(a) for a in call.args if isinstance(a, Ref)]
    count, d = len(tensors[0].shape), int(call.args[1])  # type: ignore[arg-type]
    if any(len(t.shape) != count for t in tensors) or not count:
        return False
    alike = [len({t.shape[k] for t in tensors}) == 1 and k != d % count for k in range(count)]
    names = [i if same else "" for i, same in zip(numbered(count), alike, strict=True)]
    return _apart(reader, call, [names] * len(tensors), names)


@knows("index_add", "index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor")
def rows_by_number(reader: Reader, call: Call) -> bool:
    x, d = reader.of(call.args[0]), int(call.args[1])  # type: ignore[arg-type]
    count = len(x.shape)
    names = [i if k != d % max(count, 1) else "" for k, i in enumerate(numbered(count))]
    tensors = [reader.of(a) for a in call.args if isinstance(a, Ref)]
    return _apart(reader, call, [names if len(t.shape) == count else [""] * len(t.shape) for t in tensors], names)


@knows("index_put")
def index_put(reader: Reader, call: Call) -> bool:
    """Puts elements by numbers; or one value by a mask of x's first dimensions, elementwise."""
    x, places, value = reader.of(call.args[0]), _places(reader, call.args[1]), reader.of(call.args[2])
    (result,) = call.results
    assert result is not None
    y, first = reader.tensors[result.name], places[0] if places else None
    if first is not None and len(places) == 1 and first.dtype == "bool":
        if value.shape not in ((), (1,)) or call.args[3] or first.shape != x.shape[: len(first.shape)]:
            return False
        mask = _widened(reader, first, x, y.name)
        return reader.elementwise("where.self", (Ref(mask.name), call.args[2], call.args[0]), y)
    names = _picked(x, places)
    if names is None:
        return False
    left, right = names
    shape = _taken(x, places)
    behind = len(shape) - len(value.shape)
    if behind < 0:
        return False
    fits = [i if value.shape[k] == shape[behind + k] else "" for k, i in enumerate(right[behind:])]
    return _apart(reader, call, [left, *[[""] * len(p.shape) for p in places if p], fits], left)


def index(reader: Reader, call: Call) -> bool:
    """Picks by numbers along several dimensions."""
    x, places = reader.of(call.args[0]), _places(reader, call.args[1])
    names = _picked(x, places)
    return names is not None and _apart(reader, call, [names[0], *[[""] * len(p.shape) for p in places if p]], names[1])


@knows("one_hot")
def one_hot(reader: Reader, call: Call) -> bool:
    """Adds a last dimension of classes, which is whole; the call must say how many there are."""
    names = numbered(len(reader.of(call.args[0]).shape))
    return int(call.args[1]) > 0 and _apart(reader, call, [names], [*names, ""])  # type: ignore[arg-type]


@knows("bucketize.Tensor", "searchsorted.Tensor")
def buckets(reader: Reader, call: Call) -> bool:
    """The place of each number among boundaries; every rank has all boundaries."""
    first, second = (reader.of(a) for a in call.args[:2])
    x, edges = (first, second) if call.op.startswith("bucketize") else (second, first)
    if len(edges.shape) != 1 or any(isinstance(a, Ref) for a in call.args[2:]):
        return False
    names = numbered(len(x.shape))
    return _apart(reader, call, [names, [""]] if x is first else [[""], names], names)


@knows("cdist")
def distances(reader: Reader, call: Call) -> bool:
    """Distances between pairs of points; by a product of matrices where ATen takes one for all of them."""
    a, b = (reader.of(x) for x in call.args[:2])
    if a.shape[:-2] != b.shape[:-2]:
        return False
    *batch, p, r = numbered(len(a.shape))
    many = a.shape[-2] > 25 or b.shape[-2] > 25
    mode = call.args[3] if call.args[3] in (1, 2) else 1 if many else 2
    of = replace(call, args=(*call.args[:3], mode))
    return _apart(reader, of, [[*batch, p, ""], [*batch, r, ""]], [*batch, p, r])


@knows("bilinear")
def bilinear(reader: Reader, call: Call) -> bool:
    """y_o = a W_o b + bias_o for each row of a and b."""
    *rows, o = numbered(len(reader.of(call.args[0]).shape))
    bias = [[o]] if isinstance(call.args[3], Ref) else []
    return _apart(reader, call, [[*rows, ""], [*rows, ""], [o, "", ""], *bias], [*rows, o])


@knows(
    "linalg_inv", "inverse", "linalg_det", "det", "logdet", "linalg_cholesky", "linalg_pinv", "linalg_matrix_exp",
    "matrix_exp", "linalg_matrix_power", "cholesky_inverse",
)  # fmt: skip
def of_matrices(reader: Reader, call: Call) -> bool:
    """A function of each matrix, split over batches."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    batch = numbered(len(x.shape))[:-2]
    return _apart(reader, call, [[*batch, "", ""]], [*batch, *[""] * (len(result.shape) - len(batch))])


def _places(reader: Reader, given: Any) -> list[Tensor | None]:
    return [None if one is None else reader.of(one) for one in cast("Sequence[Any]", given)]


def _widened(reader: Reader, mask: Tensor, x: Tensor, name: str) -> Tensor:
    """A mask of x's first dimensions, with dimensions of 1 for the others."""
    from convgen.operations.views import View

    if len(mask.shape) == len(x.shape):
        return mask
    made = reader.made(f"{name}_mask", (*mask.shape, *[1] * (len(x.shape) - len(mask.shape))), mask.dtype)
    reader.add(View(mask.shape, made.shape), [mask], [made.name])
    return made


def _picked(x: Tensor, places: Sequence[Tensor | None]) -> tuple[list[str], list[str]] | None:
    """Names of indices: of x's dimensions, and of the result of picking; None where that isn't known."""
    there = [k for k, p in enumerate(places) if p is not None]
    if not there or any(p.dtype not in ("int64", "int32") for p in places if p is not None):
        return None
    left = [i if k not in there else "" for k, i in enumerate(numbered(len(x.shape)))]
    wide = [""] * len(_shape(places))
    return left, _beside([i for i in left if i], wide, places)


def _taken(x: Tensor, places: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The shape of the result of picking."""
    rest = [n for k, n in enumerate(x.shape) if k >= len(places) or places[k] is None]
    return tuple(_beside(rest, _shape(places), places))


def _shape(places: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The common shape of the tensors of numbers."""
    return np.broadcast_shapes(*(p.shape for p in places if p is not None))


def _beside(rest: Sequence[T], wide: Sequence[T], places: Sequence[Tensor | None]) -> list[T]:
    """Dimensions of the result: those of the numbers where these stand, if side by side, else first; then the
    others."""
    there = [k for k, p in enumerate(places) if p is not None]
    lead = there[0] if there == [*range(there[0], there[-1] + 1)] else 0
    return [*rest[:lead], *wide, *rest[lead:]]
