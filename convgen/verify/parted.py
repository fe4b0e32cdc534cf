"""Where ranks' values first differ from the reference, and a check's verdict in one line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHOWN = 4  # wrong tensors that the verdict names


@dataclass(frozen=True, slots=True)
class Parted:
    """The first element that is too far off, in the order of the whole tensor's elements.

    Attributes:
        index: its place in the whole tensor.
    """

    name: str
    rank: int
    index: tuple[int, ...]
    found: float
    right: float

    @property
    def text(self) -> str:
        where = f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name
        return f"{where} is {self.found:.6g} on rank {self.rank}, {self.right:.6g} on one device"


def first_parted(
    name: str, blocks: Iterable[tuple[int, Sequence[int], Tensor]], truth: Tensor, limit: float
) -> Parted | None:
    """The first element of a tensor whose error is above a limit, or which is NaN where the reference is a number.

    Args:
        blocks: for each rank that has one: the rank, where its block begins, and the block.
        limit: the largest error, in the tensor's units.
    """
    found: list[Parted] = []
    for rank, low, block in blocks:
        part = truth[tuple(slice(lo, lo + n) for lo, n in zip(low, block.shape, strict=True))].detach().double()
        if part.shape != block.shape:
            continue
        own = block.detach().double()
        same = (own == part) | (own.isnan() & part.isnan())
        error = torch.where(same, 0.0, torch.nan_to_num((own - part).abs(), nan=math.inf))
        wrong = (error > limit).nonzero()
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            index = tuple(lo + i for lo, i in zip(low, at, strict=True))
            found.append(Parted(name, rank, index, float(own[at]), float(part[at])))
    return min(found, key=lambda one: (one.index, one.rank), default=None)


def verdict(count: int, wrong: Sequence[str], first: Parted | None, others: Sequence[str] = ()) -> str:
    """`ok: 3 of 3 tensors right`; or `WRONG:` with the names, the first wrong element, and what else is wrong."""
    if not wrong and not others:
        return f"ok: {count} of {count} tensors right"
    said: list[str] = []
    if wrong:
        names = ", ".join(wrong[:SHOWN]) + (", ..." if len(wrong) > SHOWN else "")
        said.append(f"{len(wrong)} of {count} tensors ({names})")
    said += [f"the first: {first.text}"] if first is not None else []
    return "WRONG: " + "; ".join([*said, *others])
