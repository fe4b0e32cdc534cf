# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""The norm of the gradients of any mix of parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .blocks import Block
from .envelope import enter
from .mesh import Place, places, transport_of
from .transport import Group, Transport

Stage = tuple[Transport, tuple[int, ...]]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached: the same memory, unknown to autograd."""
    inner = getattr(tensor, "_block", getattr(tensor, "_local_tensor", tensor))
    return inner.detach()


def within_reach(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, itself where autograd doesn't track it, for callers that hand it to nobody."""
    inner = getattr(tensor, "_block", getattr(tensor, "_local_tensor", tensor))
    return inner.detach() if inner is tensor or inner.requires_grad else inner


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for any mix of DTensors, Blocks and plain tensors, on any meshes: the norm of all
    whole gradients as one vector, which every rank gets; every rank calls it.

    A plain gradient counts once: it is taken to be the same on all ranks. Each set of ranks among which some gradients
    are split gathers one number a rank.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    meshes = [getattr(p, "device_mesh", None) for p in parameters if p.grad is not None]
    facts: dict[str, object] = {}
    fault: Exception | None = None
    try:
        facts = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_ wants a norm_type above 0, or inf, got {norm_type}")
    except Exception as error:  # whatever it is that this rank alone has, perhaps
        fault = error
    reads = entered(parameters, facts, fault)
    powers: dict[Any, list[Tensor]] = {}
    ends: dict[int, Transport] = {}
    for gradient, mesh in zip(gradients, meshes, strict=True):
        found, part = split_among(gradient, mesh)
        ends |= {id(end): end for end, _ in found}
        stages = tuple((id(end), ranks) for end, ranks in found)
        norm = part.new_zeros((), dtype=torch.float64)
        wide = torch.complex128 if part.is_complex() else torch.float64
        norm = torch.linalg.vector_norm(part.to(wide), norm_type) if part.numel() else norm
        powers.setdefault(stages, []).append(norm if norm_type == math.inf else norm**norm_type)
    combine = torch.max if norm_type == math.inf else torch.sum
    totals: list[Tensor] = []
    for stages, terms in powers.items():
        mine = combine(torch.stack(terms))
        for end, ranks in stages:
            if len(ranks) > 1:
                mine = combine(ends[end].all_gather(mine.view(1), [1] * len(ranks), Group(ranks, "ordered")))
        totals.append(mine)
    total = combine(torch.stack(totals)) if totals else torch.tensor(0.0, dtype=torch.float64)
    total = total if norm_type == math.inf else total ** (1 / norm_type)
    for read in reads:
        read()
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, so they can't be clipped")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale.to(gradient.dtype))
    return total


class Caller(NamedTuple):
    """The caller that an envelope names where a call belongs to no layer or network."""

    name: str
    identity: bytes
    device: str
    file: str
    grid: dict[str, int]


class Anywhere(NamedTuple):
    """A call on the ranks of some meshes."""

    layer: Any
    place: Place


def entered(
    parameters: Sequence[Any], facts: dict[str, object], fault: Exception | None = None
) -> list[Callable[[], None]]:
    """Begin clipping on each set of ranks that a parameter is on; the functions that read the other ranks'
    answers.

    Args:
        fault: what is wrong with this rank's arguments, of which each set is told.
    """
    ends: dict[tuple[int, ...], Transport] = {}
    for p in parameters:
        if isinstance(p, Block):
            held = p.held or min(p.of)
            ends.setdefault(tuple(sorted(held.ranks)), places[held.key].transport)
        elif isinstance(p, DTensor):
            ends.setdefault(tuple(sorted(p.device_mesh.mesh.flatten().tolist())), transport_of(p.device_mesh))
    without = [i for i, p in enumerate(parameters) if p.grad is None]
    facts = facts | {"parameters": len(parameters), "parameters without a gradient, by number": without or "none"}
    device = next((p.device.type for p in parameters), "cpu")
    code = hashlib.sha256(b"clip_grad_norm_").digest()
    caller = Caller("clip_grad_norm_", code, device, __file__, {})
    reads: list[Callable[[], None]] = []
    for ranks, end in sorted(ends.items(), key=lambda pair: pair[0]):
        if hasattr(end, "meet"):
            place = Place("", ranks, ranks.index(end.rank), end, None, {})
            try:
                reads.append(enter(Anywhere(caller, place), "clip_grad_norm_", facts, fault=fault))  # type: ignore[arg-type]
            except Exception as error:  # the other sets are told, too
                fault = fault or error
    if fault is not None:
        raise fault
    return reads


def split_among(gradient: Any, mesh: Any = None) -> tuple[tuple[Stage, ...], Tensor]:
    """The sets of ranks that hold each part of a gradient once, with the transports they talk through, and this rank's
    part.

    Args:
        mesh: the parameter's mesh, as torch may give the gradient an equal one that is gone.
    """
    if isinstance(gradient, Block):
        held = gradient.held or min(gradient.of)
        return ((places[held.key].transport, held.blocks),), gradient._block
    if not isinstance(gradient, DTensor):
        return (), gradient
    mesh = gradient.device_mesh if mesh is None else mesh
    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    whole = gradient.redistribute(gradient.device_mesh, placements)
    at = mesh.get_coordinate() or []
    split = tuple(i if p.is_replicate() else slice(None) for i, p in zip(at, whole.placements, strict=False))
    stage = transport_of(mesh), tuple(mesh.mesh[split].flatten().tolist())
    if isinstance(whole._local_tensor, Block):  # FSDP2 has cut a block over ranks that hold copies
        stages, part = split_among(whole._local_tensor)
        return (stage, *stages), part
    return (stage,), whole._local_tensor
