# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Arguments and modules that don't fit are refused before anything is sent."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .conversions import named
from .here import Here
from .layout import Layout, block
from .mesh import shared

if TYPE_CHECKING:
    from .layer import Layer


def claim(layer: Layer) -> None:
    """Take an op name in this process: torch would let a second definition replace the first without a word."""
    content = hashlib.sha256(Path(layer.file).read_bytes()).hexdigest()
    owner, file = shared.setdefault("ops", {}).setdefault(layer.name, (content, layer.file))
    if owner != content:
        raise ImportError(f"two modules define the op convgen::{layer.name}: {file} and {layer.file}; rename one layer")


def identify(here: Here) -> None:
    """All ranks of a mesh have this module: one all_gather of 32 bytes, before the first that travels there."""
    layer, axes = here.layer, tuple(here.layer.grid)
    group = here.group(axes)
    if len(group.ranks) == 1 or layer.identity in here.place.known:
        return

    def from_all(mine: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(layer.device)
        with named("identity", "all_gather", axes, here):
            got = here.place.transport.all_gather(sent, [len(mine)] * len(group.ranks), group)
        return [bytes(part.tolist()) for part in got.split(len(mine))]

    if len(set(from_all(layer.identity))) > 1:
        me = f"{layer.name} {layer.identity.hex()[:8]} in {Path(layer.file).absolute()}"
        texts = from_all(me.encode()[:512].ljust(512))
        who: dict[str, list[int]] = {}
        for rank, text in zip(group.ranks, texts, strict=True):
            who.setdefault(text.decode(errors="replace").strip(), []).append(rank)
        found = "; ".join(f"ranks {ranks}: {text}" for text, ranks in who.items())
        raise RuntimeError(
            f"{layer.name}: the ranks of this mesh don't run the same module, nothing was computed: {found}"
        )
    here.place.known.add(layer.identity)


def check(here: Here, given: dict[str, tuple[Tensor | None, Layout | None]], run: bool = True) -> None:
    """Refuse arguments that are not this rank's blocks, before anything is sent, and ranks with other modules.

    Args:
        given: for each argument its value and layout; no layout where the layer has no such tensor.
        run: something may be sent: not while torch only asks for shapes.
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
    if run and os.environ.get("CONVGEN_AGREE") == "1":
        faults += agree(here, faults)
    if faults:
        raise ValueError(f"{layer.name}: on rank {here.at}: {faults[0]}")
    if run:
        identify(here)


def agree(here: Here, faults: list[str]) -> list[str]:
    """What a rank without faults refuses because others have some: one all-reduce, so that all refuse at once."""
    identify(here)
    axes = tuple(here.layer.grid)
    group = here.group(axes)
    flags = torch.zeros(len(group.ranks), device=here.layer.device)
    flags[group.ranks.index(here.place.ranks[here.place.me])] = len(faults)
    splits = [hi - lo for lo, hi in (block(0, len(flags), len(flags), i) for i in range(len(flags)))]
    with named("agreement", "all_reduce", axes, here):
        flags = here.place.transport.all_reduce(flags, splits, group._replace(sums="native"))
    refused = [rank for rank, flag in zip(group.ranks, flags.tolist(), strict=True) if flag]
    return [f"ranks {refused} refused their arguments; their own errors say why"] if refused and not faults else []


def layout_text(layout: Layout) -> str:
    return f"{layout.tensor}[{', '.join('*' if not a else a[0] if len(a) == 1 else str(a) for a in layout.axes)}]"


def refuse_forward_mode(name: str) -> None:
    """An op can't see whether its operands have tangents; torch would take those of its results for zero."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise RuntimeError(f"{name}: forward-mode differentiation (jvp, jacfwd) is not supported; vjp and jacrev are")


def refuse_vmap(name: str) -> None:
    """Collectives of networks would take a batched tensor for a plain one."""
    stack = getattr(torch, "_C")._functorch.get_interpreter_stack()  # noqa: B009  private
    if stack and any(str(one.key()).endswith("Vmap") for one in stack):
        raise TypeError(f"{name}: vmap over a network is not supported; more samples are a larger batch")
