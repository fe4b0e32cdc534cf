"""Regions without gradients (torch.no_grad): torch.export wraps each one, and decomposing drops the wrapping.

Values that a region reads are detached before it, so that nothing it makes has a gradient, new values of buffers
included. torch.inference_mode is traced as such a region. In eager PyTorch, a region that changes a tensor that is
neither a buffer nor its own keeps that tensor's gradient; detached, it would lose it, and `detach_regions` gives False.
So it is with what `y.detach()` gives, which lies in y's memory, where y is read after that was changed
(`changes_detached`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from convgen.spec.exported_forward import inside_forward
from convgen.spec.exported_nodes import given_of, is_smooth, is_written, put_between

if TYPE_CHECKING:
    from torch.export import ExportedProgram

REGION = "wrap_with_set_grad_enabled"  # (enabled, the region's graph, what it reads)
AUTOCAST = "wrap_with_autocast"  # (device, type, enabled, cached, the region's graph, what it reads)


@contextmanager
def inference_as_no_grad() -> Generator[None]:
    """While this lasts, torch.inference_mode is torch.no_grad: torch.export records nothing of it."""
    import torch

    mode: Any = torch.inference_mode
    before = mode.__enter__, mode.__exit__

    def enter(self: Any) -> None:
        self.instead = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)

    def leave(self: Any, *error: Any) -> None:
        self.instead.__exit__(*error)

    mode.__enter__, mode.__exit__ = enter, leave
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = before


@contextmanager
def detached_in_autocast(module: Any) -> Generator[None]:
    """While a module is traced, calls within autocast that have no gradients read detached values: torch.export records
    nothing of regions without gradients there."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    inside: list[Any] = []
    own: dict[int, Any] = {}  # by id, what such calls have made
    autocast: Any = torch.amp.autocast
    before = autocast.__enter__, autocast.__exit__

    def enter(self: Any) -> Any:
        inside.append(self)
        return before[0](self)

    def leave(self: Any, *error: Any) -> Any:
        inside.pop()
        return before[1](self, *error)

    class Detaching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not inside or torch.is_grad_enabled():
                return func(*args, **(kwargs or {}))
            buffers = {id(b) for b in module.buffers()}

            def detached(x: Any) -> Any:
                smooth = x.is_floating_point() or x.is_complex()
                return x.detach() if smooth and id(x) not in buffers and id(x) not in own else x

            args, kwargs = tree_map_only(torch.Tensor, detached, (args, kwargs))
            made = func(*args, **(kwargs or {}))
            own.update({id(x): x for x in tree_leaves(made) if isinstance(x, torch.Tensor)})
            return made

    autocast.__enter__, autocast.__exit__ = enter, leave
    try:
        with inside_forward(module, Detaching()):
            yield
    finally:
        autocast.__enter__, autocast.__exit__ = before


def detach_regions(program: ExportedProgram) -> bool:
    """Detach what regions without gradients read, in place; gives False if that is not right for one of them."""
    import torch

    graph: Any = program.graph_module
    buffers = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "BUFFER"}
    right = True
    for node in [n for n in graph.graph.nodes if "set_grad_enabled" in str(n.target)]:
        if str(node.target) != REGION:
            return False
        enabled, region, *given = node.args
        inside = getattr(graph, region.target)
        if enabled:
            right = right and not any("set_grad_enabled" in str(n.target) for n in inside.graph.nodes)
            continue
        known = [getattr(x, "name", "") in buffers for x in given]
        right = right and _keeps(inside, known) is not None
        for x in [x for x, buffer in zip(given, known, strict=True) if not buffer and is_smooth(x)]:
            put_between(graph.graph, x, node, torch.ops.aten.detach.default)
    graph.recompile()
    return right


def _keeps(graph: Any, buffers: list[bool]) -> list[bool] | None:
    """Whether a region changes only buffers and values that it has made itself: of each result, whether it is such a
    value; None if it changes others."""
    places = iter(buffers)
    own: set[Any] = set()  # values that the region made, and buffers
    results: dict[Any, list[bool]] = {}  # by region in this one, of its results
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if next(places):
                own.add(node)
            continue
        if node.op == "output":
            return [x in own for x in node.args[0]]
        if node.op == "get_attr":  # a region's graph
            continue
        schema = getattr(node.target, "_schema", None)
        if "set_grad_enabled" in str(node.target) or (schema is None and node.op != "call_function"):
            return None
        if str(node.target) == AUTOCAST:
            inside = _keeps(getattr(graph, node.args[4].target), [x in own for x in node.args[5:]])
            if inside is None:
                return None
            results[node] = inside
            continue
        if schema is None:  # an item of several results, or an expression of sizes
            source, place = node.args if node.target is operator.getitem else (None, 0)
            if source in own or (source in results and results[source][place]):
                own.add(node)
            continue
        given = given_of(node)
        aliased = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.name in given]
        changed = [given[a.name] for a in schema.arguments if is_written(a) and a.name in given]
        if any(x not in own for x in changed):
            return None
        if all(x in own for x in aliased):
            own.add(node)
    return []


def changes_detached(program: ExportedProgram) -> bool:
    """Whether a value that gradients reach is read after what `detach` gives of it was changed in place."""
    kinds = {s.arg.name: s.kind.name for s in program.graph_signature.input_specs}
    return _changes(program.graph_module, {name for name, kind in kinds.items() if kind == "BUFFER"})


def _changes(graph: Any, buffers: Collection[str]) -> bool:
    """`changes_detached` of a graph, and of regions with autocast in it; buffers are names of its placeholders."""
    import torch

    lies: dict[Any, Any] = {}  # by node, the one in whose memory it lies
    detached: set[Any] = set()  # nodes that lie there by `detach`
    reached: set[Any] = set()  # nodes that gradients reach
    changed: set[Any] = set()  # nodes in whose memory a detached one was changed
    for node in graph.graph.nodes:
        read = [x for x in node.all_input_nodes if x not in detached]
        if any(lies.get(x) in changed for x in read):
            return True
        if node.op == "placeholder":
            lies[node] = node
            reached |= {node} if node.name not in buffers and _may_have_gradient(node) else set()
        if node.op != "call_function":
            continue
        source: Any = None
        smooth = any(lies.get(x) in reached for x in read)
        if getattr(node.target, "_schema", None) is not None:
            given = given_of(node)
            source = next((given[a.name] for a in node.target._schema.arguments if _is_shared(a, given, node)), None)
            for x in [given[a.name] for a in node.target._schema.arguments if is_written(a) and a.name in given]:
                if x not in detached:
                    reached |= {lies[x]} if smooth else set()
                elif lies[x] in reached:
                    changed.add(lies[x])
        elif str(node.target) == AUTOCAST:
            inside = getattr(graph, node.args[4].target)
            places = [n.name for n in inside.graph.nodes if n.op == "placeholder"]
            pairs = zip(places, node.args[5:], strict=True)
            if _changes(inside, {place for place, x in pairs if getattr(x, "name", "") in buffers}):
                return True
        elif node.target is operator.getitem:  # an item of several results
            source = node.args[0]
        lies[node] = node if source is None else lies[source]
        if source in detached or node.target is torch.ops.aten.detach.default:
            detached.add(node)
        elif source is None and smooth and str(node.target) != REGION and _may_have_gradient(node):
            reached.add(node)
    return any(node.op == "placeholder" for node in changed)


def _may_have_gradient(node: Any) -> bool:
    """Whether a node is no tensor of integers or truth values."""
    import torch

    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _is_shared(argument: Any, given: Mapping[str, Any], node: Any) -> bool:
    """Whether a call's result lies in an argument's memory."""
    x = given.get(argument.name)
    values: list[Any] = [getattr(one, "meta", {}).get("val") for one in (x, node)]
    types = {one.dtype for one in values if hasattr(one, "dtype")}
    return argument.alias_info is not None and hasattr(x, "meta") and len(types) < 2
