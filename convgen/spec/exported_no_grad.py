"""Regions without gradients (torch.no_grad): torch.export wraps each one, and decomposing drops the wrapping.

Values that a region reads are detached before it, so that nothing it makes has a gradient, new values of buffers
included. torch.inference_mode is traced as such a region. In eager PyTorch, a region that changes a tensor that is
neither a buffer nor its own keeps that tensor's gradient; detached, it would lose it, and `detach_regions` gives False.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from convgen.spec.exported_nodes import is_float, put_between

if TYPE_CHECKING:
    from torch.export import ExportedProgram

REGION = "wrap_with_set_grad_enabled"  # (enabled, the region's graph, what it reads)


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
        right = right and _keeps(inside.graph, known)
        for x in [x for x, buffer in zip(given, known, strict=True) if not buffer and is_float(x)]:
            put_between(graph.graph, x, node, torch.ops.aten.detach.default)
    graph.recompile()
    return right


def _keeps(graph: Any, buffers: list[bool]) -> bool:
    """Whether a region changes only buffers and values that it has made itself."""
    places = iter(buffers)
    own: set[Any] = set()  # values that the region made, and buffers
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(places):
                own.add(node)
            continue
        if node.op == "output":
            continue
        schema = getattr(node.target, "_schema", None)
        if "set_grad_enabled" in str(node.target) or (schema is None and node.op != "call_function"):
            return False
        if schema is None:  # an item of several results
            if node.args[0] in own:
                own.add(node)
            continue
        given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | node.kwargs
        aliased = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.name in given]
        changed = [given[a.name] for a in schema.arguments if _written(a) and a.name in given]
        if any(x not in own for x in changed):
            return False
        if all(x in own for x in aliased):
            own.add(node)
    return True


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
