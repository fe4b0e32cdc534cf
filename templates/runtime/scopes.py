# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Modules of the source in a network: names of parameters, of torch's own kinds to those who ask, and no calls.

Loops over `model.modules()` pick modules by kind: batch norms to freeze, convolutions to initialise, dropouts to keep
on. They find the same ones here; what would change how a module computes is refused, as it would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .blocks import Block
from .conv_module import refuse_whole_state


class Known(torch.nn.Module):
    """A module whose tensors may be Blocks."""

    _of: str

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


class Scope(Known):
    """A module of the source, for its parameters' names."""

    _kind = ""

    def __init__(self, name: str) -> None:
        torch.nn.Module.__init__(self)  # not that of its kind
        self._of = name

    forward = register_forward_hook = register_forward_pre_hook = never_called
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = never_called

    def __setattr__(self, name: str, value: Any) -> None:
        held = name in self.__dict__ or isinstance(value, (Tensor, torch.nn.Module)) or name.startswith("_")
        if not (held or name in ("_of", "training") or name in (*self._parameters, *self._buffers)):
            raise RuntimeError(f"{self._of}.{name} can't be set: what a network computes is compiled; import it anew")
        torch.nn.Module.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._kind:
            return super().__reduce_ex__(protocol)
        return made_again, (Scope, self._kind, self._of), self.__dict__


@cache
def of_kind(scope: type[Scope], kind: str) -> type[Scope]:
    """Scopes that are one of torch's modules to `isinstance`, and have none of its methods."""
    source = getattr(torch.nn, kind, None)
    if source is None:
        return scope
    own: dict[str, Any] = {"_kind": kind}
    for base in source.__mro__[: source.__mro__.index(torch.nn.Module)]:
        for name, value in vars(base).items():
            if hasattr(torch.nn.Module, name):
                if name not in ("__init__", "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"):
                    own.setdefault(name, getattr(scope, name))
            elif callable(value) or isinstance(value, (property, staticmethod, classmethod)):
                own.setdefault(name, not_its_own)
    return type(kind, (scope, source), own)


def made_again(scope: type[Scope], kind: str, name: str) -> Scope:
    return of_kind(scope, kind)(name)
