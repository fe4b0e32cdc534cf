"""Regions without gradients (torch.no_grad): torch.export wraps each one, and decomposing drops the wrapping.

Values that a region reads are detached before it, so that nothing it makes has a gradient, new values of buffers
included. torch.inference_mode is traced as such a region. In eager PyTorch, a region that changes a tensor that is
neither a buffer nor its own keeps that tensor's gradient; detached, it would lose it, and `detach_regions` gives False.
"""

from __future__ import annotations

from collections.abc import Generator
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
        if schema is None:  # an item of several results
            source, place = node.args
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
