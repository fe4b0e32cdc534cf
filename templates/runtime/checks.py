# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Checks that refuse arguments and modules that don't fit, before anything is sent."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .blocks import Block
from .envelope import enter, unsent
from .here import Here
from .layout import Layout
from .transport import shared

if TYPE_CHECKING:
    from .layer import Layer


def claim(layer: Layer) -> None:
    """Take an op name in this process: torch would let a second definition replace the first without a word."""
    content = hashlib.sha256(Path(layer.file).read_bytes()).hexdigest()
    owner, file = shared.setdefault("ops", {}).setdefault(layer.name, (content, layer.file))
    if owner != content:
        raise ImportError(f"two modules define the op convgen::{layer.name}: {file} and {layer.file}; rename one layer")


def check(here: Here, given: dict[str, tuple[Tensor | None, Layout | None]], entry: str = "") -> Callable[[], None]:
    """Refuse arguments that are not this rank's blocks, and ranks that call something else, before anything is sent.

    Args:
        given: for each argument its value and layout; no layout where the layer has no such tensor.
        entry: the name of the entry that begins here, which the other ranks are told; without it nothing is sent, as
            when torch asks for shapes.
    Returns:
        The function that reads their answers, as `enter` returns it.
    """
    layer = here.layer
    faults = [f"batch= wants the global number of samples, got {here.batch}"] if here.batch < 1 else []
    for name, (tensor, layout) in given.items():
        if faults or (tensor is None and layout is None):
            continue
        if tensor is None or layout is None:
            faults.append(f"{name} is missing: the layer has one" if tensor is None else f"the layer has no {name}")
            continue
        shape, got, memory = here.shape(layout), tuple(tensor.shape), layer.format(layout.tensor)
        dense = not tensor.numel() or tensor.is_contiguous(memory_format=memory)
        if got == shape and tensor.dtype == layer.dtype and tensor.device.type == layer.device and dense:
            continue
        what = f"{name}, this rank's block of {layout_text(layout)} {layer.extents(layout.tensor, here.batch)},"
        if got != shape:
            other = layout.tensor in ("x", "y") and len(got) == len(shape) and got[1:] == shape[1:]
            hint = "; batch= tells the global number of samples, if it is another one" if other else ""
            faults.append(f"{what} has shape {shape}, got {got}{hint}")
        elif tensor.dtype != layer.dtype:
            faults.append(f"{what} is {layer.dtype}, got {tensor.dtype}")
        elif tensor.device.type != layer.device:
            faults.append(f"{what} is on {layer.device}, got {tensor.device}")
        else:
            faults.append(f"{what} is {memory}, got strides {tensor.stride()}")
    fault = ValueError(f"{layer.name}: on rank {here.at}: {faults[0]}") if faults else None
    if entry:
        learns = ", ".join(name for name, (t, _) in given.items() if t is not None and t.requires_grad) or "nothing"
        return enter(here, entry, {"samples": here.batch, "requires gradients": learns}, fault=fault)
    if fault is not None:
        raise fault
    return unsent


def layout_text(layout: Layout) -> str:
    return f"{layout.tensor}[{', '.join('*' if not a else a[0] if len(a) == 1 else str(a) for a in layout.axes)}]"


def refuse_forward_mode(name: str) -> None:
    """Refuse forward-mode differentiation: an op can't see whether its operands have tangents, and torch would take its
    results' tangents for zero."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise RuntimeError(f"{name}: forward-mode differentiation (jvp, jacfwd) is not supported; vjp and jacrev are")


def refuse_tangent(name: str, value: Tensor) -> None:
    """Refuse a value that has a tangent; one without may be used inside of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", -1) >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        refuse_forward_mode(name)


def as_count(number: object) -> int:
    """A whole number as Python's int, whichever type it has; -1 for anything else."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return -1


def unlike_dense(value: object) -> str:
    """What a value is that is no dense tensor, in words; "" for a dense tensor, on whatever device."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if is_lazy(value):
        return "one without a shape yet"
    if value.is_nested:
        return "a nested one"
    return "" if value.layout == torch.strided else f"one of layout {value.layout}"


def unlike_block(value: object) -> str:
    """The same of what is to be a plain block: a DTensor or a Block is none."""
    return unlike_dense(value) or (f"a {type(value).__name__}" if isinstance(value, (Block, DTensor)) else "")


def refuse_vmap(name: str) -> None:
    """Refuse vmap over a network: its collectives would take a batched tensor for a plain one."""
    stack = getattr(torch, "_C")._functorch.get_interpreter_stack()  # noqa: B009  private
    if stack and any(str(one.key()).endswith("Vmap") for one in stack):
        raise TypeError(f"{name}: vmap over a network is not supported; more samples are a larger batch")
