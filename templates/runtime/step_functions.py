# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what torch leaves untyped)
"""Functions of tensors that several kinds of steps are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from convgen.operations.rimmed import Rimmed

from .local_code import LocalCode
from .travel import dense, fills

Action = Callable[..., Any]
Flags = tuple[bool, ...]


def sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def sum_over(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, written over the first where its type and memory allow that."""
    if a is None or b is None or a.dtype != b.dtype or not fills(a):
        return sum_of(a, b)
    return a.add_(b)


def as_one(value: Any) -> Any:
    return value.whole() if isinstance(value, Rimmed) else value


def as_it_is(value: Any, *others: Any) -> Any:
    return value


def with_flags(found: Action, needed: Flags, makes: int) -> Action:
    return lambda *reads: found(*reads, needed) if makes > 1 else found(*reads, needed)[0]


def first_of(run: Callable[..., tuple[Any, ...]]) -> Action:
    return lambda *operands: run(*operands)[0]


def of_dense(run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run a gradient's row with its first operand, the gradient of a result, made dense."""
    return lambda dy, *others: run(dense(dy) if isinstance(dy, Tensor) else dy, *others)


def several_of(run: Callable[..., tuple[Any, ...]], makes: int) -> Action:
    """Run local code and add a None for each thing that the step would keep for backward."""
    return lambda *operands: (*(made := run(*operands)), *(None,) * (makes - len(made)))


def with_zeros(code: LocalCode) -> Callable[..., Any]:
    """Run a gradient's row with zeros in the place of the gradient of a result that no loss depends on."""

    def filled(*operands: Tensor | None) -> Any:
        kind = next(t.dtype for t in operands if t is not None and t.is_floating_point())
        shapes = [[hi - lo for lo, hi in box] for box in code.boxes]
        device: Mapping[str, Any] = {"dtype": kind, "device": code.stand.device}
        return code.run(*[torch.zeros(s, **device) if t is None else t for t, s in zip(operands, shapes, strict=True)])

    return filled
