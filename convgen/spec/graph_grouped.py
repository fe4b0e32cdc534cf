"""A network as if its convolutions had groups: the communication that layouts would save.

Source: [CF] 8, "grouped convolutions could be used to reduce the communication requirements of our algorithms".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from convgen.errors import InputError
from convgen.spec.graph import Call, Graph, Ref, Value, refs

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")  # (x, w, bias, stride, padding, dilation, groups)


def grouped(graph: Graph, groups: int) -> tuple[Graph, tuple[str, ...]]:
    """Another network, and the names of modules that it changes: convolutions of one group, whose channels and filters
    divide by `groups`, have so many groups, and weights with so many times fewer elements.

    Raises:
        InputError: there are no such convolutions.
    """
    parameters = {v.name: v for v in graph.parameters}
    readers = Counter(name for call in graph.calls for name in refs(call.args))
    smaller: dict[str, Value] = {}
    calls: list[Call] = []
    modules: list[str] = []
    for call in graph.calls:
        w = parameters.get(call.args[1].name) if call.op in CONVOLUTIONS and isinstance(call.args[1], Ref) else None
        if w is not None and call.args[6] == 1 and readers[w.name] == 1 and _divide(w, groups):
            filters, channels, *taps = w.shape
            smaller[w.name] = replace(w, shape=(filters, int(channels) // groups, *taps))  # type: ignore[call-overload]
            modules.append(call.module)
            call = replace(call, args=(*call.args[:6], groups, *call.args[7:]))
        calls.append(call)
    if not modules:
        fact = f"no convolution of {graph.name} has channels and filters that divide by {groups} groups"
        raise InputError(fact, hint="fewer groups")
    values = tuple(smaller.get(v.name, v) for v in graph.parameters)
    return replace(graph, parameters=values, calls=tuple(calls)), tuple(modules)


def _divide(w: Value, groups: int) -> bool:
    return all(isinstance(n, int) and n % groups == 0 for n in w.shape[:2])
