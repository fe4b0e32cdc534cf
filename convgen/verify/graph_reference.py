"""A network's graph on one device: its calls one after the other, in float64 or in a type of its own.

Operators are ATen's. Two calls of a graph have a form of their own (spec/graph.py): `batch_norm`, which also gives new
running statistics, and `dropout`. Random numbers are those of operations/dropout.py, also for whole channels and
samples (`bernoulli.p`), in attention, and for noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, inf, prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from convgen.operations.calls import Slot
from convgen.operations.calls import call as run_operator
from convgen.operations.dropout import Bernoulli, Dropout, Noise
from convgen.operations.fourier import Fourier
from convgen.operations.row import At
from convgen.operations.typed import under
from convgen.spec.graph import FLOATS, FOURIER, Arg, Call, Graph, Ref, refs
from convgen.spec.graph_edit import ATTENTION, BATCH_NORM, BERNOULLI, DROPOUT, NOISE, eval_graph
from convgen.spec.graph_parts import Parts


@dataclass(frozen=True)
class Made:
    """What a forward pass makes: outputs by name, and new values of buffers."""

    outputs: dict[str, Tensor]
    updates: dict[str, Tensor]


def run_graph(
    graph: Graph,
    given: Mapping[str, Tensor],
    *,
    training: bool = True,
    seed: tuple[int, int] = (0, 0),
    autocast: str = "",
) -> Made:
    """The graph's outputs, and new values of its buffers; autograd goes through.

    Args:
        graph: its number of samples is `graph.batch`.
        given: inputs, parameters, buffers and constants by name: in the graph's types; or all floats in float64, which
            is then the type of every computation.
        training: whether to run the graph as it is, or `eval_graph` of it.
        seed: the seed of random numbers, and the step, which counts from EVALUATION in evaluation.
        autocast: the type of the torch.autocast under which calls are run; "" for none.
    """
    numbers = _numbers(graph)
    graph = (graph if training else eval_graph(graph)).at()
    values = dict(given)
    doubles = {v.dtype for v in given.values() if v.is_floating_point()} == {torch.float64}
    for call in graph.calls:
        kind = "float64" if doubles else next(v.dtype for v in call.results if v is not None)
        drops = numbers.get(call.results[0].name if call.results[0] else "", 0)
        if call.op == BATCH_NORM:
            made = _batch_norm(call, values)
        elif call.op == DROPOUT:
            made = (_dropout(call, values, drops, seed),)
        elif call.op == BERNOULLI:
            shape = values[refs(call.args[0])[0]].shape
            operation = Bernoulli(tuple(shape), float(cast("float", call.args[1])), drops, kind)
            made = operation.local(0, _everywhere(shape, ((0, 2),)), torch.tensor(seed))
        elif call.op in NOISE and call.results[0] is not None:
            shape = cast("tuple[int, ...]", call.results[0].shape)
            operation = Noise(shape, "normal" if "randn" in call.op else "uniform", drops, kind)
            made = operation.local(0, _everywhere(shape, ((0, 2),)), torch.tensor(seed))
        elif call.op == FOURIER:
            kind_of, re, im, *settings = (_value(arg, values) for arg in call.args)
            operation = Fourier(tuple(re.shape), settings[0], kind_of, *settings[1:])
            made = operation.reference(*(part for part in (re, im) if part is not None))
        elif call.op == "copy":  # an assignment made functional; ATen's has no derivative
            to, of = (_value(arg, values) for arg in call.args[:2])
            made = (of.to(to.dtype).expand(to.shape),)
        elif call.op == ATTENTION and call.args[4]:
            made = (_attention(call, values, drops, seed),)
        else:
            low = autocast if not call.autocast else ""
            device = next((t.device.type for t in given.values()), "cpu")
            with torch.autocast(device, getattr(torch, low or "bfloat16"), enabled=bool(low)):
                made = _operator(call, values, doubles, autocast)
        for value, tensor in zip(call.results, made, strict=False):
            if value is not None:
                is_typed = not (doubles or (autocast and tensor.is_floating_point()))
                values[value.name] = tensor.to(getattr(torch, value.dtype)) if is_typed else tensor
    outputs = {name: values[value] for name, value in graph.outputs}
    return Made(outputs, {buffer: values[value].detach() for buffer, value in graph.updates})


def _numbers(graph: Graph) -> dict[str, int]:
    """By value made, the number of the drawing place that makes it in training, so that evaluation draws the same."""
    drawing = [c for c in graph.calls if c.op in (DROPOUT, BERNOULLI, *NOISE) or (c.op == ATTENTION and c.args[4])]
    return {name: number for number, name in enumerate(c.results[0].name for c in drawing if c.results[0])}


def _batch_norm(call: Call, values: Mapping[str, Tensor]) -> tuple[Any, ...]:
    x, w, b, mean, variance, training, momentum, eps, *parts = (_value(arg, values) for arg in call.args)
    if not training and mean is not None:
        made = torch.nn.functional.batch_norm(x, mean, variance, w, b, False, momentum, eps)
        return made, mean, variance
    if parts:
        return _batch_norm_by_parts(x, w, b, mean, variance, momentum, eps, parts[0])
    dims = [d for d in range(x.dim()) if d != 1]
    around = [1, -1, *[1] * (x.dim() - 2)]
    centre = x.mean(dims)
    centred = x - centre.view(around)
    spread = centred.square().mean(dims)
    y = centred / (spread + eps).sqrt().view(around)
    y = y if w is None else y * w.view(around)
    y = (y if b is None else y + b.view(around)).to(x.dtype)
    if mean is None:
        return (y,)
    count = x.numel() // x.shape[1]
    unbiased = spread * count / (count - 1)
    return y, mean + momentum * (centre - mean), variance + momentum * (unbiased - variance)


def _batch_norm_by_parts(
    x: Tensor, w: Any, b: Any, mean: Any, variance: Any, momentum: float, eps: float, parts: Parts
) -> tuple[Any, ...]:
    """ATen's batch norm of each part, as that part's ranks would have it; running statistics averaged by elements."""
    pieces: list[tuple[slice, ...]] = [(slice(None),) * x.dim()]
    for d, sizes in parts:
        bounds = _bounds(0, x.shape[d], sizes)
        pieces = [(*box[:d], slice(*at), *box[d + 1 :]) for box in pieces for at in bounds]
    y, centre, spread = torch.zeros_like(x), 0.0, 0.0
    for box in pieces:
        part = x[box]
        if not part.numel():
            continue
        y[box] = torch.nn.functional.batch_norm(part, None, None, w, b, True, 0.0, eps)
        dims, share = [d for d in range(x.dim()) if d != 1], part.numel() / x.numel()
        centre = centre + share * part.detach().mean(dims)
        spread = spread + share * part.detach().var(dims)
    if mean is None:
        return (y,)
    return y, mean + momentum * (centre - mean), variance + momentum * (spread - variance)


def _bounds(lo: int, hi: int, sizes: Sequence[int | tuple[int, ...]]) -> list[tuple[int, int]]:
    """Blocks over axes of these sizes, outermost first, each split again by the next axis: by numpy's rule; or by
    shares, where the rank that is owed most gets the next row."""
    if not sizes:
        return [(lo, hi)]
    if isinstance(size := sizes[0], int):
        rows = [len(one) for one in np.array_split(np.arange(lo, hi), size)]
    else:
        owed = [Fraction((hi - lo) * share, sum(size)) for share in size]
        rows = [floor(n) for n in owed]
        while sum(rows) < hi - lo:
            rows[max(range(len(rows)), key=lambda k: (owed[k] - rows[k], -k))] += 1
    starts = [lo + sum(rows[:k]) for k in range(len(rows))]
    return [one for start, n in zip(starts, rows, strict=True) for one in _bounds(start, start + n, sizes[1:])]


def _dropout(call: Call, values: Mapping[str, Tensor], number: int, seed: tuple[int, int]) -> Tensor:
    x, p, training = (_value(arg, values) for arg in call.args[:3])
    return _dropped(x, float(p), number, seed) if training else x


def _dropped(x: Tensor, p: float, number: int, seed: tuple[int, int]) -> Tensor:
    at = _everywhere(x.shape, tuple((0, n) for n in x.shape), ((0, 2),))
    (kept,) = Dropout(tuple(x.shape), p, number).local(0, at, torch.ones_like(x), torch.tensor(seed))
    return x * kept if prod(x.shape) else x


def _everywhere(shape: Sequence[int], *rows: tuple[tuple[int, int], ...]) -> At:
    """The place of a rank that has all of an operation whose indices are its result's dimensions."""
    return At({f"d{d}": (0, n) for d, n in enumerate(shape)}, rows, rows)


def _attention(call: Call, values: Mapping[str, Tensor], number: int, seed: tuple[int, int]) -> Tensor:
    """Attention written out, with dropout of its weights."""
    q, k, v, mask, p, causal, scale, *_ = (_value(arg, values) for arg in call.args)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -inf, dtype=scores.dtype).triu(1)
    return _dropped(scores.softmax(-1), float(p), number, seed) @ v


def _operator(call: Call, values: Mapping[str, Tensor], doubles: bool, autocast: str) -> tuple[Any, ...]:
    operands: list[Tensor] = []
    args = tuple(_slots(under(arg, autocast or None), values, operands, doubles) for arg in call.args)
    op = "reshape" if call.op == "view" else call.op  # values here need not have the strides that a view asks for
    made: Any = run_operator(op, args, tuple(operands))
    return tuple(cast("Sequence[Any]", made)) if isinstance(made, (tuple, list)) else (made,)


def _slots(arg: Arg, values: Mapping[str, Tensor], operands: list[Tensor], doubles: bool) -> Any:
    """An argument with slots in place of values; types of floats become float64 where that is computed in."""
    match arg:
        case Ref(name):
            operands.append(values[name])
            return Slot(len(operands) - 1)
        case tuple():
            return tuple(_slots(one, values, operands, doubles) for one in arg)
        case str() if arg in FLOATS and doubles:
            return "float64"
        case _:
            return arg


def _value(arg: Arg, values: Mapping[str, Tensor]) -> Any:
    return values[arg.name] if isinstance(arg, Ref) else arg
