"""Containers of tensors, as torch's pytrees know them: lists, tuples, dicts, named tuples, dataclasses, and registered
classes. A tree is the form of a container: tensors are slots in it, everything else stands in it as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from convgen.errors import InputError
from convgen.spec.text import number_of, one_line

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

PLAIN = (bool, int, float, str, type(None))  # types that may stand among tensors


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a tensor, with its name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Node:
    """A container: `kind` and `context` are torch's, such as dict and its keys."""

    kind: Any
    context: Any
    parts: tuple[Tree, ...]

    @property
    def keys(self) -> list[str]:
        """Names of the parts: keys, fields, or numbers."""
        known: Any = getattr(self.context, "_fields", self.context)  # for a named tuple torch has its class
        # For a dataclass torch has its fields, and those that are None; for a defaultdict its factory, and its keys.
        several: list[Any] = [*known, known] if isinstance(known, (list, tuple)) else []
        for one in several:
            if isinstance(one, (list, tuple)) and len(cast("list[Any]", one)) == len(self.parts):
                return [str(key) for key in cast("list[Any]", one)]
        return [str(k) for k in range(len(self.parts))]

    def __str__(self) -> str:
        return str(getattr(self.context if hasattr(self.context, "_fields") else self.kind, "__name__", self.kind))


Tree = Node | Slot | bool | int | float | str | None


def level(value: Any) -> tuple[Node, list[Any]] | None:
    """A container without its parts, and these; None for no container. Makes dataclasses known to torch."""
    from torch.utils import _pytree as pytree

    _register(type(value))
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
    return None if spec.is_leaf() else (Node(spec.type, spec.context, (None,) * len(parts)), parts)


def _register(kind: Any) -> None:
    import torch
    from torch.utils import _pytree as pytree

    if dataclasses.is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(cast("type", kind))


def register_all(value: Any) -> int:
    """Make all dataclasses in a value known to torch as containers; gives how many kinds were not."""
    from torch.utils import _pytree as pytree

    before = len(pytree.SUPPORTED_NODES)
    tree_of(value, lambda _, __: None, "")
    return len(pytree.SUPPORTED_NODES) - before


def tree_of(value: Any, leaf: Callable[[str, Any], Any], name: str, between: str = "_") -> Any:
    """The tree of a value.

    Args:
        leaf: makes what stands for a value that is no container, from its name and itself.
        name: the value's; parts' names are this and their keys.
    """
    found = level(value)
    if found is None:
        return leaf(name, value)
    node, parts = found
    names = [f"{name}{between}{key}" if name else key for key in node.keys]
    return dataclasses.replace(
        node, parts=tuple(tree_of(v, leaf, n, between) for n, v in zip(names, parts, strict=True))
    )


def tree_of_spec(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    """The tree of one of torch's specs, with these leaves in its places."""
    if spec.is_leaf():
        return next(leaves)
    return Node(spec.type, spec.context, tuple(tree_of_spec(one, leaves) for one in spec.children()))


def slots(tree: Any, name: str = "", between: str = ".") -> Iterator[tuple[str, Slot]]:
    """Slots, each with the path of keys that leads to it."""
    if isinstance(tree, Slot):
        yield name, tree
    elif isinstance(tree, Node):
        for key, one in zip(tree.keys, tree.parts, strict=True):
            yield from slots(one, f"{name}{between}{key}" if name else key, between)


def filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """The container, with values in its slots."""
    from torch.utils import _pytree as pytree

    if isinstance(tree, Slot):
        return values[tree.name]
    if not isinstance(tree, Node):
        return tree
    _register(tree.kind)
    return pytree.SUPPORTED_NODES[tree.kind].unflatten_fn([filled(one, values) for one in tree.parts], tree.context)


def alike(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors can't be told apart; 2 and 2.0 can."""
    if a is b:
        return True
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)  # nan, and the sign of zero
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # whatever doesn't compare
        return False


def taken(tree: Any, value: Any, name: str, refuse: Callable[[str], NoReturn]) -> Iterator[tuple[str, Any]]:
    """The tensors of a value, by their slots; everything else must be as the tree has it.

    Args:
        name: the value's, for messages.
        refuse: raises an error that says how a value differs from the example's.
    """
    import torch

    if isinstance(tree, Slot):
        if not isinstance(value, torch.Tensor):
            refuse(f"{name} is {said(value)}, but a tensor in the example inputs")
        yield tree.name, value
        return
    found = None if isinstance(value, torch.Tensor) else level(value)
    if not isinstance(tree, Node):
        if found is not None or not alike(value, tree):
            refuse(f"{name}={said(value)}, but {said(tree)} of the example inputs is built in")
        return
    if found is None or found[0].kind is not tree.kind or str(found[0]) != str(tree):
        refuse(f"{name} is {said(value)}, but a {tree} in the example inputs")
    node, parts = found
    if len(parts) != len(tree.parts) or node.context != tree.context:
        keys, wanted = node.keys, tree.keys
        if keys == wanted or (keys == [str(k) for k in range(len(keys))]):
            refuse(f"{name} has {number_of(len(parts), 'part')}, {len(tree.parts)} in the example inputs")
        refuse(f"{name} has {', '.join(keys) or 'nothing'}, but {', '.join(wanted) or 'nothing'} in the example inputs")
    for key, one, part in zip(tree.keys, tree.parts, parts, strict=True):
        yield from taken(one, part, f"{name}.{key}", refuse)


def said(value: Any) -> str:
    """A value for a message."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, PLAIN):
        return one_line(repr(value), 60)
    return f"a {type(value).__name__}"


def check_leaf(name: str, value: Any) -> None:
    """Raises InputError: a value is neither a tensor nor of a type that may stand among tensors."""
    import torch

    if not isinstance(value, (torch.Tensor, *PLAIN)):
        fact = f"input {name} is a {type(value).__name__}: inputs are tensors, numbers and texts that are built in, or "
        raise InputError(f"{fact}containers of them", hint="a module around it, whose arguments are tensors")
