"""Collectives of a step without its computing, and computing without its collectives.

A transport that moves nothing gives tensors of the right size, so that a step on it takes what the rank computes. It
records every call that would have moved something, and such calls can be run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convgen.verify.counting import count, is_identity

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")


@dataclass(frozen=True)
class Call:
    """A collective of a step.

    Attributes:
        step: its name in the program; `kind`: the transport's method that it calls.
        sent_bytes: bytes that this rank sends, counted by direct exchange.
    """

    step: str
    phase: str
    kind: str
    tensor: Tensor
    splits: Any
    group: Any
    sent_bytes: int


class Nothing:
    """A transport that moves nothing.

    Attributes:
        calls: the recorded calls, in order.
        marked: gives the step and the phase that the rank is at.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[Call] = []
        self.marked: Callable[[], tuple[str, str]] = lambda: ("", "")

    def __getattr__(self, kind: str) -> Any:
        if kind not in KINDS:
            raise AttributeError(kind)

        def moved(tensor: Tensor, splits: Any, group: Any) -> Tensor:
            if not is_identity(tensor):
                step, phase = self.marked()
                sent = count(kind, tensor, splits, group.ranks, self.rank).bytes
                self.calls.append(Call(step, phase, kind, torch.zeros_like(tensor), splits, group, sent))
            return self._come(kind, tensor, splits, group)

        return moved

    def _come(self, kind: str, tensor: Tensor, splits: Any, group: Any) -> Tensor:
        if kind == "all_reduce":
            return tensor.clone()
        if kind == "reduce_scatter":
            me = group.ranks.index(self.rank)
            return tensor.narrow(0, sum(splits[:me]), splits[me]).clone()
        wanted = sum(splits) if kind == "all_gather" else sum(splits[1])
        if not tensor.numel():
            return tensor.new_zeros(wanted)
        return tensor.repeat(-(-wanted // tensor.numel()))[:wanted]
