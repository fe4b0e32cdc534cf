"""What a rank sends in a collective, by direct exchange (docs/design.md, Two views of a step), from the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HASH_BYTES = 32  # of SHA-256


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent in one collective; `lane`: where it was started, "" if it was waited for at once."""

    collective: str
    group: tuple[int, ...]
    bytes: int
    lane: str = ""


def is_identity(tensor: Tensor) -> bool:
    """Whether what travels is a hash: a module asks with it whether all ranks have the same; VOLUME leaves it out."""
    return tensor.dtype == torch.uint8 and tensor.numel() == HASH_BYTES  # masks are bytes, too


def count(kind: str, tensor: Tensor, splits: Sequence[Any], ranks: tuple[int, ...], rank: int, lane: str = "") -> Sent:
    """The record of a call of a transport's collective `kind` by `rank`, one of the group's `ranks`."""
    me = ranks.index(rank)
    mine: int = splits[0][me] if kind in ("all_to_all", "exchange") else splits[me]
    gathered = (len(ranks) - 1) * mine
    rest = tensor.numel() - mine
    elements = {"all_gather": gathered, "all_reduce": rest + gathered}.get(kind, rest)
    return Sent(kind, ranks, elements * tensor.element_size(), lane)
