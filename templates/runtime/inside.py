# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Parameters of a call as plain blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .blocks import Around, Block, Function
from .buckets import Buckets
from .checks import refuse_vmap


class InsideAll(Function):
    """Plain blocks of DTensors and Blocks, all in one node of autograd's graph: where buckets of gradients end.

    `names`: of parameters, for `buckets`.
    """

    @staticmethod
    def forward(name: str, names: Sequence[str], buckets: Buckets | None, *of: Any) -> tuple[Tensor, ...]:
        blocks = (t._block if isinstance(t, Block) else t._local_tensor if isinstance(t, DTensor) else t for t in of)
        return tuple([t.view_as(t) for t in blocks])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.names, ctx.buckets, *of = inputs
        ctx.places = [(t.held, t.of) if isinstance(t, Block) else getattr(t, "_spec", None) for t in of]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.buckets is not None:
            gradients = tuple(ctx.buckets.complete(ctx.names, gradients))
        if torch.is_grad_enabled():
            gradients = tuple([g if g is None else Once.apply(g, ctx.name) for g in gradients])
        else:
            gradients = own_memory(gradients)
        pairs = zip(gradients, ctx.places, strict=True)
        return None, None, None, *[g if g is None or p is None else Around.apply(g, p) for g, p in pairs]

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, names: Sequence[str], buckets: Any, *of: Any) -> Any:
        refuse_vmap(name)


def own_memory(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of which each has its own memory, as leaves of plain tensors have them: one that two parameters get is
    one tensor here, and what is around it hides from autograd that somebody else has it, too."""
    found: list[Tensor | None] = []
    seen: set[int] = set()
    for g in gradients:
        if g is not None and g.numel():
            spread = any(s == 0 and n > 1 for s, n in zip(g.stride(), g.shape, strict=True))
            g = g.clone(memory_format=torch.contiguous_format) if spread or g.data_ptr() in seen else g
            seen.add(g.data_ptr())
        found.append(g)
    return tuple(found)


class Once(Function):
    """A gradient that has none: rows of gradients say nothing of what moves for theirs."""

    @staticmethod
    def forward(gradient: Tensor, name: str) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name}: gradients of a network's gradients are not supported; those of layers are")

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, name: str) -> Any:
        refuse_vmap(name)
