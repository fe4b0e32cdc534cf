"""Batch norms with statistics of parts of the batch: in a graph, and by how a layout splits what they normalise.

| statistics | a part, with statistics of its own |
|---|---|
| global | the whole batch: what one device computes |
| spatial | the samples of a rank, with all of their rows: merged over the ranks that share a sample |
| local | what a rank holds |

A call of `batch_norm` has its parts behind eps: pairs of a dimension and the sizes of the axes that split it, outermost
first. So a graph says what it computes, on whatever grid it is laid out.

Source: [SP] III-B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from convgen.algebra.blocks import Uneven
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.errors import InputError
from convgen.spec.graph import Arg, Call, Graph, Ref
from convgen.spec.graph_edit import BATCH_NORM
from convgen.spec.names import did_you_mean

Statistics = Literal["global", "spatial", "local"]
Parts = tuple[tuple[int, tuple[int | tuple[int, ...], ...]], ...]
CHANNELS = 1  # their dimension


def check_statistics(statistics: str) -> None:
    """Raises InputError: there are no such statistics."""
    names: tuple[str, ...] = get_args(Statistics)
    if statistics not in names:
        hint = did_you_mean(statistics, names, ", ".join(names))
        raise InputError(f"batch norms have no statistics {statistics}", hint=hint)


def parts_of(statistics: str, stored: Sequence[Axes], grid: Grid) -> Parts:
    """The parts of a batch norm whose operand is stored so.

    Example:
        >>> parts_of("spatial", (("N",), (), ("H",), ()), Grid((("N", 2), ("H", 2))))
        ((0, (2,)),)
    """
    of: Mapping[str, Sequence[int]] = {"global": (), "spatial": (0,), "local": range(len(stored))}
    dims = [d for d in of[statistics] if d < len(stored) and d != CHANNELS]
    sizes = {d: tuple(_plain(grid.sizes[a]) for a in stored[d] if grid.sizes[a] > 1) for d in dims}
    return tuple((d, own) for d, own in sizes.items() if own)


def _plain(size: int) -> int | tuple[int, ...]:
    """An axis's size as relations have it: a number of ranks, or a share for each."""
    return size.shares if isinstance(size, Uneven) else size


def normalised(graph: Graph) -> tuple[str, ...]:
    """Names of the values that batch norms in training read."""
    return tuple(dict.fromkeys(name for call in graph.calls if (name := _normalised(call)) is not None))


def _normalised(call: Call) -> str | None:
    """The name of the value that a batch norm in training reads; None for another call."""
    if call.op != BATCH_NORM or not call.args[5]:
        return None
    operand = call.args[0]
    assert isinstance(operand, Ref)
    return operand.name


def with_statistics(graph: Graph, statistics: str, stored: Mapping[str, Sequence[Axes]], grid: Grid) -> Graph:
    """The graph with statistics of batch norms in training by parts, as their operands are stored.

    Args:
        stored: by name, how a value is stored; a value that is missing has copies.
    Raises:
        InputError: an operand has other dimensions.
    """
    calls = list(graph.calls)
    made = [v for call in calls for v in call.results if v is not None]
    given = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)
    dims = {v.name: len(v.shape) for v in (*given, *made)}
    for i, call in enumerate(calls):
        if (name := _normalised(call)) is None:
            continue
        if name in stored and len(stored[name]) != dims[name]:
            fact = f"{name} has {dims[name]} dimensions, its layout {len(stored[name])}"
            raise InputError(fact, ("values", name), hint="an entry a dimension")
        parts: Arg = parts_of(statistics, stored.get(name, ()), grid)
        calls[i] = replace(call, args=(*call.args[:8], parts) if parts else call.args[:8])
    return replace(graph, calls=tuple(calls))
