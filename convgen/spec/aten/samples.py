"""Rows that hold for any number of samples: what two numbers say of a network, and so every other.

At a number itself extents may look alike that are not: one sample like what is broadcast. So rows are described twice,
for numbers that no extent has, and a size that differs between the two is a multiple of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.operations.views import MANY
from convgen.spec.aten.describe import Described, describe
from convgen.spec.graph import Graph

MORE = 2003  # as MANY, another prime


class _NoMultipleError(Exception):
    """Something differs that is no multiple of the samples."""


def for_any_number(graph: Graph, device: str = "") -> tuple[Graph, Described, Described]:
    """The graph, its rows for its number of samples, and for MANY.

    A network whose rows can't be said for any number has its own alone, in the graph too.

    Args:
        device: as `describe` has it.

    Raises:
        InputError: an operator draws random numbers, or changes an operand, and no row describes it.
    """
    if graph.is_dynamic:
        many, more = (describe(graph.at(n), device) for n in (MANY, MORE))
        try:
            return graph, _at(many, more, graph.batch), _at(many, more, MANY)
        except _NoMultipleError:
            pass
    graph = graph.at(graph.batch)
    found = describe(graph, device)
    return graph, found, found


def described(graph: Graph) -> Described:
    """Its rows for its number of samples."""
    return for_any_number(graph)[1]


def _at(many: Described, more: Described, batch: int) -> Described:
    """The rows for another number of samples."""
    if len(many.rows) != len(more.rows) or many.tensors.keys() != more.tensors.keys():
        raise _NoMultipleError
    known: dict[tuple[Operation, Operation], Operation] = {}

    def operation(a: Operation, b: Operation) -> Operation:
        if (a, b) not in known:

            def of(batch: int) -> Operation:
                return _sized(a, b, batch)

            known[a, b] = of(batch).for_any(of)
        return known[a, b]

    rows: list[Bound] = []
    for a, b in zip(many.rows, more.rows, strict=True):
        if (a.reads, a.makes) != (b.reads, b.makes):
            raise _NoMultipleError
        rows.append(replace(a, operation=operation(a.operation, b.operation)))
    tensors = {n: replace(t, shape=_sized(t.shape, more.tensors[n].shape, batch)) for n, t in many.tensors.items()}
    return replace(many, rows=tuple(rows), tensors=tensors)


def _sized(a: Any, b: Any, batch: int) -> Any:
    """What is `a` at MANY samples and `b` at MORE."""
    if type(a) is not type(b):
        raise _NoMultipleError
    if is_dataclass(a):
        names = [f.name for f in fields(a) if f.init]
        pairs = ((n, getattr(a, n), getattr(b, n)) for n in names)
        found = {n: _sized(x, y, batch) for n, x, y in pairs if x is not y}
        return replace(a, **found) if found else a  # type: ignore[type-var]
    if isinstance(a, tuple):
        items: tuple[Any, ...] = a  # pyright: ignore[reportUnknownVariableType]
        if len(items) != len(b):
            raise _NoMultipleError
        return tuple(_sized(x, y, batch) for x, y in zip(items, b, strict=True))
    if isinstance(a, Mapping):
        raise _NoMultipleError
    if isinstance(a, int) and a != b:
        times, rest = divmod(a, MANY)
        if rest or times * MORE != b:
            raise _NoMultipleError
        return times * batch
    if a != b:
        raise _NoMultipleError
    return a
