# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""The torch ops of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .blocks import Block
from .checks import check
from .conversions import copy_parts, flat, named, within
from .here import Here, frame_at

if TYPE_CHECKING:
    from .layer import Layer


PhaseCode = Callable[..., tuple[Tensor, ...]]

# Tables and counters that an op makes at its first call outlive it, and the memory that torch.compile's CUDA graphs
# (mode="reduce-overhead") warm up in is taken back: they go around these ops. `graphed` records them.
UNRECORDED = (torch.Tag.cudagraph_unsafe,)


class Ops(NamedTuple):
    """A layer's ops, torch.ops.convgen.NAME_forward and so on, and the names of what forward leaves for backward."""

    forward: Any
    backward: Any
    scatter: Any
    gather: Any
    inside: Any
    saved: tuple[str, ...]  # those of x, w and the held values that backward takes besides dy
    held: tuple[str, ...]  # values of forward that backward reads


def define_ops(
    layer: Layer,
    run_forward: PhaseCode,
    run_backward: PhaseCode,
    like_forward: PhaseCode,
    saved: tuple[str, ...],
    held: tuple[str, ...],
) -> Ops:
    """Plain ops with fake rules around a layer's schedule; conv carries the gradient.

    Args:
        run_forward: (x, w, bias, here) to y and the values held.
        run_backward: (dy, the values saved, here, need_dx, need_dw, need_db) to dx, dw and db, empty where not needed.
        like_forward: (x, here) to tensors like run_forward's.
    """
    name, stored = f"convgen::{layer.name}", layer.stored
    made = ", ".join(["Tensor"] * (1 + len(held)))

    @torch.library.custom_op(
        f"{name}_forward",
        mutates_args=(),
        schema="(Tensor x, Tensor w, Tensor? bias, str mesh, int batch) -> " + (f"({made})" if held else made),
        tags=UNRECORDED,
    )
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, mesh: str, batch: int) -> Any:
        here = layer.here(mesh, batch)
        given = {"x": (x, stored["x"]), "w": (w, stored["w"]), "bias": (bias, stored.get("bias"))}
        read = check(here, given, "conv")
        with torch.no_grad():
            results = run_forward(x, w, bias, here)
        read()
        return results if held else results[0]

    @forward.register_fake
    def _(x: Tensor, w: Tensor, bias: Tensor | None, mesh: str, batch: int) -> Any:
        here = layer.here(mesh, batch)
        check(here, {"x": (x, stored["x"]), "w": (w, stored["w"]), "bias": (bias, stored.get("bias"))})
        results = like_forward(x, here)
        return results if held else results[0]

    @torch.library.custom_op(
        f"{name}_backward",
        mutates_args=(),
        schema=f"(Tensor dy, {''.join(f'Tensor {v}, ' for v in saved)}str mesh, int batch, "
        "bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
        tags=UNRECORDED,
    )
    def backward(dy: Tensor, *rest: Any) -> Any:
        *values, mesh, batch, need_dx, need_dw, need_db = rest
        here = layer.here(mesh, batch)
        check(here, {"dy": (dy, stored["y"])})
        with torch.no_grad():
            return run_backward(dy, *values, here, need_dx, need_dw, need_db)

    @backward.register_fake
    def _(dy: Tensor, *rest: Any) -> Any:
        *_, mesh, batch, need_dx, need_dw, need_db = rest
        here = layer.here(mesh, batch)
        check(here, {"dy": (dy, stored["y"])})
        needed = (("x", need_dx), ("w", need_dw), ("bias", need_db))
        return tuple(here.empty(stored[n], dy) if need and n in stored else dy.new_empty(0) for n, need in needed)

    # First gradients, for torch.compile and for who calls the op itself. conv's are differentiable in turn:
    # Convolution.
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, ctx.mesh, ctx.batch = inputs
        values = {"x": x, "w": w}
        if held:
            values |= dict(zip(held, output[1:], strict=True))
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*(values[v] for v in saved))

    def differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        dy = dy.contiguous(memory_format=layer.memory_format)
        found = backward(dy, *ctx.saved_tensors, ctx.mesh, ctx.batch, *needed)
        return *(gradient if need else None for gradient, need in zip(found, needed, strict=True)), None, None

    forward.register_autograd(differentiate, setup_context=save)
    if hasattr(torch.library, "register_autocast"):
        torch.library.register_autocast(f"{name}_forward", layer.device, layer.dtype)
    scatter, gather = define_moves(layer)
    inside = define_inside(layer)
    return Ops(*map(overload, (forward, backward, scatter, gather, inside)), saved=saved, held=held)


def overload(op: Any) -> Any:
    """The overload of an op that torch.ops has, which torch.compile can take from any function's globals."""
    return op._opoverload


def define_moves(layer: Layer) -> tuple[Any, Any]:
    """The ops scatter and gather, between a whole tensor and this rank's block."""

    @torch.library.custom_op(
        f"convgen::{layer.name}_scatter",
        mutates_args=(),
        schema="(Tensor value, str name, str mesh, int batch) -> Tensor",
        tags=UNRECORDED,
    )
    def scatter(value: Tensor, name: str, mesh: str, batch: int) -> Tensor:
        layout, here = layer.stored[name], layer.here(mesh, batch)
        part = within(value.detach(), tuple((0, n) for n in value.shape), here.frame(layout))
        part = part.to(layer.device, layer.dtype).contiguous(memory_format=layer.format(layout.tensor))
        return part.clone() if part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() else part

    @scatter.register_fake
    def _(value: Tensor, name: str, mesh: str, batch: int) -> Tensor:
        return layer.here(mesh, batch).empty(layer.stored[name], value).to(layer.device)

    @torch.library.custom_op(
        f"convgen::{layer.name}_gather",
        mutates_args=(),
        schema="(Tensor value, str name, str mesh, int batch) -> Tensor",
        tags=UNRECORDED,
    )
    def gather(value: Tensor, name: str, mesh: str, batch: int) -> Tensor:
        return gather_blocks(value, name, layer.here(mesh, batch))

    @gather.register_fake
    def _(value: Tensor, name: str, mesh: str, batch: int) -> Tensor:
        layout = layer.stored[name]
        shape, memory = layer.whole_shape(layout, batch), layer.format(layout.tensor)
        return torch.empty(shape, dtype=layer.dtype, device=value.device, memory_format=memory)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        value, *ctx.where = inputs
        ctx.like = value.device, value.dtype

    def gather_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gather(gradient, *ctx.where).to(*ctx.like), None, None, None

    def scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return scatter(gradient, *ctx.where), None, None, None

    scatter.register_autograd(gather_gradient, setup_context=remember)
    gather.register_autograd(scatter_gradient, setup_context=remember)
    return scatter, gather


def gather_blocks(value: Tensor, name: str, here: Here) -> Tensor:
    """The whole tensor, gathered from the ranks' blocks."""
    layer, layout = here.layer, here.layer.stored[name]
    memory, grid = layer.format(layout.tensor), layer.grid
    value = value.detach().contiguous(memory_format=memory)
    read = check(here, {name: (value, layout)}, f"gather of {name}")
    axes = tuple(a for a in grid if any(a in dim for dim in layout.axes) and grid[a] > 1)
    if not axes:
        read()
        return value.clone()
    pieces = tuple(frame_at(layer, layout, p, here.batch) for p in here.members(axes))
    splits = [layer.size(p, layout.tensor) for p in pieces]
    with named(name, "gather", axes, here):
        got = here.place.transport.all_gather(flat(value, layer), splits, here.group(axes))
    whole = layer.whole_shape(layout, here.batch)
    out = torch.empty(whole, dtype=layer.dtype, device=value.device, memory_format=memory)
    copy_parts(got, out, tuple((0, n) for n in whole), pieces, layout.tensor, layer, unpack=True)
    read()
    return out


def define_inside(layer: Layer) -> Any:
    """The op that takes the plain block out of a Block in a graph of torch.compile, whose kernels see no Blocks."""

    @torch.library.custom_op(f"convgen::{layer.name}_inside", mutates_args=(), schema="(Tensor block) -> Tensor")
    def inside(block: Tensor) -> Tensor:
        return block.clone()

    def around(ctx: Any, gradient: Tensor) -> Any:
        return Block(gradient, *ctx.place)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.place = inputs[0].held, inputs[0].of

    inside.register_fake(torch.empty_like)
    inside.register_autograd(around, setup_context=remember)
    return inside
