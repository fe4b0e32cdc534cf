"""What a module says itself about torch.autocast, which a trace without autocast loses.

| in the module | in the program that is traced | here |
|---|---|---|
| a region, with or without it | a graph; when decomposed, its calls and the casts that it makes | marks around |
| `x.float()` of a float32 x | nothing, once decomposed | a mark in its place |
| types and numbers that it takes from values | those without autocast | marks with what exported_types.py notes |

Marks are operators of convgen's, which decompositions leave alone. Calls between the marks of a region are taken as
they stand; behind a mark of a type a value has that type, whatever autocast has made of it.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

from convgen.late import torch
from convgen.operations.typed import ByAutocast
from convgen.spec.exported_nodes import given_of, is_float, is_written, put_between

if TYPE_CHECKING:
    from torch.export import ExportedProgram

REGION = "wrap_with_autocast"  # (device, type, enabled, cached, the region's graph, what it reads)
INTO, OUT_OF, AS, NUMBER = "into", "out of", "as", "number"
NOTED, NUMBERS = "types by autocast", "numbers by autocast"  # in a node's meta, by autocast's type (exported_types.py)
STATISTICS = ("running_mean", "running_var")  # which norms change, though their operators' schemas don't say so
TYPED = ("to.dtype", "to.dtype_layout", "to.device")  # that are told a type


def _copied(x: Any, what: str) -> Any:
    told = what.split()
    return x.to(getattr(torch, told[1]), copy=True) if told[0] == AS and told[1:] else x.clone()


@cache
def _mark() -> Any:
    library: Any = torch.library.Library("convgen", "FRAGMENT")
    library.define("mark(Tensor x, str what) -> Tensor")
    library.impl("mark", _copied, "CompositeExplicitAutograd")
    _kept.append(library)  # an operator lives as long as its library
    return torch.ops.convgen.mark.default


_kept: list[Any] = []


def mark_autocast(program: ExportedProgram) -> None:
    """Marks regions, and changes of type that change nothing without autocast, in place."""
    graph: Any = program.graph_module
    _mark_graph(graph)
    graph.recompile()


def _mark_graph(module: Any) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        target = str(node.target)
        if target.endswith(REGION):
            *_, region = node.args[:5]
            changed = _changed(getattr(module, region.target))
            for x in [x for x, change in zip(node.args[5:], changed, strict=True) if is_float(x) and not change]:
                put_between(graph, x, node, _mark(), INTO)
            for one in [n for n in node.users if is_float(n)]:
                _behind(graph, one, OUT_OF)
            _mark_graph(getattr(module, region.target))
        elif target.startswith("wrap_with_set_grad_enabled"):
            _mark_graph(getattr(module, node.args[1].target))
        elif (types := _said(node, NOTED)) and len({*types, *_said(node, NUMBERS)}) > 1:
            _behind(graph, node, " ".join((AS, *types, *_said(node, NUMBERS))))
        elif not types and (numbers := _said(node, NUMBERS)):
            put_between(graph, node.all_input_nodes[-1], node, _mark(), " ".join((NUMBER, *numbers)))
        elif target.removeprefix("aten.") in TYPED and _says_own_type(node):
            _behind(graph, node, AS)


def _changed(module: Any) -> list[bool]:
    """Whether a region changes what it reads, by what it reads: a mark would be changed in its place."""
    lies: dict[Any, Any] = {}  # by node, what the region reads in whose memory it lies
    changed: set[Any] = set()
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "placeholder":
            lies[node] = node
        elif str(node.target).endswith(REGION):
            inside = zip(node.args[5:], _changed(getattr(module, node.args[4].target)), strict=True)
            changed.update(lies[x] for x, change in inside if change and x in lies)
        elif schema is not None:
            given = given_of(node)
            for a in [a for a in schema.arguments if given.get(a.name) in lies]:
                if is_written(a) or a.name in STATISTICS:
                    changed.add(lies[given[a.name]])
                if a.alias_info is not None:
                    lies[node] = lies[given[a.name]]
        elif node.target is operator.getitem and node.args[0] in lies:  # an item of several results
            lies[node] = lies[node.args[0]]
    return [x in changed for x in module.graph.nodes if x.op == "placeholder"]


def _said(node: Any, key: str) -> list[str]:
    """What is noted about a node: without autocast, under bfloat16, under float16."""
    if not (noted := node.meta.get(key)):
        return []
    plain = noted.get("plain") if key == NUMBERS else str(node.meta["val"].dtype).removeprefix("torch.")
    return [str(noted.get(one, plain)) for one in ("plain", "bfloat16", "float16")]


def by_autocast(said: list[str]) -> ByAutocast:
    """The types, or numbers, of a mark."""
    return ByAutocast(*(one if "float" in one else float(one) for one in said))


def _says_own_type(node: Any) -> bool:
    """Whether a call is told the type that its floating-point operand has already."""
    k = [a.name for a in node.target._schema.arguments].index("dtype")
    told = node.args[k] if k < len(node.args) else node.kwargs.get("dtype")
    both = is_float(node) and is_float(node.args[0])
    return both and told is not None and node.args[0].meta["val"].dtype == node.meta["val"].dtype


def _behind(graph: Any, node: Any, what: str) -> None:
    with graph.inserting_after(node):
        one = graph.call_function(_mark(), (node, what))
    one.meta = dict(node.meta)

    def is_other(user: Any) -> bool:
        return user is not one

    node.replace_all_uses_with(one, delete_user_cb=is_other)


def is_mark(node: Any) -> bool:
    return str(node.target) == "convgen.mark.default"
