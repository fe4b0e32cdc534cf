# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""CONVGEN_COMPARE=k: each k-th call refuses, by name, copies that have become different and rows that make a NaN."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .clipping import local
from .here import frame_at
from .travel import RowHere

DIGEST = 8  # bytes of a tensor's hash


def compares(call: int) -> bool:
    """Whether this call, counted from 1, is one that CONVGEN_COMPARE asks to compare."""
    every = os.environ.get("CONVGEN_COMPARE") or "0"
    if not (every.isascii() and every.isdecimal() and len(every) < 10):
        raise ValueError(
            f"CONVGEN_COMPARE={every[:20]} is no number of calls: CONVGEN_COMPARE=100 compares at each 100th"
        )
    return int(every) > 0 and call % int(every) == 0


def met(here: RowHere, mine: bytes) -> list[bytes]:
    """The messages of all ranks of the mesh, in the mesh's order."""
    meet: Any = getattr(here.place.transport, "meet", None)
    if meet is None:
        raise RuntimeError(f"{here.layer.name}: CONVGEN_COMPARE needs a transport that has `meet`")
    return meet(mine, here.place.ranks)()


def bits(tensor: Tensor) -> bytes:
    """A hash of all of a tensor's bits."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=DIGEST).digest()


def compare_copies(here: RowHere, tensors: Mapping[str, tuple[Any, Any]], of: str) -> None:
    """Refuse tensors if ranks that hold the same block of one have different values there; every rank calls it.

    Args:
        tensors: by name the tensor and its layout, alike on all ranks.
        of: what they are, as `parameters and buffers`.
    """
    ranks = here.place.ranks
    if len(ranks) == 1:
        return
    said = met(here, b"".join(bits(local(t)) for t, _ in tensors.values()))
    for i, (name, (_, layout)) in enumerate(tensors.items()):
        blocks: dict[Any, dict[bytes, list[int]]] = {}
        for position, (rank, one) in enumerate(zip(ranks, said, strict=True)):
            box = frame_at(here.layer, layout, position, here.batch)
            blocks.setdefault(box, {}).setdefault(one[i * DIGEST :][:DIGEST], []).append(rank)
        for box, found in blocks.items():
            if len(found) > 1:
                those = ", ".join(str(members) for members in found.values())
                raise RuntimeError(
                    f"{here.layer.name}: copies of {name} have parted, first of the {of}: of its block {list(box)} "
                    f"ranks {those} hold other values"
                )


def first_nan(label: str, made: Sequence[Any], operands: Sequence[Any]) -> str:
    """The words for a row that has made a NaN; "" where it has made none."""

    def has_one(tensors: Sequence[Any]) -> bool:
        return any(bool(t.isnan().any()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point())

    if not has_one(made):
        return ""
    return f"row %{label}" + (", whose operands have one" if has_one(operands) else ", whose operands have none")


def refuse_nans(here: RowHere, found: str) -> None:
    """Refuse a call in which a row of some rank made a NaN; every rank calls it."""
    said = [one.decode().strip() for one in met(here, found.encode()[:200].ljust(200))]
    if any(said):
        where = "; ".join(f"rank {r}: {text}" for r, text in zip(here.place.ranks, said, strict=True) if text)
        raise RuntimeError(f"{here.layer.name}: the first NaN of this call: {where}")
