# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A call's parameters as plain blocks."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .blocks import Around, Block, Function
from .checks import refuse_vmap

Span = tuple[int, int]


class InsideAll(Function):
    """The plain blocks of DTensors and Blocks, all by one node of autograd's graph; the last output is a link without
    elements, by which the graph leads to all of them."""

    @staticmethod
    def forward(name: str, *of: Any) -> tuple[Tensor, ...]:
        blocks = (t._block if isinstance(t, Block) else t._local_tensor if isinstance(t, DTensor) else t for t in of)
        blocks = [t.view_as(t) for t in blocks]
        return *blocks, blocks[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, *of = inputs
        ctx.places = [(t.held, t.of) if isinstance(t, Block) else getattr(t, "_spec", None) for t in of]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradients = gradients[:-1]  # the link has none
        around = Around.apply if torch.is_grad_enabled() else Around.forward
        pairs = zip(gradients, ctx.places, strict=True)
        return None, *[g if g is None or p is None else around(g, p) for g, p in pairs]

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, *of: Any) -> Any:
        refuse_vmap(name)


def own_memory(gradients: Sequence[Tensor | None], given: Sequence[Tensor | None] = ()) -> list[Tensor | None]:
    """The gradients, each in memory of its own, as leaves of plain tensors get them. Two parameters may get one tensor
    here, or parts of one, or that of an output's gradient: the DTensors or Blocks around it hide from autograd that it
    is shared, so it is copied.

    Args:
        given: other tensors, whose memory is taken, too.
    """
    others = [_span(t) for t in given if t is not None and t.numel()]
    found: list[Tensor | None] = []
    taken: list[Span] = []  # rising; no two of them meet
    for g in gradients:
        if g is not None and g.numel() and not g.is_meta:  # there nothing has memory
            spread = not g.is_contiguous() and any(s == 0 and n > 1 for s, n in zip(g.stride(), g.shape, strict=True))
            span = _span(g)
            i = bisect(taken, span)
            if spread or any(_meet(span, one) for one in (*taken[max(0, i - 1) : i + 1], *others)):
                g = g.clone(memory_format=torch.contiguous_format)
                span = _span(g)
            insort(taken, span)
        found.append(g)
    return found


def _span(tensor: Tensor) -> Span:
    """The addresses between which a tensor's elements lie."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _meet(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]
