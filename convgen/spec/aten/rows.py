"""Rows put elsewhere: concatenation, slices, padding."""

from __future__ import annotations

from convgen.operations.rows import Concatenate, flipped, padded, rolled, sliced
from convgen.operations.views import View
from convgen.spec.aten.reader import Reader, knows
from convgen.spec.graph import Call


@knows("cat")
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
    at = int(call.args[2]) % x.shape[d]  # type: ignore[arg-type]
    one = sliced(x.shape, d, at, at + 1)
    row = reader.made(f"{result.name}_row", one.out, x.dtype)
    reader.add(one, [x], [row.name])
    reader.add(View(row.shape, reader.tensors[result.name].shape), [row], [result.name])
    return True


@knows("split.Tensor", "split_with_sizes", "chunk")
def split(reader: Reader, call: Call) -> bool:
    x = reader.of(call.args[0])
    d, start = int(call.args[2]) % len(x.shape), 0  # type: ignore[arg-type]
    if any(r is None for r in call.results):
        return False
    for r in call.results:
        assert r is not None
        n = reader.tensors[r.name].shape[d]
        reader.add(sliced(x.shape, d, start, start + n), [x], [r.name])
        start += n
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
    dims = [int(d) % len(x.shape) for d in call.args[1]]  # type: ignore[union-attr,arg-type]
    assert result is not None
    if len(dims) != 1:
        return False
    reader.add(flipped(x.shape, dims[0]), [x], [result.name])
    return True


@knows("roll")
def roll(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    shifts, dims = call.args[1], call.args[2]
    assert result is not None and isinstance(shifts, tuple) and isinstance(dims, tuple)
    if len(dims) != 1 or len(shifts) != 1:
        return False
    reader.add(rolled(x.shape, int(dims[0]) % len(x.shape), int(shifts[0])), [x], [result.name])  # type: ignore[arg-type]
    return True
