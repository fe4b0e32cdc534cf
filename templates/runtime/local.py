"""Local convolutions by ATen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .local_check import check_local

if TYPE_CHECKING:
    from .layer import Layer

aten: Any = torch.ops.aten
Way = Callable[..., Tensor]  # does a phase: takes conv_...'s operands, padding, the result's shape, and groups


def local_groups(layer: Layer, channels: int) -> int:
    """The number of groups that a rank convolves: whole ones, or a part of one."""
    fine = layer.filters if layer.transposed else layer.channels
    return max(1, channels // (fine // layer.groups))


# What oneDNN gets wrong without a word. Seen in torch 2.13.0 with oneDNN 3.12.0 on a CPU with AVX-512 and its bfloat16,
# by convgen's bench/local_fuzz.py, which lists what of it another version still has:
#   a window longer than x, or nearly so      dw in bfloat16, and of 3-D in float32: wrong, not written, or written
#   (a window and a stride), with padding     elsewhere; y in bfloat16, channels last, of one channel a group: wrong
#   windows that all miss x, by a stride      y in channels last: a crash
#   a last dimension of y of one pixel, and   y in float32 and bfloat16, channels last, of one channel a group (also a
#   a stride                                  contiguous x of one channel whose stride of C is 1): wrong
# None of it is left where such a small dimension's padding is made by hand, and a single pixel has a stride of 1.
# float64 is not oneDNN's.


def small_by_hand(
    layer: Layer, x: Tensor, padding: list[int], rows: tuple[int, ...]
) -> tuple[Tensor, list[int], list[int]]:
    """An x, its padding and strides, for `rows` of y. In dimensions of the kinds listed above, x is padded by hand and
    has just the rows that are read."""
    by_hand = are_small(layer, tuple(x.shape[2:]), rows, *padding)
    if by_hand is None:
        return x, padding, layer.stride
    zeros = [p if small else 0 for p, small in zip(padding, by_hand, strict=True) for _ in range(2)]
    read = [
        slice((m - 1) * s + d * (k - 1) + 1) if small else slice(None)
        for m, k, s, d, small in zip(rows, layer.kernel, layer.stride, layer.dilation, by_hand, strict=True)
    ]
    wide = torch.nn.functional.pad(x, zeros[::-1])[(..., *read)].contiguous(memory_format=layer.memory_format)
    rest = [0 if small else p for p, small in zip(padding, by_hand, strict=True)]
    return wide, rest, [1 if m == 1 else s for m, s in zip(rows, layer.stride, strict=True)]


@cache
def are_small(layer: Layer, x_rows: tuple[int, ...], y_rows: tuple[int, ...], *padding: int) -> tuple[bool, ...] | None:
    """For each dimension, whether it is of the kinds listed above; None if none is."""
    if layer.dtype == torch.float64:
        return None
    found = tuple(
        m == 1 or (p > 0 and n < s.dilation * (s.kernel - 1) + 1 + s.stride)
        for n, m, p, s in zip(x_rows, y_rows, padding, layer.spatial, strict=True)
    )
    return found if any(found) else None


# ATen's result may have another memory format than its operands (float64 on a cpu, channels last): then it is copied.


def nothing(layer: Layer, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The result of a convolution that has nothing to add up: zeros."""
    return torch.empty(shape, dtype=layer.dtype, device=like.device, memory_format=layer.memory_format).zero_()


def conv_forward(
    layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], shape: tuple[int, ...],
    way: Way | None = None,
) -> Tensor:  # fmt: skip
    """y of this shape. `padding`: zero rows on both sides; `way`: instead of ATen's plain call."""
    if not (x.numel() and w.numel() and math.prod(shape)):
        y = nothing(layer, x, shape)
        return y if bias is None else y.add_(bias.view(-1, *[1] * len(layer.spatial)))
    wide, rest, stride = small_by_hand(layer, x, padding, shape[2:])
    groups = local_groups(layer, x.shape[1])
    if way is None:
        y = aten_forward(layer, wide, w, bias, stride, rest, groups)
    else:
        y = way(wide, w, bias, rest, shape, groups)
    check_local(layer, "forward", x, w, y, bias, padding, y)
    return y


def conv_backward_data(
    layer: Layer, dy: Tensor, w: Tensor, padding: list[int], shape: tuple[int, ...], way: Way | None = None
) -> Tensor:
    """dx of this shape."""
    if not (dy.numel() and w.numel() and math.prod(shape)):
        return nothing(layer, dy, shape)
    groups = local_groups(layer, shape[1])
    if way is None:
        dx = aten_backward(layer, dy, shape_only(layer, dy, shape), w, layer.stride, padding, groups, 0)
    else:
        dx = way(dy, w, padding, shape, groups)
    check_local(layer, "backward_data", dx, w, dy, None, padding, dx)
    return dx


def conv_backward_filter(
    layer: Layer, dy: Tensor, x: Tensor, padding: list[int], shape: tuple[int, ...], way: Way | None = None
) -> Tensor:
    """dw of this shape."""
    if not (dy.numel() and x.numel() and math.prod(shape)):
        return nothing(layer, dy, shape)
    wide, rest, stride = small_by_hand(layer, x, padding, tuple(dy.shape[2:]))
    groups = local_groups(layer, x.shape[1])
    if way is None:
        dw = aten_backward(layer, dy, wide, shape_only(layer, dy, shape), stride, rest, groups, 1)
    else:
        dw = way(dy, wide, rest, shape, groups)
    check_local(layer, "backward_filter", x, dw, dy, None, padding, dw)
    return dw


# A transposed convolution is the same sum: its y is what is x above, its x what is y.


def conv_transpose_forward(
    layer: Layer, x: Tensor, w: Tensor, padding: list[int], shape: tuple[int, ...], way: Way | None = None
) -> Tensor:
    """y of this shape."""
    return conv_backward_data(layer, x, w, padding, shape, way)


def conv_transpose_backward_data(
    layer: Layer, dy: Tensor, w: Tensor, padding: list[int], shape: tuple[int, ...], way: Way | None = None
) -> Tensor:
    """dx of this shape."""
    return conv_forward(layer, dy, w, None, padding, shape, way)


def conv_transpose_backward_filter(
    layer: Layer, dy: Tensor, x: Tensor, padding: list[int], shape: tuple[int, ...], way: Way | None = None
) -> Tensor:
    """dw of this shape."""
    return conv_backward_filter(layer, x, dy, padding, shape, way)


def computed_in(layer: Layer) -> torch.dtype:
    """The type in which ATen convolves: float32 for float16, as without AVX512-FP16 ATen's float16 is many times
    slower, and its gradients round each window before they add it."""
    return torch.float32 if layer.dtype == torch.float16 else layer.dtype


def aten_forward(
    layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], groups: int
) -> Tensor:
    kind = computed_in(layer)
    if kind != layer.dtype:
        x, w, bias = x.to(kind), w.to(kind), None if bias is None else bias.to(kind)
    none = [0] * len(layer.spatial)
    y = aten.convolution(x, w, bias, stride, padding, layer.dilation, False, none, groups)
    return y.to(layer.dtype).contiguous(memory_format=layer.memory_format)


def aten_backward(
    layer: Layer, dy: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], groups: int, which: int
) -> Tensor:
    """The gradient of operand `which`: 0 is x, 1 is w."""
    kind = computed_in(layer)
    if kind != layer.dtype:
        dy, x, w = dy.to(kind), x.to(kind), w.to(kind)
    none, wanted = [0] * len(layer.spatial), [which == 0, which == 1, False]
    gradients = aten.convolution_backward(dy, x, w, None, stride, padding, layer.dilation, False, none, groups, wanted)
    return gradients[which].to(layer.dtype).contiguous(memory_format=layer.memory_format)


def shape_only(layer: Layer, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the place of the operand whose gradient is made: ATen asks for its shape alone. Nothing touches it,
    so it takes no memory; ATen would copy an expanded scalar as a whole."""
    return torch.empty(shape, dtype=computed_in(layer), device=like.device, memory_format=layer.memory_format)
