"""Graphs that are called chunk after chunk: frames of chunks before, which some inputs bring, stand before new ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from convgen.spec.graph import Call, Graph, Ref, refs

CONCATENATIONS = ("cat", "concat", "concatenate")
HAND_ON = (
    "_to_copy",
    "clone",
    "alias",
    "detach",
    "contiguous",
    "slice.Tensor",
)  # calls that give of a cache what it is
READ = ("pad", "constant_pad_nd", "replication_pad3d", "conv1d", "conv2d", "conv3d")  # what reads rows of chunks


def joined_for_each(graph: Graph) -> Graph:
    """The same graph, in which what reads frames of a cache and new ones together has a concatenation of its own, with
    which it can be one row (passes/fetch_caches.py).

    Example: of `c = cat(cache, x); y = conv(c, w); next = c[:, :, -2:]` the convolution gets a `c` of its own.
    """
    caches, kept = {*graph.caches}, {v for _, v in (*graph.outputs, *graph.updates)}
    readers = Counter(name for call in graph.calls for name in {n for arg in call.args for n in refs(arg)})
    names = {v.name for call in graph.calls for v in call.results if v is not None}
    joins: dict[str, Call] = {}
    calls: list[Call] = []
    for call in graph.calls:
        read = refs(call.args)
        (first, *_) = (*call.results, None)
        if first is not None and call.op in HAND_ON and caches & {*read[:1]}:
            caches.add(first.name)
        elif first is not None and call.op in CONCATENATIONS and caches & {*read}:
            joins[first.name] = call
        elif call.op in READ and read[0] in joins and (readers[read[0]] > 1 or read[0] in kept):
            own = next(n for k in range(1, len(names) + 2) if (n := f"{read[0]}_{k}_joined") not in names)
            names.add(own)
            made = joins[read[0]]
            calls.append(replace(made, results=tuple(v and replace(v, name=own) for v in made.results)))
            call = replace(call, args=(Ref(own), *call.args[1:]))
        calls.append(call)
    return graph if len(calls) == len(graph.calls) else replace(graph, calls=tuple(calls))
