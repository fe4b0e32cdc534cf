"""Reads networks: a YAML file, or plain data, to a Network (docs/plan.md shows the form)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convgen.errors import InputError, Note
from convgen.spec.form import MAX_SIZE
from convgen.spec.formats import without_format
from convgen.spec.layer import DTYPES
from convgen.spec.names import check_name, did_you_mean
from convgen.spec.network import Network, Node
from convgen.spec.network_blocks import INPUT, Written, write_out
from convgen.spec.network_shapes import infer, keys_of, needed_keys
from convgen.spec.source import Source, locate
from convgen.spec.taken import PYTHONS
from convgen.spec.text import as_list, beginning, shown
from convgen.spec.yaml import read_yaml

KEYS = ("name", "input", "dtype", "blocks", "nodes")
_NODES = re.compile(r"^nodes\s*:", re.MULTILINE)
OTHER_FILES = {  # by a key that only such files have
    "layer": "this is a layer file",
    "layers": "this is a plan",
    "network_plan": "this is a plan",
}


def is_network_file(path: str | Path) -> bool:
    """Whether a file has a line with the key `nodes`, as networks written by hand do; False if it can't be read."""
    return _NODES.search(beginning(path)) is not None


def read_network(path: str | Path) -> Network:
    """The network that a YAML file describes.

    Args:
        path: the file; its name as given goes into messages.
    Raises:
        InputError: the file can't be read, or describes no network that can work; says file, line, the numbers, and
            what would work.
    """
    document = read_yaml(path)
    return network_from_dict(document.data, document.source)


def network_from_dict(data: dict[str, Any], source: Source = Source()) -> Network:  # noqa: B008 (frozen)
    """The network that a mapping describes, in the network file's keys.

    Example:
        >>> nodes = [{"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3}, {"kind": "relu"}]
        >>> network_from_dict({"name": "tiny", "input": [1, 3, 9, 9], "nodes": nodes}).nodes[-1].shape
        (1, 8, 7, 7)
    """
    try:
        return _network(data, source)
    except InputError as error:
        raise locate(error, source) from None


def _network(data: dict[str, Any], source: Source) -> Network:
    data = without_format(data)
    if other := next((kind for key, kind in OTHER_FILES.items() if key in data and "nodes" not in data), None):
        raise InputError(f"{other}, not a network", hint="a file with nodes, like those in examples/networks")
    for key in data:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS, f"keys of a network are {', '.join(KEYS)}")
            raise InputError(f"unknown key {shown(key)}", (key,), hint=hint)
    for key in ("name", "input", "nodes"):
        if key not in data:
            raise InputError(f"{key} is missing", hint=f"keys of a network are {', '.join(KEYS)}")
    if not isinstance(data["name"], str):
        raise InputError(f"name can't be {shown(data['name'])}", ("name",), hint="text, a Python identifier")
    dtype = data.get("dtype", "float32")
    if dtype not in DTYPES:
        hint = did_you_mean(str(dtype), DTYPES, f"one of {', '.join(DTYPES)}")
        raise InputError(f"dtype can't be {shown(dtype)}", ("dtype",), hint=hint)
    shape = _input_shape(data["input"])
    written = write_out(data["nodes"], data.get("blocks", {}))
    nodes = [Node(name=INPUT, kind="input", inputs=(), shape=shape, path=("input",))]
    shapes = {INPUT: shape}
    for one in _sorted(written):
        made = _made(one, shapes)
        shapes[one.name] = made.shape
        nodes.append(made)
    _check_one_output(nodes)
    return Network(name=check_name(data["name"], of_file=False), dtype=str(dtype), nodes=tuple(nodes), source=source)


def _input_shape(value: object) -> tuple[int, ...]:
    extents = as_list(value) or []
    sizes = [e for e in extents if isinstance(e, int) and not isinstance(e, bool) and 1 <= e <= MAX_SIZE]
    if not 2 <= len(sizes) <= 5 or len(sizes) != len(extents):
        fact = f"input can't be {shown(value)}"
        raise InputError(fact, ("input",), hint="[N, C, spatial...]: 2 to 5 integers from 1 to 2**31 - 1")
    return tuple(sizes)


def _made(one: Written, shapes: dict[str, tuple[int, ...]]) -> Node:
    """A node with its shape; an error names the node, its line and the block that it comes from."""
    try:
        check_name(one.name)
        if PYTHONS.fullmatch(one.name):
            fact = f"the name {one.name} is an attribute of every object"
            raise InputError(fact, ("name",), hint=f"name: {one.name.strip('_')}_")
        known = keys_of(one.kind)
        for key in one.attributes:
            if key not in known:
                hint = did_you_mean(key, known, f"keys of {one.kind} are {', '.join(('name', 'kind', 'from', *known))}")
                raise InputError(f"unknown key {shown(key)} of {one.kind}", (key,), hint=hint)
        if missing := [key for key in needed_keys(one.kind) if key not in one.attributes]:
            raise InputError(f"{one.kind} needs {' and '.join(missing)}", hint=f"{missing[0]}: ...")
        made = infer(one.kind, one.attributes, {name: shapes[name] for name in one.inputs})
    except InputError as error:
        error.path = (*one.path, *error.path)
        reads = ", ".join(f"{n} {list(shapes[n])}" for n in one.inputs)
        own = Note("node", f"{one.name}: {one.kind} of {reads}", one.path)
        error.notes = (own, *(n for n in error.notes if n.label != "layer"), *one.notes)
        raise
    return Node(
        name=one.name, kind=one.kind, inputs=one.inputs, shape=made.shape, conv=made.conv, layer=made.layer,
        numbers=made.numbers, path=one.path,
    )  # fmt: skip


def _sorted(written: Sequence[Written]) -> list[Written]:
    """Nodes in topological order, which is the written order if that is topological.

    Raises:
        InputError: a name stands twice, an input doesn't exist, or nodes form a cycle.
    """
    by_name: dict[str, Written] = {}
    for one in written:
        if one.name in by_name or one.name == INPUT:
            fact = f"the name {one.name} stands twice" if one.name != INPUT else "the name input is the network's input"
            notes = (Note("first", by_name[one.name].kind, by_name[one.name].path),) if one.name in by_name else ()
            raise InputError(fact, one.path, notes=(*notes, *one.notes), hint="a name a node: name: ...")
        by_name[one.name] = one
    for one in written:
        for name in one.inputs:
            if name not in by_name and name != INPUT:
                hint = did_you_mean(name, [INPUT, *by_name], "the name of a node, or input")
                raise InputError(f"{one.name} reads {name}, which no node is", (*one.path, "from"), one.notes, hint)
    done: dict[str, Written] = {}
    left = list(written)
    while left:
        ready = [one for one in left if all(n == INPUT or n in done for n in one.inputs)]
        if not ready:
            _refuse_cycle({one.name: one for one in left})
        if len(ready) == len(left) or ready[0] is left[0]:
            # A prefix of the written order, as long as it is topological.
            for one in left:
                if not all(n == INPUT or n in done for n in one.inputs):
                    break
                done[one.name] = one
        else:
            done[ready[0].name] = ready[0]
        left = [one for one in left if one.name not in done]
    return list(done.values())


def _refuse_cycle(left: dict[str, Written]) -> None:
    """Raises InputError with a cycle, found by following inputs until a node comes up again."""
    seen: list[str] = []
    here = next(iter(left))
    while here not in seen:
        seen.append(here)
        here = next(n for n in left[here].inputs if n in left)
    cycle = [*seen[seen.index(here) :], here][::-1]
    one = left[here]
    hint = "a node reads nodes that don't depend on it"
    raise InputError(f"the nodes form a cycle: {' -> '.join(cycle)}", (*one.path, "from"), one.notes, hint)


def _check_one_output(nodes: Sequence[Node]) -> None:
    read = {name for node in nodes for name in node.inputs}
    ends = [node for node in nodes if node.name not in read]
    if len(ends) > 1:
        notes = tuple(Note("output", f"{node.name}: {node.kind} {list(node.shape)}", node.path) for node in ends[:6])
        fact = f"{len(ends)} nodes are read by none: {', '.join(node.name for node in ends[:6])}"
        raise InputError(fact, ends[0].path, notes, "one output: join the others (add, concat), or remove them")


def with_batch(network: Network, batch: int) -> Network:
    """The same network with another number of samples."""
    nodes: list[Node] = []
    for node in network.nodes:
        shape = (batch, *node.shape[1:]) if node.shape else ()
        conv = replace(node.conv, batch=batch) if node.conv is not None else None
        nodes.append(replace(node, shape=shape, conv=conv))
    return replace(network, nodes=tuple(nodes))
