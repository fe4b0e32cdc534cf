"""Batch norms and other norms, as moments and what normalises by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from convgen.algebra.relations import Blocks
from convgen.late import torch
from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import Centred, Coefficients
from convgen.operations.evaluated_norm import EvaluatedNorm
from convgen.operations.moments import Moments, Normalise
from convgen.operations.pointwise import Pointwise, affine, bias
from convgen.operations.running import PartStatistics, RunningStatistics
from convgen.spec.aten.reader import Reader, Tensor, knows, promoted, wide_of
from convgen.spec.graph import Call
from convgen.spec.graph_parts import Parts


@knows("batch_norm")
def batch_norm(reader: Reader, call: Call) -> bool:
    """(y, new mean, new variance) = batch_norm(x, weight, bias, mean, variance, training, momentum, eps[, parts]);
    y is None where nobody reads it."""
    given, w, b, mean, variance, training, momentum, eps, *parts = call.args
    x = reader.of(given)
    y, *new = call.results
    if not training and mean is None:
        return False
    if not training:
        if y is not None:
            _evaluated(reader, x, [mean, variance], w, b, float(eps), y.name)  # type: ignore[arg-type]
        return True
    of = averaged(x.shape, parts[0] if parts else ())
    name = next(v.name for v in call.results if v is not None)
    reader.norm = name
    m = reader.made(f"{name}_moments", of.moments, wide_of(x))
    reader.add(Moments(of), [x], [m.name])
    if mean is not None and any(new):
        found = m
        if of.parts:
            found = reader.made(f"{name}_statistics", (2, x.shape[1]), m.dtype)
            reader.add(PartStatistics(of), [m], [found.name])
        running = RunningStatistics(x.shape[1], float(momentum), bool(of.parts))  # type: ignore[arg-type]
        makes = [v.name if v is not None else "" for v in new]
        reader.add(running, [reader.of(mean), reader.of(variance), found], makes)
    if y is not None:
        _by_channel(reader, of, x, m, w, b, float(eps), y.name)  # type: ignore[arg-type]
    reader.norm = ""
    return True


def _evaluated(reader: Reader, x: Tensor, buffers: list[Any], w: Any, b: Any, eps: float, makes: str) -> None:
    """Normalise x by statistics in buffers."""
    operation = EvaluatedNorm(x.shape, eps, w is not None, b is not None)
    reader.add(operation, [x, *(reader.of(v) for v in (*buffers, w, b) if v is not None)], [makes])


def averaged(shape: tuple[int, ...], given: Any) -> Averaged:
    """What a batch norm averages over. Parts are pairs of a dimension and the sizes of the axes that split it, as in a
    graph's call (spec/graph_parts.py)."""
    parts: Parts = given
    blocks = tuple((d, Blocks(shape[d], sizes)) for d, sizes in parts)
    return Averaged(shape, tuple(sorted((1, *(d for d, _ in parts)))), 1, blocks)


def _by_channel(reader: Reader, of: Averaged, x: Tensor, m: Tensor, w: Any, b: Any, eps: float, makes: str) -> None:
    """Normalise x by moments of each channel."""
    p = reader.made(f"{makes}_coefficients", m.shape, m.dtype)
    vectors = [reader.of(v) for v in (w, b) if v is not None]
    reader.add(Coefficients(of.extents, eps, w is not None, b is not None), [m, *vectors], [p.name])
    reader.add(Centred(of), [x, p], [makes])


def _normalised(reader: Reader, of: Averaged, x: Tensor, m: Tensor, w: Any, b: Any, eps: float, makes: str) -> None:
    normal = reader.made(f"{makes}_normal", x.shape, x.dtype)
    _with_affine(reader, Normalise(of, eps), [x, m], w, b, normal, makes)


def _with_affine(
    reader: Reader, operation: Any, reads: list[Tensor], w: Any, b: Any, between: Tensor, makes: str
) -> None:
    """Add an operation, and rows that scale and shift its result by channel, where there are weights."""
    if w is None and b is None:
        del reader.tensors[between.name]
        reader.add(operation, reads, [makes])
        return
    reader.add(operation, reads, [between.name])
    shape = between.shape
    if w is None or b is None:
        vector = reader.of(w if b is None else b)
        one = bias(shape) if w is None else Pointwise("mul", shape, (shape, vector.shape), ((), (1,)))
        reads = [between, vector]
    else:
        one, reads = affine(shape), [between, reader.of(w), reader.of(b)]
    reader.add_in(promoted(*reads), replace(one, keeps=True), reads, [makes])


@knows("group_norm", "instance_norm")
def group_norm(reader: Reader, call: Call) -> bool:
    """group_norm(x, groups, w, b, eps, ...); instance_norm(x, w, b, mean, variance, use_input_stats, momentum, eps)."""
    x = reader.of(call.args[0])
    (y,) = call.results
    assert y is not None
    if call.op == "group_norm":
        _, groups, w, b, eps, *_ = call.args
        size = x.shape[1] // int(groups)  # type: ignore[arg-type]
    else:
        _, w, b, mean, variance, own, _, eps, *_ = call.args
        size = 1
        if not own:
            _evaluated(reader, x, [mean, variance], w, b, float(eps), y.name)  # type: ignore[arg-type]
            return True
    of = Averaged(x.shape, (0, 1), size)
    m = reader.made(f"{y.name}_moments", of.moments, wide_of(x))
    reader.add(Moments(of), [x], [m.name])
    _normalised(reader, of, x, m, w, b, float(eps), y.name)  # type: ignore[arg-type]
    return True


@knows("layer_norm", "rms_norm")
def layer_norm(reader: Reader, call: Call) -> bool:
    """layer_norm(x, normalized_shape, weight, bias, eps, ...), rms_norm(x, normalized_shape, weight, eps)."""
    x = reader.of(call.args[0])
    (y,) = call.results
    assert y is not None
    rms = call.op == "rms_norm"
    _, shape, w, *rest = call.args
    b, eps = (None, rest[0]) if rms else (rest[0], rest[1])
    eps = torch.finfo(getattr(torch, x.dtype)).eps if eps is None else eps
    last = len(shape)  # type: ignore[arg-type]
    of = Averaged(x.shape, tuple(range(len(x.shape) - last)))
    m = reader.made(f"{y.name}_moments", of.moments, wide_of(x))
    reader.add(Moments(of), [x], [m.name])
    steps = [(name, reader.of(v)) for name, v in (("mul", w), ("add", b)) if v is not None]
    here = reader.made(f"{y.name}_normal", x.shape, x.dtype) if steps else reader.tensors[y.name]
    reader.add(Normalise(of, float(eps), rms), [x, m], [here.name])  # type: ignore[arg-type]
    for i, (function, vector) in enumerate(steps):
        kind = promoted(here, vector)
        made = reader.tensors[y.name] if i == len(steps) - 1 else reader.made(f"{y.name}_scaled", x.shape, kind)
        reader.add_in(
            kind, Pointwise(function, x.shape, (x.shape, vector.shape), keeps=True), [here, vector], [made.name]
        )
        here = made
    return True
