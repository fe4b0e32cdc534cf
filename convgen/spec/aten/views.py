"""Views, permutations, expansion."""

from __future__ import annotations

from convgen.operations.views import Expand, Permute, View
from convgen.spec.aten.reader import Reader, knows
from convgen.spec.graph import Call


@knows(
    "view", "reshape", "_unsafe_view", "flatten.using_ints", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims",
    "unflatten.int", "view_copy",
)  # fmt: skip
def view(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    y = reader.tensors[result.name]
    if 0 in x.shape or x.dtype != y.dtype:
        return False
    reader.add(View(x.shape, y.shape), [x], [y.name])
    return True


@knows("permute", "transpose.int", "t", "movedim.int")
def permute(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    n = len(x.shape)
    order = list(range(n))
    if call.op == "permute":
        order = [int(d) % n for d in call.args[1]]  # type: ignore[union-attr,arg-type]
    elif call.op == "movedim.int":
        src, dst = (int(a) % n for a in call.args[1:3])  # type: ignore[arg-type]
        order.insert(dst, order.pop(src))
    elif n > 1:
        p, q = (0, 1) if call.op == "t" else (int(a) % n for a in call.args[1:3])  # type: ignore[arg-type]
        order[p], order[q] = order[q], order[p]
    reader.add(Permute(x.shape, tuple(order)), [x], [result.name])
    return True


@knows("expand")
def expand(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    reader.add(Expand(x.shape, reader.tensors[result.name].shape), [x], [result.name])
    return True
