"""Products: matrices with batches, einsum, attention. A dimension that is broadcast is dropped from its operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convgen.operations.attention import Attention
from convgen.operations.calls import Along, Slot, Whole
from convgen.operations.contraction import Contraction
from convgen.operations.reductions import Reduce
from convgen.operations.softmax import Softmax
from convgen.operations.views import Expand, Permute, View
from convgen.spec.aten.reader import Reader, Tensor, knows, promoted, wide_of
from convgen.spec.aten.seeds import dropped
from convgen.spec.graph import Call, Ref

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def contract(reader: Reader, sides: Sequence[tuple[Tensor, str]], out: str, makes: str) -> bool:
    """Add the sum of products of one or two operands, a letter for each dimension; gives whether that can be said.

    Dimensions of 1 that are larger in the other operand are dropped. A dimension that one operand alone has, and the
    result lacks, is summed first.
    """
    if any(len(set(letters)) != len(letters) for _, letters in sides) or len(set(out)) != len(out):
        return False
    extent: dict[str, int] = {}
    for x, letters in sides:
        for i, n in zip(letters, x.shape, strict=True):
            extent[i] = max(extent.get(i, 1), n)
    left: list[tuple[Tensor, str]] = []
    for k, (x, letters) in enumerate(sides):
        others = "".join(side for j, (_, side) in enumerate(sides) if j != k)
        thin = [i for i, n in zip(letters, x.shape, strict=True) if n == 1 and (extent[i] > 1 or i in others)]
        if thin:
            kept = "".join(i for i in letters if i not in thin)
            view = reader.made(f"{makes}_thin", [extent[i] for i in kept], x.dtype)
            reader.add(View(x.shape, view.shape), [x], [view.name])
            x, letters = view, kept
        alone = tuple(d for d, i in enumerate(letters) if i not in out and i not in others)
        if alone:
            kept = "".join(i for i in letters if i not in (letters[d] for d in alone))
            total = reader.made(f"{makes}_sum", [extent[i] for i in kept], x.dtype)
            reader.add(Reduce("sum", x.shape, alone), [x], [total.name])
            x, letters = total, kept
        left.append((x, letters))
    there = "".join(i for i in out if any(i in side for _, side in left))
    whole = tuple(extent[i] for i in there)
    made = reader.tensors[makes] if there == out else reader.made(f"{makes}_product", whole, left[0][0].dtype)
    if len(left) == 1:
        x, letters = left[0]
        reader.add(Permute(x.shape, tuple(letters.index(i) for i in there)), [x], [made.name])
    else:
        (a, first), (b, second) = left
        used = "".join(dict.fromkeys(first + second))
        extents = tuple((i, extent[i]) for i in used)
        reader.add(Contraction(f"{first},{second}->{there}", extents), [a, b], [made.name])
    if there != out:  # every operand has 1 there
        reader.add(View(made.shape, reader.tensors[makes].shape), [made], [makes])
    return True


def multiply(reader: Reader, a: Tensor, b: Tensor, makes: str) -> bool:
    """Add a product with the dimensions of `matmul`."""
    if not a.shape or not b.shape:
        return False
    lead = max(len(a.shape), len(b.shape), 2) - 2
    batch = LETTERS[:lead]
    first = batch[lead - max(len(a.shape) - 2, 0) :] + ("MK" if len(a.shape) > 1 else "K")
    second = batch[lead - max(len(b.shape) - 2, 0) :] + ("KL" if len(b.shape) > 1 else "K")
    out = batch + "M" * (len(a.shape) > 1) + "L" * (len(b.shape) > 1)
    return contract(reader, [(a, first), (b, second)], out, makes)


@knows("mm", "bmm", "matmul", "mv", "dot", "vdot", "inner")
def product(reader: Reader, call: Call) -> bool:
    a, b = (reader.of(v) for v in call.args[:2])
    (result,) = call.results
    if result is None or not (a.floats and b.floats) or (call.op == "inner" and len(b.shape) > 1):
        return False
    return multiply(reader, a, b, result.name)


@knows("outer", "ger")
def outer(reader: Reader, call: Call) -> bool:
    a, b = (reader.of(v) for v in call.args[:2])
    (result,) = call.results
    if result is None or not (a.floats and b.floats):
        return False
    a, b = (reader.cast(t, promoted(a, b), result.name) for t in (a, b))
    return contract(reader, [(a, "M"), (b, "L")], "ML", result.name)


@knows("addmm", "baddbmm", "addmv", "addr")
def product_and_more(reader: Reader, call: Call) -> bool:
    """beta * c + alpha * (a @ b)."""
    c, a, b, beta, alpha = call.args
    a, b = reader.of(a), reader.of(b)
    (result,) = call.results
    assert result is not None
    if not a.floats:
        return False
    y = reader.tensors[result.name]
    shape = (*a.shape[:-1], b.shape[-1]) if len(b.shape) > 1 else a.shape[:-1] if call.op != "addr" else y.shape
    made = reader.made(f"{y.name}_product", shape, y.dtype)
    if call.op == "addr":
        contract(reader, [(a, "M"), (b, "L")], "ML", made.name)
    else:
        multiply(reader, a, b, made.name)
    if alpha != 1:
        scaled = reader.made(f"{y.name}_scaled", made.shape, y.dtype)
        reader.elementwise("mul.Scalar", (Ref(made.name), alpha), scaled)
        made = scaled
    return reader.elementwise("add.Tensor", (Ref(made.name), c, beta), y) if beta != 0 else _same(reader, made, y)


def _same(reader: Reader, x: Tensor, y: Tensor) -> bool:
    reader.add(Expand(x.shape, y.shape), [x], [y.name])
    return True


@knows("einsum")
def einsum(reader: Reader, call: Call) -> bool:
    """A product of each two operands, from left to right."""
    equation, given, *_ = call.args
    assert isinstance(equation, str) and isinstance(given, tuple)
    (result,) = call.results
    assert result is not None
    operands = [reader.of(v) for v in given]
    left, arrow, out = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    spare = [i for i in LETTERS if i not in equation]
    longest = 0
    for k, (side, x) in enumerate(zip(sides, operands, strict=True)):
        if "..." in side:
            n = len(x.shape) - len(side) + 3
            longest = max(longest, n)
            sides[k] = side.replace("...", "".join(spare[:n][::-1]))
    dots = "".join(spare[:longest][::-1])
    if not arrow:
        letters = "".join(sides)
        out = dots + "".join(sorted(i for i in set(letters) - set(dots) if letters.count(i) == 1))
    out = out.replace("...", dots)
    if not all(x.floats for x in operands):
        return False
    here, letters = operands[0], sides[0]
    if len(operands) == 1:
        return contract(reader, [(here, letters)], out, result.name)
    for k in range(1, len(operands)):
        last = k == len(operands) - 1
        rest = "".join(sides[k + 1 :]) + out
        kept = out if last else "".join(i for i in dict.fromkeys(letters + sides[k]) if i in rest)
        extent = dict(zip(letters, here.shape, strict=True))
        for i, n in zip(sides[k], operands[k].shape, strict=True):
            extent[i] = max(extent.get(i, 1), n)
        name = result.name if last else reader.made(f"{result.name}_{k}", [extent[i] for i in kept], here.dtype).name
        if not contract(reader, [(here, letters), (operands[k], sides[k])], kept, name):
            return False
        here, letters = reader.tensors[name], kept
    return True


@knows("scaled_dot_product_attention")
def attention(reader: Reader, call: Call) -> bool:
    """(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa); with dropout, it is written out as several rows."""
    q, k, v, mask, p, causal, scale, shared, *_ = call.args
    q, k, v = (reader.of(t) for t in (q, k, v))
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    rows, keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    lead = y.shape[:-2]
    own = (*lead[:-1], k.shape[-3]) if shared and len(lead) else lead
    q, k, v = (_wide(reader, t, (*n, *t.shape[-2:]), y.name) for t, n in ((q, lead), (k, own), (v, own)))
    added = None if mask is None else _mask(reader, reader.of(mask), y)
    if added is not None:
        added = _wide(reader, added, (*added.shape[:-2], rows, keys), y.name)
    if p:
        return _written_out(reader, q, k, v, added, float(p), bool(causal), scale, y)  # type: ignore[arg-type]
    batch, heads, heads_k = _joined(lead), (lead[-1] if len(lead) > 1 else 1), (own[-1] if len(lead) > 1 else 1)
    q4, k4, v4 = (
        _viewed(reader, t, (batch, n, *t.shape[-2:]), y.name) for t, n in ((q, heads), (k, heads_k), (v, heads_k))
    )
    masked: tuple[int, int] | None = None
    reads = [q4, k4, v4]
    if added is not None:
        before = added.shape[:-2]
        if len(before) > 2 and any(n > 1 for n in before[:-1]):
            added = _wide(reader, added, (*lead[:-1], *before[-1:], rows, keys), y.name)
            before = added.shape[:-2]
        padded = (1,) * (len(lead) - len(before)) + before
        masked = (_joined(padded), padded[-1] if len(padded) > 1 else 1)
        reads.append(_viewed(reader, added, (*masked, rows, keys), y.name))
    operation = Attention(batch, heads, heads_k, rows, keys, width, v.shape[-1], masked, bool(causal), scale)  # type: ignore[arg-type]
    if len(lead) == 2:
        reader.add(operation, reads, [y.name])
        return True
    made = reader.made(f"{y.name}_heads", (batch, heads, rows, v.shape[-1]), y.dtype)
    reader.add(operation, reads, [made.name])
    reader.add(View(made.shape, y.shape), [made], [y.name])
    return True


def _joined(lead: Sequence[int]) -> int:
    """The number of samples: the product of all dimensions before the heads; a single dimension is samples."""
    found = 1
    for n in lead[:-1] if len(lead) > 1 else lead:
        found *= n
    return found


def _mask(reader: Reader, mask: Tensor, y: Tensor) -> Tensor:
    """The mask as addends of scores: truth values become 0 and minus infinity."""
    if mask.dtype != "bool":
        return mask
    hidden = reader.made(f"{y.name}_hidden", mask.shape, "bool")
    reader.elementwise("logical_not", (Ref(mask.name),), hidden)
    zeros = filled(reader, f"{y.name}_zeros", mask.shape, 0.0, y.dtype)
    added = reader.made(f"{y.name}_mask", mask.shape, y.dtype)
    reader.elementwise("masked_fill.Scalar", (Ref(zeros.name), Ref(hidden.name), float("-inf")), added)
    return added


def filled(reader: Reader, name: str, shape: Sequence[int], value: float, dtype: str) -> Tensor:
    """Add a constant, which every rank makes."""
    made = reader.made(name, shape, dtype)
    args = (made.shape, value, dtype, None, "cpu", False)
    reader.add(Whole("full", args, (), (made.shape,)), [], [made.name])
    return made


def _wide(reader: Reader, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if x.shape == shape:
        return x
    made = reader.made(f"{name}_wide", shape, x.dtype)
    reader.add(Expand(x.shape, shape), [x], [made.name])
    return made


def _viewed(reader: Reader, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if x.shape == shape:
        return x
    made = reader.made(f"{name}_view", shape, x.dtype)
    reader.add(View(x.shape, shape), [x], [made.name])
    return made


def _written_out(
    reader: Reader, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, p: float, causal: bool, scale: Any, y: Tensor
) -> bool:
    """Add softmax(q k' * scale + mask), with dropout, times v."""
    if q.shape[:-2] != k.shape[:-2]:
        return False
    lead, rows, keys = LETTERS[: len(y.shape) - 2], q.shape[-2], k.shape[-2]
    shape = (*y.shape[:-2], rows, keys)
    scores, here = (reader.made(f"{y.name}_{n}", shape, y.dtype) for n in ("scores", "scaled"))
    contract(reader, [(q, f"{lead}ME"), (k, f"{lead}KE")], f"{lead}MK", scores.name)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    reader.elementwise("mul.Scalar", (Ref(scores.name), factor), here)
    terms = [] if added is None else [added]
    if causal:
        minus = filled(reader, f"{y.name}_minus", (rows, keys), float("-inf"), y.dtype)
        later = reader.made(f"{y.name}_later", (rows, keys), y.dtype)
        reader.add(Along("triu", (Slot(0), 1), (rows, keys), (0, 1), ((rows, keys),)), [minus], [later.name])
        terms.append(later)
    for one in terms:
        total = reader.made(f"{y.name}_masked", shape, y.dtype)
        reader.elementwise("add.Tensor", (Ref(here.name), Ref(one.name), 1), total)
        here = total
    weights, kept = (reader.made(f"{y.name}_{n}", shape, y.dtype) for n in ("weights", "kept"))
    reader.add(Softmax(shape, len(shape) - 1), [here], [weights.name])
    dropped(reader, weights, p, kept.name)
    return contract(reader, [(kept, f"{lead}MK"), (v, f"{lead}KV")], f"{lead}MV", y.name)


@knows("_weight_norm", "_weight_norm_interface")
def weight_norm(reader: Reader, call: Call) -> bool:
    """v * (g / |v|), the norm over all dimensions but one (-1: over all)."""
    v, g, d = call.args
    v, g = reader.of(v), reader.of(g)
    result, *rest = call.results
    if result is None or any(rest):
        return False
    from convgen.spec.aten.along import root

    y = reader.tensors[result.name]
    over = tuple(k for k in range(len(v.shape)) if d == -1 or k != int(d) % len(v.shape))  # type: ignore[arg-type]
    shape = tuple(1 if k in over else n for k, n in enumerate(v.shape))
    total = reader.made(f"{y.name}_squares", shape, wide_of(v))
    norm, factor = (reader.made(f"{y.name}_{n}", shape, v.dtype) for n in ("norm", "factor"))
    reader.add(Reduce("squares", v.shape, over, True), [v], [total.name])
    root(reader, total, norm)
    if len(g.shape) != len(shape):
        g = _wide(reader, g, shape, y.name)
    reader.elementwise("div.Tensor", (Ref(g.name), Ref(norm.name)), factor)
    return reader.elementwise("mul.Tensor", (Ref(v.name), Ref(factor.name)), y)
