"""A run of a module as it stands, where torch.export can't trace it: does it fail itself, and which numbers it holds.

An integer buffer that is in no state dict, and that no call changes, such as the stride of a padding, is a setting of a
module: sizes may depend on it.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Ran:
    """The outcome of a call.

    Attributes:
        error: the error that the module raised, if any.
        numbers: names of buffers that are settings, if it raised none.
        result: what the call gave.
    """

    error: Exception | None = None
    numbers: tuple[str, ...] = ()
    result: Any = None


def run_as_it_stands(module: nn.Module, args: Sequence[Any], keywords: dict[str, Any]) -> Ran:
    """Call a copy of the module; gives an empty outcome where it can't be copied."""
    import torch

    random: Any = torch.random
    try:
        other = copy.deepcopy(module)
    except Exception:  # whatever a copy needs that the module lacks
        return Ran()
    kept = {name for name, _ in other.named_buffers()} - other.state_dict().keys()
    held = {
        name: (b, b._version)
        for name, b in other.named_buffers()
        if name in kept and not b.dim() and not (b.is_floating_point() or b.is_complex())
    }
    with torch.no_grad(), random.fork_rng(devices=[]):
        try:
            result = other(*args, **keywords)
        except Exception as error:
            left = "FakeTensor" in str(error)  # left in the module by tracing: not its own error
            return Ran(None if left else error)
        with suppress(Exception):  # a buffer that the other mode changes is no setting either
            other.train(not module.training)(*args, **keywords)
    after = dict(other.named_buffers())
    numbers = tuple(n for n, (b, v) in held.items() if after.get(n) is b and b._version == v)
    return Ran(numbers=numbers, result=result)


@contextmanager
def as_settings(module: nn.Module, numbers: Sequence[str]) -> Generator[None]:
    """While a module is traced these buffers are numbers: a read makes a new tensor of a value that export knows."""
    whole: Any = module
    found: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}
    for name in numbers:
        path, _, last = name.rpartition(".")
        owner = whole.get_submodule(path)
        found.setdefault(id(owner), (owner, {}))[1][last] = owner._buffers[last]
    before: list[tuple[Any, Any, dict[str, Any]]] = [(o, o.__class__, dict(o._buffers)) for o, _ in found.values()]
    try:
        for owner, values in found.values():
            kind: Any = owner.__class__
            members = {last: property(_reading(value.item(), value.dtype)) for last, value in values.items()}
            other: Any = type(kind.__name__, (kind,), members)
            other.__qualname__, other.__module__ = kind.__qualname__, kind.__module__
            for last in values:
                del owner._buffers[last]
            owner.__class__ = other
        yield
    finally:
        for owner, kind, buffers in before:
            with suppress(TypeError):
                owner.__class__ = kind
            owner._buffers.clear()
            owner._buffers.update(buffers)


def _reading(value: float, dtype: torch.dtype) -> Any:
    import torch

    def reading(_: Any) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    return reading
