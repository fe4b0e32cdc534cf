"""An imported network as text: what goes in and out, its operators, and what it holds."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from convgen.spec.graph import Graph, Size, Value
from convgen.spec.text import number_of

MODES: dict[tuple[str, ...], str] = {
    ("train", "eval"): "training and evaluation",
    ("train",): "training only",
    ("eval",): "evaluation only",
}


def graph_text(graph: Graph) -> str:
    """A short listing: inputs, outputs, operators with their counts, parameters."""
    shapes = {v.name: v for v in _values(graph)}
    lines = [f"{graph.name}: {MODES[graph.modes]}, {_samples(graph)}"]
    lines += [f"  input   {v.name} {_shape(v.shape)} {v.dtype}" for v in graph.inputs]
    lines += [f"  output  {key} {_shape(shapes[name].shape)} {shapes[name].dtype}" for key, name in graph.outputs]
    held = f"  holds   {_held(graph.parameters, 'parameter')}"
    lines.append(f"{held}, {number_of(len(graph.buffers), 'buffer')}, {number_of(len(graph.constants), 'constant')}")
    lines += [f"  {count:6d}  {op}" for op, count in _operators(graph)]
    return "\n".join(lines + remarks(graph))


def remarks(graph: Graph) -> list[str]:
    """Further lines of the listing: what runs whole."""
    from convgen.explain.program import whole_calls, whole_text

    return whole_text(whole_calls(graph))


def graph_json(graph: Graph) -> dict[str, Any]:
    """The listing as plain data."""
    return {
        "name": graph.name,
        "source": graph.source,
        "modes": list(graph.modes),
        "batch": graph.batch,
        "open": dict(graph.open),
        "conditions": [str(one) for one in graph.conditions],
        "inputs": {v.name: {"shape": [_plain(n) for n in v.shape], "dtype": v.dtype} for v in graph.inputs},
        "outputs": [key for key, _ in graph.outputs],
        "operators": dict(_operators(graph)),
        "parameters": len(graph.parameters),
        "values": sum(_count(v) for v in graph.parameters),
        "buffers": len(graph.buffers),
        "constants": len(graph.constants),
    }


def _values(graph: Graph) -> list[Value]:
    made = (v for call in graph.calls for v in call.results if v is not None)
    return [*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants, *made]


def _operators(graph: Graph) -> list[tuple[str, int]]:
    counts = Counter(call.op for call in graph.calls)
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def _samples(graph: Graph) -> str:
    said = f"any number of samples N (from {graph.batch})" if graph.is_dynamic else number_of(graph.batch, "sample")
    said += "".join(f", any {letter} (from {size})" for letter, size in graph.open)
    return said + "".join(f", {one}" for one in graph.conditions)


def _held(values: tuple[Value, ...], word: str) -> str:
    return f"{number_of(len(values), word)} of {sum(_count(v) for v in values):,} values"


def _count(value: Value) -> int:
    return prod(n for n in value.shape if isinstance(n, int))


def _shape(shape: tuple[Size, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _plain(size: Size) -> int | str:
    return size if isinstance(size, int) else str(size)
