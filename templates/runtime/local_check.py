# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""CONVGEN_CHECK_LOCAL=1: the first call of each local problem is compared with float64."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import Layer

# Unit roundoffs: of a layer's types, and of those in which sums are made, float64 or float32.
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
compared: set[tuple[Any, ...]] = set()


def check_local(
    layer: Layer, phase: str, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, below: Sequence[int], found: Tensor
) -> None:
    """Compare what a kernel found with products tap by tap in float64, if CONVGEN_CHECK_LOCAL=1 asks for it.

    A process compares each phase, shapes and padding once: that costs the first step seconds and memory, later ones
    nothing.

    Args:
        x, w, y: the operands. The result (y, dx or dw) stands in its own place among them, and only its shape is read.
        below: the number of zero rows below x, for each spatial dimension.
    Raises:
        RuntimeError: the difference is more than rounding explains.
    """
    if os.environ.get("CONVGEN_CHECK_LOCAL") != "1":
        return
    key = (layer.identity, phase, tuple(x.shape), tuple(w.shape), tuple(y.shape), tuple(below))
    if key in compared or not (x.numel() and w.numel() and y.numel()):
        return
    error, limit = error_and_limit(layer, phase, x, w, y, bias, below, found)
    if not error <= limit:
        shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}, y {tuple(y.shape)}"
        raise RuntimeError(
            f"{layer.name}: CONVGEN_CHECK_LOCAL: the local {phase} is off by {error:.3g}, rounding explains "
            f"{limit:.3g}: {shapes}, padding {tuple(below)}, stride {layer.stride}, dilation {layer.dilation}, "
            f"{layer.dtype}, {layer.memory_format}, torch {torch.__version__} on {found.device.type}; the local kernel "
            "is at fault, not the network: compile with --untuned or name another (options: kernels), or take another "
            "torch, and report this line"
        )
    compared.add(key)


def error_and_limit(
    layer: Layer, phase: str, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, below: Sequence[int], found: Tensor
) -> tuple[float, float]:
    """The largest error of what a kernel found, infinite for NaN, and the largest that rounding explains.

    A sum in the wide type (unit roundoff v), whose errors add up like a random walk [Higham & Mary 2019]; roundings to
    the layer's type (u): of the result, of the bias, and of the pieces that some kernels add in it.
    """
    wanted, squares = by_taps(layer, phase, x, w, y, below), by_taps(layer, phase, x, w, y, below, 2)
    if bias is not None:
        addend = bias.detach().double().view(-1, *[1] * len(layer.kernel))
        wanted, squares = wanted + addend, squares + addend.square()
    terms, pieces = {
        "forward": (w[0].numel(), 1),
        "backward_data": (w.numel() // w.shape[1], math.prod(layer.kernel)),
        "backward_filter": (y.numel() // y.shape[1], y.shape[0]),
    }[phase]
    u, v = ROUNDOFF[layer.dtype], ROUNDOFF[torch.float64 if layer.dtype == torch.float64 else torch.float32]
    most, root = float(wanted.abs().max()), math.sqrt(float(squares.max()))
    limit = (2 + math.sqrt(pieces)) * u * max(most, root) + 4 * math.sqrt(terms) * v * root
    limit += 6 * 2.0**-11 * root if layer.spec.get("dtype") == "tfloat32" else 0.0  # operands rounded to TF32
    return float(torch.nan_to_num((found.detach().double() - wanted).abs().max(), nan=math.inf)), limit


def by_taps(layer: Layer, phase: str, x: Tensor, w: Tensor, y: Tensor, below: Sequence[int], power: int = 1) -> Tensor:
    """y, dx or dw in float64, of powers of the operands: for each tap a matrix product, and no convolution."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double() ** power

    groups = max(1, x.shape[1] // w.shape[1])
    sides = list(zip(y.shape[2:], layer.kernel, layer.stride, layer.dilation, strict=True))
    spans = [(h - 1) * s + d * (k - 1) + 1 for h, k, s, d in sides]
    # The rows that windows span, and those of them that x has.
    rows = [slice(max(p, 0), max(min(p + h, span), p, 0)) for p, h, span in zip(below, x.shape[2:], spans, strict=True)]
    frame = torch.zeros((*x.shape[:2], *spans), dtype=torch.float64, device=x.device)
    there = (..., *rows)
    here = (..., *[slice(r.start - p, r.stop - p) for r, p in zip(rows, below, strict=True)])
    made = {"forward": y, "backward_data": x, "backward_filter": w}[phase]
    result = torch.zeros(made.shape, dtype=torch.float64, device=x.device)
    if phase != "backward_data":
        frame[there] = wide(x)[here]
    filters: Any = None if phase == "backward_filter" else wide(w).unflatten(0, (groups, -1))
    pixels: Any = None if phase == "forward" else wide(y).flatten(2).unflatten(1, (groups, -1))
    for tap in itertools.product(*map(range, layer.kernel)):
        read = [slice(i * d, i * d + (h - 1) * s + 1, s) for i, (h, _, s, d) in zip(tap, sides, strict=True)]
        window = frame[(..., *read)]
        columns = window.flatten(2).unflatten(1, (groups, -1))
        if phase == "forward":
            result += (filters[(..., *tap)] @ columns).view(y.shape)
        elif phase == "backward_data":
            window += (filters[(..., *tap)].mT @ pixels).view(window.shape)
        else:
            result[(..., *tap)] = (pixels @ columns.mT).sum(0).flatten(0, 1)
    if phase == "backward_data":
        result[here] = frame[there]
    return result
