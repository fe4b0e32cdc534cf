"""A network file's compact notation, written out: blocks with parameters, repetition, default names and inputs.

blocks:
  basic:                                   # a block's nodes; the first reads the block's input, called `in`
    - {name: a, kind: conv, out_channels: $width, kernel_size: 3, padding: 1}
    - {kind: relu}                         # named a_relu, reads the node before
    - {kind: add, from: [a_relu, in]}      # the last node is what the block makes
nodes:
  - {name: res, block: basic, width: 64, repeat: [x, y]}      # resx_a, resx_a_relu, ..., resy_a, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from convgen.errors import InputError, Note
from convgen.spec.names import did_you_mean
from convgen.spec.network import KINDS
from convgen.spec.source import KeyPath
from convgen.spec.text import as_list, shown
from convgen.spec.text import kind as kind_of

MAX_NODES = 20_000
MAX_DEPTH = 100
INPUT = "input"


@dataclass(frozen=True, slots=True)
class Written:
    """A node before shapes: names resolved, parameters filled in."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    path: KeyPath
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a list of nodes stands: what its names begin with, what it reads, and through which blocks."""

    prefix: str
    entry: str
    values: Mapping[str, Any]
    stack: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def write_out(nodes: object, blocks: object) -> tuple[Written, ...]:
    """Every node of a network, with blocks expanded.

    Raises:
        InputError: an entry that is no node; paths lead into the file's data.
    """
    if not isinstance(blocks, dict):
        raise InputError(f"blocks is {kind_of(blocks)}, not a mapping", ("blocks",), hint="blocks: {name: [nodes]}")
    expander = _Expander(cast("dict[str, Any]", blocks))
    expander.list(nodes, ("nodes",), _Scope("", INPUT, {}))
    return tuple(expander.found)


class _Expander:
    def __init__(self, blocks: dict[str, Any]) -> None:
        self.blocks = blocks
        self.found: list[Written] = []

    def list(self, nodes: object, path: KeyPath, scope: _Scope) -> str:
        """Append the nodes of a list; gives the name of the last."""
        entries = as_list(nodes)
        if not entries:
            fact = f"{'.'.join(map(str, path))} is {kind_of(nodes) if nodes else 'empty'}, not a list of nodes"
            raise InputError(fact, path, hint="a list of {name: ..., kind: ...}")
        local = {"in": scope.entry}
        before, base = scope.entry, scope.prefix.rstrip("_")
        for i, entry in enumerate(entries):
            here = (*path, i)
            if not isinstance(entry, dict):
                fact = f"{kind_of(entry)} is no node"
                raise InputError(fact, here, notes=scope.notes, hint="{name: conv1, kind: conv, ...}")
            data = {k: self.value(v, (*here, k), scope) for k, v in cast("dict[str, Any]", entry).items()}
            given = data.pop("name", None)
            if given is not None and (not isinstance(given, str) or not given):
                raise InputError(f"name can't be {shown(given)}", (*here, "name"), hint="a text")
            inputs = self.inputs(data, before, local, here, scope)
            if "block" in data:
                before = self.block(data, given, inputs, here, scope)
                base = scope.prefix + given if given else base
                local[given or ""] = before
                continue
            before = self.node(data, given, base, inputs, here, scope)
            local[before.removeprefix(scope.prefix)] = before
            base = before if given else base
        return before

    def node(
        self,
        data: dict[str, Any],
        given: str | None,
        base: str,
        inputs: tuple[str, ...],
        path: KeyPath,
        scope: _Scope,
    ) -> str:
        if "kind" not in data:
            fact = f"node {given or len(self.found) + 1} has neither kind nor block"
            raise InputError(fact, path, notes=scope.notes, hint=f"kind: {', '.join(KINDS)}")
        kind = data.pop("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS, f"kinds are {', '.join(KINDS)}")
            raise InputError(f"unknown kind {shown(kind)}", (*path, "kind"), notes=scope.notes, hint=hint)
        name = scope.prefix + given if given else f"{base}_{kind}" if base else kind
        if len(self.found) >= MAX_NODES:
            raise InputError(f"the network has more than {MAX_NODES} nodes", path, hint="fewer repetitions")
        self.found.append(Written(name, kind, inputs, data, path, scope.notes))
        return name

    def block(
        self, data: dict[str, Any], given: str | None, inputs: tuple[str, ...], path: KeyPath, scope: _Scope
    ) -> str:
        name = data.pop("block")
        if not isinstance(name, str) or name not in self.blocks:
            hint = did_you_mean(str(name), self.blocks, f"blocks are {', '.join(self.blocks) or 'none'}")
            raise InputError(f"block {shown(name)} is unknown", (*path, "block"), notes=scope.notes, hint=hint)
        if name in scope.stack:
            fact = f"block {name} contains itself"
            raise InputError(fact, (*path, "block"), notes=scope.notes, hint="a block may contain other blocks")
        if len(scope.stack) >= MAX_DEPTH:
            fact = f"blocks stand in one another {MAX_DEPTH} deep at {name}"
            raise InputError(fact, (*path, "block"), notes=scope.notes, hint="fewer blocks within blocks")
        if given is None:
            raise InputError(
                f"block {name} is used without a name", path, hint="name: what its nodes' names begin with"
            )
        if len(inputs) != 1:
            raise InputError(f"block {name} reads {len(inputs)} nodes", (*path, "from"), hint="a block reads one node")
        used = set(_parameters(self.blocks[name]))
        if unknown := [key for key in data if key not in used and key != "repeat"]:
            hint = did_you_mean(unknown[0], used, f"its parameters are {', '.join(sorted(used)) or 'none'}")
            fact = f"block {name} has no parameter {shown(unknown[0])}"
            raise InputError(fact, (*path, unknown[0]), notes=scope.notes, hint=hint)
        suffixes = _suffixes(data.pop("repeat", [""]), (*path, "repeat"))
        note = Note("block", f"{name}, used as {scope.prefix}{given}", path)
        entry = inputs[0]
        for suffix in suffixes:
            inner = _Scope(
                f"{scope.prefix}{given}{suffix}_", entry, data, (*scope.stack, name), (*scope.notes[-3:], note)
            )
            entry = self.list(self.blocks[name], ("blocks", name), inner)
        return entry

    def inputs(
        self, data: dict[str, Any], before: str, local: dict[str, str], path: KeyPath, scope: _Scope
    ) -> tuple[str, ...]:
        """Full names of the nodes that a node reads; a name that its block lacks is the network's."""
        value = data.pop("from", None)
        if value is None:
            return (before,)
        names = as_list(cast("object", value))
        names = [value] if names is None else names
        if not names or not all(isinstance(n, str) for n in names):
            fact = f"from can't be {shown(value)}"
            raise InputError(fact, (*path, "from"), notes=scope.notes, hint="the name of a node, or a list of names")
        said = [str(n) for n in names]
        if len(set(said)) < len(said):
            fact = f"from: {shown(value)} names a node twice"
            raise InputError(fact, (*path, "from"), notes=scope.notes, hint="each node once")
        in_block = bool(scope.stack)
        return tuple(local.get(n) or (scope.prefix + n if in_block else n) for n in said if n or in_block)

    def value(self, value: object, path: KeyPath, scope: _Scope) -> Any:
        """A value with $parameters filled in."""
        if (items := as_list(value)) is not None:
            return [self.value(item, (*path, i), scope) for i, item in enumerate(items)]
        if isinstance(value, str) and value.startswith("$"):
            key = value[1:]
            if key not in scope.values:
                known = ", ".join(scope.values) or "none"
                fact = f"parameter {shown(value)} has no value"
                raise InputError(
                    fact, path, notes=scope.notes, hint=f"{key}: ... where the block is used; given: {known}"
                )
            return scope.values[key]
        return value


def _parameters(value: object) -> Iterator[str]:
    """Names of parameters, which a block's nodes write with a $."""
    if isinstance(value, dict):
        for item in cast("dict[str, object]", value).values():
            yield from _parameters(item)
    elif (items := as_list(value)) is not None:
        for item in items:
            yield from _parameters(item)
    elif isinstance(value, str) and value.startswith("$"):
        yield value[1:]


def _suffixes(repeat: object, path: KeyPath) -> list[str]:
    """The ends of names for each repetition: the texts given, or 1, 2, ..."""
    if isinstance(repeat, int) and not isinstance(repeat, bool) and 1 <= repeat <= MAX_NODES:
        return [str(i + 1) for i in range(repeat)]
    texts = as_list(repeat)
    if texts and all(isinstance(text, str) for text in texts):
        return [str(text) for text in texts]
    fact = f"repeat can't be {shown(repeat)}"
    raise InputError(fact, path, hint="how often, or a list of texts that the names end with: [a, b]")
