# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Activation checkpointing: all ranks compute again at the same place."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .blocks import Function


class Last(Function):
    """An output that keeps an empty tensor: the last one that checkpointing sees kept, and the first one that backward
    asks for. So all ranks compute again at the same place and to the end, also those that have nothing else to keep."""

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output.detach().flatten()[:0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        return gradient


def kept(made: Any) -> Any:
    """The outputs, each with a Last behind it."""
    if isinstance(made, dict):
        return {name: kept(y) for name, y in made.items()}
    if isinstance(made, tuple):
        return tuple([kept(y) for y in made])
    return Last.apply(made) if made.requires_grad else made


def is_kept_elsewhere() -> bool:
    """Whether hooks take the tensors that autograd keeps, as those of activation checkpointing do."""
    ask = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(True) is not None
