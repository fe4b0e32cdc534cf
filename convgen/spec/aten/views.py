"""Views, permutations, expansion."""

from __future__ import annotations

from math import prod

from convgen.operations.pixels import PixelShuffle, PixelUnshuffle
from convgen.operations.views import Expand, Permute, View
from convgen.spec.aten.reader import Reader, Tensor, knows
from convgen.spec.graph import Call


@knows(
    "view", "reshape", "_unsafe_view", "flatten.using_ints", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims",
    "unflatten.int", "view_copy", "_reshape_alias", "view_as", "reshape_as", "ravel", "atleast_1d", "atleast_2d",
    "atleast_3d", "squeeze_copy", "unsqueeze_copy",
)  # fmt: skip
def view(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    y = reader.tensors[result.name]
    if 0 in x.shape or x.dtype != y.dtype:
        return False
    reader.add(View(x.shape, y.shape), [x], [y.name])
    return True


@knows("permute", "transpose.int", "swapaxes", "swapdims", "t", "movedim.int", "movedim.intlist", "mT", "numpy_T")
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
    elif call.op == "movedim.intlist":
        src, dst = ([int(a) % n for a in side] for side in call.args[1:3])  # type: ignore[union-attr,arg-type]
        left = iter(d for d in range(n) if d not in src)
        order = [src[dst.index(d)] if d in dst else next(left) for d in range(n)]
    elif call.op == "numpy_T":
        order.reverse()
    elif n > 1:
        p, q = (0, 1) if call.op == "t" else (n - 2, n - 1) if call.op == "mT" else (int(a) % n for a in call.args[1:3])  # type: ignore[arg-type]
        order[p], order[q] = order[q], order[p]
    reader.add(Permute(x.shape, tuple(order)), [x], [result.name])
    return True


@knows("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    reader.add(Expand(x.shape, reader.tensors[result.name].shape), [x], [result.name])
    return True


@knows("pixel_shuffle", "pixel_unshuffle")
def pixels(reader: Reader, call: Call) -> bool:
    """All dimensions before the last three count as samples."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    y, factor = reader.tensors[result.name], int(call.args[1])  # type: ignore[arg-type]
    kind = PixelShuffle if call.op == "pixel_shuffle" else PixelUnshuffle
    if len(x.shape) == 4:
        reader.add(kind(x.shape, factor), [x], [y.name])
        return True
    one = viewed(reader, x, (prod(x.shape[:-3]), *x.shape[-3:]), y.name)
    made = reader.made(f"{y.name}_samples", (one.shape[0], *y.shape[-3:]), y.dtype)
    reader.add(kind(one.shape, factor), [one], [made.name])
    reader.add(View(made.shape, y.shape), [made], [y.name])
    return True


def viewed(reader: Reader, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    made = reader.made(f"{name}_view", shape, x.dtype)
    reader.add(View(x.shape, shape), [x], [made.name])
    return made


@knows("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    n, c, *rest = x.shape
    groups = int(call.args[1])  # type: ignore[arg-type]
    apart = viewed(reader, x, (n, groups, c // groups, *rest), result.name)
    order = (0, 2, 1, *range(3, len(apart.shape)))
    turned = reader.made(f"{result.name}_turned", [apart.shape[d] for d in order], x.dtype)
    reader.add(Permute(apart.shape, order), [apart], [turned.name])
    reader.add(View(turned.shape, x.shape), [turned], [result.name])
    return True


@knows("repeat", "tile")
def repeat(reader: Reader, call: Call) -> bool:
    """Repeats each dimension: a new one before it is expanded, then joined with it."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    times = [int(t) for t in call.args[1]]  # type: ignore[union-attr,arg-type]
    times = [1] * (len(x.shape) - len(times)) + times
    shape = (1,) * (len(times) - len(x.shape)) + x.shape
    return _repeated(reader, x, [(t, n) for t, n in zip(times, shape, strict=True)], True, result.name)


@knows("repeat_interleave.self_int")
def repeat_interleave(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    if call.args[2] is None:
        return False
    d = int(call.args[2]) % len(x.shape)  # type: ignore[arg-type]
    times = int(call.args[1])  # type: ignore[arg-type]
    pairs = [(times if k == d else 1, n) for k, n in enumerate(x.shape)]
    return _repeated(reader, x, pairs, False, result.name)


def _repeated(reader: Reader, x: Tensor, pairs: list[tuple[int, int]], before: bool, makes: str) -> bool:
    if any(t < 1 for t, _ in pairs) or 0 in x.shape:
        return False
    thin, wide = list[int](), list[int]()
    for t, n in pairs:
        sides = [(1, t), (n, n)] if before else [(n, n), (1, t)]
        sides = [s for s in sides if s != (1, 1)] or [(1, 1)]
        thin += [a for a, _ in sides]
        wide += [b for _, b in sides]
    one = viewed(reader, x, tuple(thin), makes)
    made = reader.made(f"{makes}_wide", wide, x.dtype)
    reader.add(Expand(one.shape, made.shape), [one], [made.name])
    reader.add(View(made.shape, reader.tensors[makes].shape), [made], [makes])
    return True
