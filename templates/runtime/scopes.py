# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Modules of the source in a network: names of parameters, of torch's own kinds to those who ask, and no calls.

Loops over `model.modules()` pick modules by kind: batch norms to freeze, convolutions to initialise, dropouts to keep
on. They find the same ones here; what would change how a module computes is refused, as it would change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .blocks import Block
from .conv_module import refuse_whole_state

Said = Mapping[str, Any]  # plain attributes of a module of torch.nn, by name
LISTS = ("Sequential", "ModuleList")
READ = ("__len__", "__iter__", "__contains__", "__reversed__", "keys", "items", "values")  # of containers
READ_ALONE = "what a network computes is compiled: change the module, and then parallelize or import it anew"


class Known(torch.nn.Module):
    """A module whose tensors may be Blocks, and whose children are the source's."""

    _of: str
    _said: Said = MappingProxyType({})  # for copies, until they have theirs

    def __getattr__(self, name: str) -> Any:
        return self._said[name] if name in self._said else torch.nn.Module.__getattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module) or name in self.__dict__.get("_modules", ()):
            raise RuntimeError(f"{self._of}.{name} can't be set: {READ_ALONE}")
        torch.nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if any(name in self.__dict__[kind] for kind in ("_modules", "_parameters", "_buffers")):
            raise RuntimeError(f"{self._of}.{name} can't be deleted: {READ_ALONE}")
        torch.nn.Module.__delattr__(self, name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        raise RuntimeError(f"{self._of} can't get a module {name}: {READ_ALONE}")

    register_module = add_module

    def _refuse_whole(self) -> None:
        if any(isinstance(t, Block) for t in (*self._parameters.values(), *self._buffers.values())):
            refuse_whole_state(self._of, "model.full_state_dict()")

    def named_parameters(self, *args: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self._refuse_whole()
        return torch.nn.Module.named_parameters(self, *args, **how)

    def named_buffers(self, *args: Any, **how: Any) -> Iterator[tuple[str, Tensor]]:
        self._refuse_whole()
        return torch.nn.Module.named_buffers(self, *args, **how)


def never_called(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"{self._of} is a name of parameters in a network, no call: hooks are for the Network itself")


def not_its_own(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"{self._of} is a name of parameters in a network: what it computes is compiled, and its parameters are set "
        "by load_full, reset_parameters(seed) of the Network, or one by one"
    )


def picked(self: Any, index: Any) -> Any:
    """A child by number or name, or for a slice the list of its children."""
    children = self._modules
    if isinstance(index, str):
        return children[index]
    if not isinstance(index, slice):
        return list(children.values())[operator.index(index)]
    kept = [pair for i, pair in enumerate(children.items()) if i in range(len(children))[index]]
    some = of_kind(Scope, self._kind)(f"{self._of}[{index.start}:{index.stop}]")
    some._modules.update(kept if self._kind == LISTS[0] else {str(i): child for i, (_, child) in enumerate(kept)})
    return some


class Scope(Known):
    """A module of the source, which gives its parameters their names."""

    _kind = ""

    def __init__(self, name: str, said: Said | None = None) -> None:
        torch.nn.Module.__init__(self)  # not the __init__ of the kind that it is of
        self._of, self._said = name, said or {}

    forward = register_forward_hook = register_forward_pre_hook = never_called
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = never_called

    def __setattr__(self, name: str, value: Any) -> None:
        held = name in self.__dict__ or isinstance(value, (Tensor, torch.nn.Module)) or name.startswith("_")
        if not (held or name == "training" or name in (*self._parameters, *self._buffers)):
            raise RuntimeError(f"{self._of}.{name} can't be set: {READ_ALONE}")
        Known.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._kind:
            return super().__reduce_ex__(protocol)
        return made_again, (Scope, self._kind, self._of), self.__dict__


@cache
def of_kind(scope: type[Scope], kind: str) -> type[Scope]:
    """A class of scopes that are one of torch's modules to `isinstance`, and have none of its methods."""
    source = getattr(torch.nn, kind, None)
    if not (isinstance(source, type) and issubclass(source, torch.nn.Module)) or source is torch.nn.Module:
        return scope
    own: dict[str, Any] = {"_kind": kind}
    if kind in (*LISTS, "ModuleDict"):
        own |= {"__getitem__": picked} | {name: getattr(source, name) for name in READ if hasattr(source, name)}
    for base in source.__mro__[: source.__mro__.index(torch.nn.Module)]:
        for name, value in vars(base).items():
            if hasattr(torch.nn.Module, name):
                if name not in ("__init__", "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"):
                    own.setdefault(name, getattr(scope, name))
            elif callable(value) or isinstance(value, (property, staticmethod, classmethod)):
                own.setdefault(name, not_its_own)
    return type(kind, (scope, source), own)


class OfChildren(Known):
    """A network whose source is a list of modules."""

    _kinds: ClassVar[Sequence[tuple[str, Said]]]
    __getitem__ = picked

    @property
    def _kind(self) -> str:
        return self._kinds[0][0]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())


def made_again(scope: type[Scope], kind: str, name: str) -> Scope:
    return of_kind(scope, kind)(name)
