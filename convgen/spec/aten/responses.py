"""A local response normalisation as one row; torch.export makes nine calls of it.

    %2 = mul %x, %x     pad     mean of size planes     mul alpha     add k     pow beta     y = div %x, %p

It is for targets that have a program for it. Elsewhere each call stays a row, so that autocast takes them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from convgen.operations.average_pooling import AveragePool
from convgen.operations.bound import Bound
from convgen.operations.calls import Elementwise
from convgen.operations.local_response import LocalResponseNorm
from convgen.operations.rows import Take
from convgen.spec.aten.describe import Described
from convgen.spec.graph import Graph

KINDS = ("mul", "view", "take", "average_pool", "view", "mul", "add", "pow", "div")


def with_responses(graph: Graph, found: Described) -> Described:
    """The rows, with one row in place of those of a normalisation whose inner values nothing else reads."""
    readers = Counter(name for row in found.rows for name in row.reads)
    readers.update([*(v for _, v in graph.outputs), *(v for _, v in graph.updates)])
    rows: list[Bound] = []
    calls: list[int] = []
    tensors, i = dict(found.tensors), 0
    while i < len(found.rows):
        group = found.rows[i : i + len(KINDS)]
        if (operation := _response(group, readers)) is not None:
            last = group[-1]
            rows.append(Bound(operation, (group[0].reads[0],), last.makes, last.module))
            i += len(KINDS)
            for row in group[:-1]:
                del tensors[row.makes[0]]
        else:
            rows.append(found.rows[i])
            i += 1
        calls.append(found.calls[i - 1])
    return replace(found, tensors=tensors, rows=tuple(rows), calls=tuple(calls))


def _response(rows: Sequence[Bound], readers: Counter[str]) -> LocalResponseNorm | None:
    """The normalisation that these rows are; None if they are none."""
    if tuple(row.operation.name for row in rows) != KINDS:
        return None
    if any(readers[row.makes[0]] != 1 for row in rows[:-1]):
        return None
    squared, _, padded, pooled, _, scaled, shifted, raised, divided = rows
    x = squared.reads[0]
    chain = pairwise(rows[:-1])
    if squared.reads != (x, x) or divided.reads != (x, raised.makes[0]) or any(b.reads != a.makes for a, b in chain):
        return None
    pool, pad = pooled.operation, padded.operation
    plain = (squared.operation, scaled.operation, shifted.operation, raised.operation, divided.operation)
    elementwise = [one for one in plain if isinstance(one, Elementwise)]
    if not isinstance(pool, AveragePool) or not isinstance(pad, Take) or len(elementwise) != len(plain):
        return None
    shape, size = elementwise[0].shape, pool.taps[0].kernel
    numbers: list[Any] = [one.args[1] for one in elementwise[1:4]]
    relation = pad.relations[2] if len(pad.relations) > 2 else None
    fits = (
        all(one.shape == shape for one in elementwise)
        and pad.shape[1:3] == (1, shape[1])
        and relation is not None
        and getattr(relation, "pad", None) == size // 2
        and pad.out[2] == shape[1] + size - 1
        and all(t.kernel == 1 for t in pool.taps[1:])
        and pool.taps[0].stride == 1
        and pool.divisor is None
        and all(isinstance(n, (int, float)) for n in numbers)
        and elementwise[2].args[2:] in ((), (1,))
        and pad.fill == 0
    )
    return LocalResponseNorm(shape, size, float(numbers[0]), float(numbers[2]), float(numbers[1])) if fits else None
