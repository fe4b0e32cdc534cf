"""Graphs called chunk after chunk: frames of earlier chunks, which some inputs bring, stand before new frames."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from convgen.spec.graph import Call, Graph, Ref, refs
from convgen.spec.graph_edit import renamed

CONCATENATIONS = ("cat", "concat", "concatenate")
HAND_ON = ("_to_copy", "clone", "alias", "detach", "contiguous", "slice.Tensor")  # calls that pass on a cache's frames
READ = ("pad", "constant_pad_nd", "replication_pad3d", "conv1d", "conv2d", "conv3d")  # calls that read rows of chunks


def joined_for_each(graph: Graph) -> Graph:
    """The same graph, in which each call that reads a cache's frames together with new ones has a concatenation of its
    own, so that both can be one row (passes/fetch_caches.py).

    Example: of `c = cat(cache, x); y = conv(c, w); next = c[:, :, -2:]` the convolution gets a `c` of its own.
    """
    kept = {v for _, v in (*graph.outputs, *graph.updates)}
    readers = Counter(name for call in graph.calls for name in {n for arg in call.args for n in refs(arg)})
    names = {v.name for call in graph.calls for v in call.results if v is not None}
    handed: dict[str, tuple[Call, ...]] = dict.fromkeys(graph.caches, ())  # by value, the calls from a cache to it
    joins: dict[str, tuple[Call, ...]] = {}  # likewise for concatenations
    calls: list[Call] = []

    def again(those: tuple[Call, ...]) -> str:
        """Add the calls once more, under names of their own; gives the last one's name."""
        own: dict[str, str] = {}
        for call in those:
            (name,) = (v.name for v in call.results if v is not None)
            own[name] = next(n for k in range(1, len(names) + 2) if (n := f"{name}_{k}_joined") not in names)
            names.add(own[name])
            calls.append(renamed(call, lambda name: own.get(name, name)))
        return [*own.values()][-1]

    for call in graph.calls:
        read = refs(call.args)
        name = call.results[0].name if len(call.results) == 1 and call.results[0] is not None else ""
        if name and call.op in HAND_ON and read and read[0] in handed:
            handed[name] = (*handed[read[0]], call)
        elif name and call.op in CONCATENATIONS and (caches := [n for n in read if n in handed]):
            joins[name] = (*handed[caches[0]], call)
        elif call.op in READ and read[0] in joins:
            those = joins[read[0]]
            between = [v.name for one in those for v in one.results if v is not None]
            if any(readers[n] > 1 or n in kept for n in between):
                call = replace(call, args=(Ref(again(those)), *call.args[1:]))
        calls.append(call)
    return graph if len(calls) == len(graph.calls) else replace(graph, calls=tuple(calls))
