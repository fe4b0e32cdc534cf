"""Nodes added to an exported program beside others."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def mapped(args: Any, of: Callable[[Any], Any]) -> Any:
    """Arguments with `of` applied to the nodes among them."""
    fx: Any = import_module("torch.fx.node")
    return fx.map_arg(args, of)


def call_beside(graph: Any, like: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of an operator at the place where the graph inserts, in `like`'s module."""
    import torch

    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    values = mapped((args, kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def is_float(x: Any) -> bool:
    """Whether an argument is a node with a floating-point tensor."""
    import torch

    value = getattr(x, "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_smooth(x: Any) -> bool:
    """Whether an argument is a node with a tensor of floating-point or complex numbers."""
    import torch

    value = getattr(x, "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def given_of(node: Any) -> dict[str, Any]:
    """A call's arguments by name."""
    return {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs


def is_written(argument: Any) -> bool:
    """Whether a call changes what it is given for an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def put_between(graph: Any, x: Any, node: Any, target: Any, *more: Any) -> None:
    """Put a call that keeps shape and type between a value and a node that reads it."""
    with graph.inserting_before(node):
        one = graph.call_function(target, (x, *more))
    one.meta = dict(x.meta)
    node.replace_input_with(x, one)


def replace_by(program: Any, node: Any, by: Any) -> None:
    """Replace a node everywhere in a program, also among its results."""
    node.replace_all_uses_with(by)
    program.graph_signature.replace_all_uses(node.name, by.name)
