"""Patches as columns (unfold) and back (fold), by a slice of rows for each place in a patch."""

from __future__ import annotations

from itertools import product

from convgen.operations.row import Operation
from convgen.operations.rows import Concatenate, padded, sliced
from convgen.operations.views import View
from convgen.spec.aten.reader import Reader, Tensor, knows, many
from convgen.spec.graph import Call, Ref


def _after(reader: Reader, x: Tensor, operation: Operation, name: str) -> Tensor:
    y = reader.made(name, operation.signatures[0].results[0].shape, x.dtype)
    reader.add(operation, [x], [y.name])
    return y


def _rows(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@knows("im2col")
def unfold(reader: Reader, call: Call) -> bool:
    """im2col(x[N, C, H, W], kernel, dilation, padding, stride) to [N, C * places, patches]."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    kernel, dilation, padding, stride = (many(a, 2) for a in call.args[1:])
    if len(x.shape) != 4:
        return False
    name = result.name
    out = [_rows(*one) for one in zip(x.shape[2:], kernel, dilation, padding, stride, strict=True)]
    if any(padding):
        x = _after(reader, x, padded(x.shape, [(0, 0), (0, 0), *((p, p) for p in padding)], "constant", 0.0), name)
    parts: list[Tensor] = []
    for places in product(*map(range, kernel)):
        part = x
        for d, (place, by, step, rows) in enumerate(zip(places, dilation, stride, out, strict=True), 2):
            start = place * by
            part = _after(reader, part, sliced(part.shape, d, start, start + step * (rows - 1) + 1, step), name)
        parts.append(_after(reader, part, View(part.shape, (*x.shape[:2], 1, *out)), name))
    all_of_it = Concatenate(tuple(p.shape for p in parts), 2)
    both = reader.made(name, (*x.shape[:2], len(parts), *out), x.dtype)
    reader.add(all_of_it, parts, [both.name])
    reader.add(View(both.shape, reader.tensors[name].shape), [both], [name])
    return True


@knows("col2im")
def fold(reader: Reader, call: Call) -> bool:
    """col2im(x[N, C * places, patches], size, kernel, dilation, padding, stride): elements of one place are added."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    if len(x.shape) != 3:
        return False
    size, kernel, dilation, padding, stride = (many(a, 2) for a in call.args[1:])
    name, y = result.name, reader.tensors[result.name]
    out = [_rows(*one) for one in zip(size, kernel, dilation, padding, stride, strict=True)]
    x = _after(reader, x, View(x.shape, (*y.shape[:2], kernel[0] * kernel[1], *out)), name)
    total: Tensor | None = None
    for k, places in enumerate(product(*map(range, kernel))):
        part = _after(reader, x, sliced(x.shape, 2, k, k + 1), name)
        part = _after(reader, part, View(part.shape, (*y.shape[:2], *out)), name)
        for d, (place, by, step, edge, rows) in enumerate(zip(places, dilation, stride, padding, size, strict=True), 2):
            part = _apart(reader, part, d, step, name)
            before = place * by
            behind = rows + 2 * edge - before - part.shape[d]
            pairs = [(before, behind) if i == d else (0, 0) for i in range(4)]
            part = _after(reader, part, padded(part.shape, pairs, "constant", 0.0), name)
        if total is None:
            total = part
        else:
            both = reader.made(name, part.shape, part.dtype)
            reader.elementwise("add.Tensor", (Ref(total.name), Ref(part.name), 1), both)
            total = both
    assert total is not None
    for d, edge in enumerate(padding, 2):
        last = d == 3
        cut = sliced(total.shape, d, edge, total.shape[d] - edge)
        if last:
            reader.add(cut, [total], [name])
        else:
            total = _after(reader, total, cut, name)
    return True


def _apart(reader: Reader, x: Tensor, d: int, step: int, name: str) -> Tensor:
    """Rows with step - 1 rows of zeros between neighbours."""
    if step == 1:
        return x
    before, rows, behind = x.shape[:d], x.shape[d], x.shape[d + 1 :]
    apart = _after(reader, x, View(x.shape, (*before, rows, 1, *behind)), name)
    pairs = [(0, step - 1) if i == d + 1 else (0, 0) for i in range(len(apart.shape))]
    apart = _after(reader, apart, padded(apart.shape, pairs, "constant", 0.0), name)
    wide = _after(reader, apart, View(apart.shape, (*before, rows * step, *behind)), name)
    return _after(reader, wide, sliced(wide.shape, d, 0, (rows - 1) * step + 1), name)
