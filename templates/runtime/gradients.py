# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Gradients of convolutions, of gather and of scatter, and the gradients of these gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import Function

if TYPE_CHECKING:
    from .layer import Layer


class ConvolutionFunction(Function):
    """The function conv on plain blocks: y, and the values of forward that backward reads besides x and w."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, mesh: str, batch: int) -> Any:
        return layer.ops.forward(x, w, bias, mesh, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, *ctx.where = inputs
        held = outputs(output)[1:]
        ctx.save_for_backward(x, w, *held)
        if held:
            ctx.mark_non_differentiable(*held)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, w, *held = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        found = Gradients.apply(dy, x, w, *ctx.where, *needed, *held)
        return *(gradient if need else None for gradient, need in zip(found, needed, strict=True)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return one_by_one(ConvolutionFunction, arguments[3], info, in_dims, arguments)


class Gradients(Function):
    """The gradients dx, dw and db on plain blocks. They are linear in dy, in x and in w, so their own gradients are
    again convolutions of these kinds."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, w: Tensor, layer: Layer, mesh: str, batch: int, need_x: bool, need_w: bool, need_b: bool,
        *held: Tensor,
    ) -> Any:  # fmt: skip
        values = {"x": x, "w": w, **dict(zip(layer.ops.held, held, strict=True))}
        saved = [values[v] for v in layer.ops.saved]
        dy = dy.contiguous(memory_format=layer.memory_format)
        return layer.ops.backward(dy, *saved, mesh, batch, need_x, need_w, need_b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = len(inputs) - 3
        ctx.where, ctx.made = inputs[3:6], inputs[6:9]
        ctx.save_for_backward(*inputs[:3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        dy, x, w = ctx.saved_tensors
        where, layer = ctx.where, ctx.where[0]
        a, b, c = (
            g.contiguous(memory_format=layer.format(name)) if made and g is not None else None
            for g, made, name in zip(given, ctx.made, ("x", "w", "bias"), strict=True)
        )  # of dx, dw and db
        parts: list[Tensor] = []
        of_x = of_w = None
        if a is not None or c is not None:
            a = torch.zeros_like(x) if a is None else a
            part, *held = outputs(ConvolutionFunction.apply(a, w, no_bias(*where) if c is None else c, *where))
            parts.append(part)
            if ctx.needs_input_grad[2]:
                of_w = Gradients.apply(dy, a, w, *where, False, True, False, *held)[1]
        if b is not None:
            part, *held = outputs(ConvolutionFunction.apply(x, b, no_bias(*where), *where))
            parts.append(part)
            if ctx.needs_input_grad[1]:
                of_x = Gradients.apply(dy, x, b, *where, True, False, False, *held)[0]
        of_dy = sum(parts) if parts and ctx.needs_input_grad[0] else None
        return of_dy, of_x, of_w, *(None,) * ctx.rest

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return one_by_one(Gradients, arguments[3], info, in_dims, arguments)


def no_bias(layer: Layer, mesh: str, batch: int) -> Tensor | None:
    """The bias that a rank adds where none is given: zeros, or None for a layer without one."""
    if "bias" not in layer.stored:
        return None
    return torch.zeros(layer.here(mesh, batch).shape(layer.stored["bias"]), dtype=layer.dtype, device=layer.device)


def outputs(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def one_by_one(function: Any, layer: Layer, info: Any, in_dims: Any, arguments: tuple[Any, ...]) -> Any:
    """vmap's rule: every rank convolves the batch's members one after the other, so that the ranks' collectives
    meet."""

    def as_block(tensor: Tensor) -> Tensor:
        full = tensor.dim() == 2 + len(layer.spatial)
        return tensor.contiguous(memory_format=layer.memory_format if full else torch.contiguous_format)

    members = [
        function.apply(*(a if d is None else as_block(a.select(d, i)) for a, d in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(each) for each in zip(*map(outputs, members), strict=True))
    return (stacked, (0,) * len(stacked)) if isinstance(members[0], tuple) else (stacked[0], 0)


class Scatter(Function):
    """This rank's block of a whole tensor; the gradient is gathered."""

    @staticmethod
    def forward(value: Tensor, name: str, layer: Layer, key: str, batch: int) -> Tensor:
        return layer.ops.scatter(value, name, key, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        value, *ctx.where = inputs
        ctx.like = value.device, value.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Gather.apply(gradient, *ctx.where).to(*ctx.like), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return one_by_one(Scatter, arguments[2], info, in_dims, arguments)


class Gather(Function):
    """A whole tensor, gathered from the ranks' blocks; the gradient is this rank's part."""

    @staticmethod
    def forward(value: Tensor, name: str, layer: Layer, key: str, batch: int) -> Tensor:
        return layer.ops.gather(value, name, key, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Scatter.apply(gradient, *ctx.where), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return one_by_one(Gather, arguments[2], info, in_dims, arguments)
