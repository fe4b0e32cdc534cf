r"""Names in a graph, which become names and texts in Python: the grammar that each must follow.

| of | grammar |
|---|---|
| the network | an identifier of ASCII letters, digits and _, no keyword |
| inputs; results; classes of modules | an identifier of Python |
| parameters, buffers, constants, outputs, paths of modules | printable parts between points, no quotes, no \ |
| tensors and modules that a Network holds | no part that torch's modules, or a Network, have themselves |
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from convgen.errors import InputError
from convgen.spec.graph import Graph
from convgen.spec.names import check_name
from convgen.spec.source import KeyPath
from convgen.spec.taken import MODULE, NETWORK, PYTHONS
from convgen.spec.text import shown

MAX_NAME = 500  # characters of a path: deep models have long ones
_NOT_IN_PARTS = frozenset("\"'`\\{}")


def check_names(graph: Graph) -> None:
    """Check every name of a graph by these grammars.

    Raises:
        InputError: names the key path of the first wrong name.
    """
    check_name(graph.name, ("network",), of_file=False)
    if not graph.source.isprintable():
        raise InputError(f"source can't be {shown(graph.source)}", ("source",), hint="printable text in one line")
    for name, path, plain in _names(graph):
        if not (_is_identifier(name) if plain else _is_dotted(name)):
            what = "an identifier" if plain else "printable parts with points between, without quotes and backslashes"
            raise InputError(f"{shown(name)} can't be a name here", path, hint=f"{what}, up to {MAX_NAME} characters")
    for name, path in _held(graph):
        first, *others = name.split(".")
        taken = [first] * (first in NETWORK) + [p for p in (first, *others) if p in MODULE or PYTHONS.fullmatch(p)]
        if taken:
            fact = f"{shown(name)} can't be a name here: modules have {taken[0]} of their own"
            raise InputError(fact, path, hint=f"{taken[0]}_")


def _names(graph: Graph) -> Iterator[tuple[str, KeyPath, bool]]:
    """Each name, where it stands, and whether it is an identifier."""
    yield from ((v.name, ("inputs", v.name), True) for v in graph.inputs)
    for key, values in (("parameters", graph.parameters), ("buffers", graph.buffers), ("constants", graph.constants)):
        for v in values:
            yield v.name, (key, v.name), False
            if v.owner:
                yield v.owner, (key, v.name, "owner"), True
    for k, call in enumerate(graph.calls):
        yield from ((v.name, ("calls", k, "make"), True) for v in call.results if v is not None)
        if call.module:
            yield call.module, ("calls", k, "module"), False
        if call.kind:
            yield call.kind, ("calls", k, "kind"), True
    yield from ((name, ("outputs", name), False) for name, _ in graph.outputs)
    yield from ((name, ("aliases", name), False) for name, _ in graph.aliases)


def _held(graph: Graph) -> Iterator[tuple[str, KeyPath]]:
    """Names of tensors and modules that a Network holds, under which they are found again."""
    for key, values in (("parameters", graph.parameters), ("buffers", graph.buffers)):
        yield from ((v.name, (key, v.name)) for v in values)
    yield from ((name, ("aliases", name)) for name, _ in graph.aliases)
    yield from ((m.path, ("modules", m.path)) for m in graph.modules)


def _is_identifier(name: str) -> bool:
    """Whether a name is an identifier in NFKC form: Python would turn two that differ in form into one."""
    return name.isidentifier() and len(name) <= MAX_NAME and unicodedata.normalize("NFKC", name) == name


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(name) <= MAX_NAME and all(p and p.isprintable() and _NOT_IN_PARTS.isdisjoint(p) for p in parts)
