"""Operators that move rows: concatenation, slices, padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from convgen.operations.row import Operation
from convgen.operations.rows import Concatenate, Rolled, Wrapped, flipped, padded, sliced
from convgen.operations.views import Expand, View
from convgen.spec.aten.reader import Reader, Tensor, knows
from convgen.spec.graph import Call


@knows("cat", "concat", "concatenate")
def cat(reader: Reader, call: Call) -> bool:
    parts, d = call.args
    tensors = [reader.of(p) for p in parts]  # type: ignore[union-attr]
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    if any(len(t.shape) != len(y.shape) or t.dtype != y.dtype for t in tensors):
        return False
    axis = int(d) % len(y.shape)  # type: ignore[arg-type]
    reader.add(Concatenate(tuple(t.shape for t in tensors), axis), tensors, [y.name])
    return True


@knows("hstack", "vstack", "dstack", "column_stack", "row_stack")
def stacked(reader: Reader, call: Call) -> bool:
    """Concatenates along columns, rows or depth, for tensors that have these."""
    d = {"vstack": 0, "row_stack": 0, "dstack": 2}.get(call.op, 1)
    tensors = [reader.of(p) for p in call.args[0]]  # type: ignore[union-attr]
    if any(len(t.shape) < max(d + 1, 2) for t in tensors):
        return False
    return cat(reader, replace(call, op="cat", args=(call.args[0], d)))


@knows("unfold")
def unfold(reader: Reader, call: Call) -> bool:
    """Windows of rows: a slice for each place in a window; the slices stand in a new last dimension."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    size, step = int(call.args[2]), int(call.args[3])  # type: ignore[arg-type]
    if not x.shape or not size:
        return False
    d, y = int(call.args[1]) % len(x.shape), reader.tensors[result.name]  # type: ignore[arg-type]
    count, parts = y.shape[d], list[Tensor]()
    for k in range(size):
        part = reader.made(f"{y.name}_{k}", y.shape[:-1], y.dtype)
        reader.add(sliced(x.shape, d, k, k + (count - 1) * step + 1, step), [x], [part.name])
        parts.append(reader.made(f"{part.name}_last", (*y.shape[:-1], 1), y.dtype))
        reader.add(View(part.shape, parts[-1].shape), [part], [parts[-1].name])
    reader.add(Concatenate((parts[0].shape,) * size, len(x.shape)), parts, [y.name])
    return True


@knows("slice.Tensor", "narrow")
def a_slice(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    d = int(call.args[1]) % len(x.shape)  # type: ignore[arg-type]
    n = x.shape[d]
    if call.op == "narrow":
        start, step = int(call.args[2]) % max(n, 1), 1  # type: ignore[arg-type]
        stop = start + int(call.args[3])  # type: ignore[arg-type]
    else:
        start, stop, step = slice(call.args[2], call.args[3], call.args[4]).indices(n)  # type: ignore[arg-type]
    if step < 1:
        return False
    reader.add(sliced(x.shape, d, start, max(stop, start), step), [x], [result.name])
    return True


@knows("select.int")
def select(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    d = int(call.args[1]) % len(x.shape)  # type: ignore[arg-type]
    _row(reader, x, d, int(call.args[2]) % x.shape[d], result.name)  # type: ignore[arg-type]
    return True


@knows("split.Tensor", "split_with_sizes", "chunk", "unsafe_split.Tensor", "unsafe_chunk")
def split(reader: Reader, call: Call) -> bool:
    """Parts: by one size, by several sizes, or so many; some may have no reader."""
    x, given = reader.of(call.args[0]), call.args[1]
    d, start = int(call.args[2]) % len(x.shape), 0  # type: ignore[arg-type]
    if isinstance(given, tuple):
        sizes = [int(n) for n in given]  # type: ignore[arg-type]
    else:
        size = int(given)  # type: ignore[arg-type]
        size = -(-x.shape[d] // size) if "chunk" in call.op else size
        sizes = [min(size, x.shape[d] - k * size) for k in range(len(call.results))]
    for n, r in zip(sizes, call.results, strict=True):
        if r is not None:
            reader.add(sliced(x.shape, d, start, start + n), [x], [r.name])
        start += n
    return True


@knows("unbind.int")
def unbind(reader: Reader, call: Call) -> bool:
    x = reader.of(call.args[0])
    d = int(call.args[1]) % len(x.shape)  # type: ignore[arg-type]
    for k, r in enumerate(call.results):
        if r is not None:
            _row(reader, x, d, k, r.name)
    return True


def _row(reader: Reader, x: Tensor, d: int, at: int, makes: str) -> None:
    """Add a slice of row `at` along a dimension, without that dimension."""
    one = sliced(x.shape, d, at, at + 1)
    row = reader.made(f"{makes}_row", one.out, x.dtype)
    reader.add(one, [x], [row.name])
    reader.add(View(row.shape, (*x.shape[:d], *x.shape[d + 1 :])), [row], [makes])


@knows("meshgrid", "meshgrid.indexing")
def meshgrid(reader: Reader, call: Call) -> bool:
    """Each vector along a dimension of its own; "xy" swaps the first two."""
    vectors = [reader.of(v) for v in call.args[0]]  # type: ignore[union-attr]
    turned = len(call.args) > 1 and call.args[1] == "xy" and len(vectors) > 1
    order = [1, 0, *range(2, len(vectors))] if turned else [*range(len(vectors))]
    for k, (x, result) in enumerate(zip(vectors, call.results, strict=True)):
        if result is None:
            continue
        thin = tuple(x.shape[0] if x.shape and d == order[k] else 1 for d in range(len(vectors)))
        row = reader.made(f"{result.name}_row", thin, x.dtype)
        reader.add(View(x.shape, thin), [x], [row.name])
        reader.add(Expand(thin, reader.tensors[result.name].shape), [row], [result.name])
    return True


@knows("stack")
def stack(reader: Reader, call: Call) -> bool:
    parts, d = call.args
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    axis = int(d) % len(y.shape)  # type: ignore[arg-type]
    one = (*y.shape[:axis], 1, *y.shape[axis + 1 :])
    rows: list[Tensor] = []
    for k, part in enumerate(parts):  # type: ignore[arg-type]
        x = reader.of(part)
        if x.dtype != y.dtype:
            return False
        rows.append(reader.made(f"{y.name}_{k}", one, y.dtype))
        reader.add(View(x.shape, one), [x], [rows[-1].name])
    reader.add(Concatenate((one,) * len(rows), axis), rows, [y.name])
    return True


@knows("slice_scatter", "select_scatter")
def scatter(reader: Reader, call: Call) -> bool:
    """x with some rows replaced: the rows before, the new ones, the rows behind."""
    x, new, (result,) = reader.of(call.args[0]), reader.of(call.args[1]), call.results
    assert result is not None
    d = int(call.args[2]) % len(x.shape)  # type: ignore[arg-type]
    n = x.shape[d]
    if x.dtype != new.dtype:
        return False
    if call.op == "select_scatter":
        start, step = int(call.args[3]) % n, 1  # type: ignore[arg-type]
        stop = start + 1
        row = reader.made(f"{result.name}_row", (*x.shape[:d], 1, *x.shape[d + 1 :]), x.dtype)
        reader.add(View(new.shape, row.shape), [new], [row.name])
        new = row
    else:
        start, stop, step = slice(call.args[3], call.args[4], call.args[5]).indices(n)  # type: ignore[arg-type]
    if step != 1:
        return _interleaved(reader, x, new, d, (start, stop, step), result.name)
    parts: list[Tensor] = []
    for lo, hi, name in ((0, start, "before"), (stop, n, "behind")):
        if hi > lo:
            one = sliced(x.shape, d, lo, hi)
            parts.append(reader.made(f"{result.name}_{name}", one.out, x.dtype))
            reader.add(one, [x], [parts[-1].name])
        if name == "before":
            parts.append(new)
    reader.add(Concatenate(tuple(p.shape for p in parts), d), parts, [result.name])
    return True


def _interleaved(reader: Reader, x: Tensor, new: Tensor, d: int, rows: tuple[int, int, int], name: str) -> bool:
    """Replaces every `step`-th row of x from first to last: takes rows apart by remainder, then interleaves them."""
    (start, stop, step), n = rows, x.shape[d]
    if step < 1 or n % step or start >= step or len(range(start, stop, step)) != n // step:
        return False
    apart = (*x.shape[:d], n // step, 1, *x.shape[d + 1 :])
    parts: list[Tensor] = []
    for k in range(step):
        one = new
        if k != start:
            row = sliced(x.shape, d, k, n, step)
            one = reader.made(f"{name}_{k}", row.out, x.dtype)
            reader.add(row, [x], [one.name])
        parts.append(reader.made(f"{name}_apart_{k}", apart, x.dtype))
        reader.add(View(one.shape, apart), [one], [parts[-1].name])
    both = reader.made(f"{name}_rows", (*apart[: d + 1], step, *apart[d + 2 :]), x.dtype)
    reader.add(Concatenate((apart,) * step, d + 1), parts, [both.name])
    reader.add(View(both.shape, x.shape), [both], [name])
    return True


@knows("constant_pad_nd", "pad")
def pad(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    sides = [int(p) for p in call.args[1]]  # type: ignore[union-attr,arg-type]
    mode, value = ("constant", call.args[2]) if call.op == "constant_pad_nd" else (call.args[2], call.args[3])
    pairs = [(0, 0)] * len(x.shape)
    for i in range(len(sides) // 2):
        pairs[-1 - i] = (sides[2 * i], sides[2 * i + 1])
    if mode not in ("constant", "reflect", "replicate", "circular"):
        return False
    if mode == "circular":
        sides = [(d, below, above) for d, (below, above) in enumerate(pairs) if below or above]
        if any(not 0 <= n <= x.shape[d] for d, *some in sides for n in some):
            return False
        _chain(reader, x, [lambda s, d=d, a=a, b=b: Wrapped((s,) * 3, d, a, b) for d, a, b in sides], result.name)
        return True
    reader.add(padded(x.shape, pairs, mode, float(value or 0.0)), [x], [result.name])  # type: ignore[arg-type]
    return True


@knows("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(reader: Reader, call: Call) -> bool:
    return _pad(reader, call, "reflect")


@knows("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(reader: Reader, call: Call) -> bool:
    return _pad(reader, call, "replicate")


def _pad(reader: Reader, call: Call, mode: str) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    sides = [int(p) for p in call.args[1]]  # type: ignore[union-attr,arg-type]
    pairs = [(0, 0)] * len(x.shape)
    for i in range(len(sides) // 2):
        pairs[-1 - i] = (sides[2 * i], sides[2 * i + 1])
    reader.add(padded(x.shape, pairs, mode), [x], [result.name])  # type: ignore[arg-type]
    return True


@knows("flip")
def flip(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    dims = [int(d) % len(x.shape) for d in call.args[1] if x.shape]  # type: ignore[union-attr,arg-type]
    _chain(reader, x, [lambda s, d=d: flipped(s, d) for d in dims], result.name)
    return True


@knows("roll")
def roll(reader: Reader, call: Call) -> bool:
    """Rolls dimensions; without dimensions the flat tensor is rolled, which is not described."""
    x, (result,) = reader.of(call.args[0]), call.results
    shifts, dims = call.args[1], call.args[2]
    assert result is not None and isinstance(shifts, tuple) and isinstance(dims, tuple)
    if not dims:
        return False
    pairs = [(int(d) % len(x.shape), int(s)) for d, s in zip(dims, shifts, strict=True)]  # type: ignore[arg-type]
    _chain(reader, x, [lambda s, d=d, by=by: Rolled((s,) * 2, d, by) for d, by in pairs], result.name)
    return True


def _chain(reader: Reader, x: Tensor, steps: Sequence[Callable[[tuple[int, ...]], Operation]], makes: str) -> None:
    """Add operations one after the other, each made for the shape of the one before; every operand of one is x."""
    for k, of in enumerate(steps):
        (signature,) = (step := of(x.shape)).signatures
        name = makes if k == len(steps) - 1 else reader.made(f"{makes}_{k}", signature.results[0].shape, x.dtype).name
        reader.add(step, [x] * len(signature.inputs), [name])
        x = reader.tensors[name]
    if not steps:
        reader.add(View(x.shape, x.shape), [x], [makes])
