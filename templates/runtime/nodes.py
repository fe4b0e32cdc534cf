# pyright: reportUnknownMemberType=false
# (what torch leaves untyped)
"""Sums over core groups and nodes as [SW] 5.1 has them, on a transport that moves bytes.

All other collectives are the transport's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from convgen.sw26010.network.core_group import CoreGroup
from convgen.sw26010.network.nodes import Nodes
from convgen.sw26010.network.sums import sum_over_nodes

from .lanes import Landed, begin
from .transport import Group

SUMMED = (torch.float32, torch.float64)


class NodesTransport:
    """A rank's end of another transport, but for sums of floats.

    Args:
        ranks: the mesh's, in grid order.
    """

    def __init__(self, end: Any, ranks: Sequence[int], nodes: Nodes, group: CoreGroup) -> None:
        self._end, self._ranks, self._nodes, self._group = end, ranks, nodes, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def start(self, kind: str, tensor: Tensor, splits: Any, group: Group, lane: str) -> Any:
        """Start a collective. Sums are over when this returns: [SW] packs, and waits."""
        if kind == "all_reduce" and tensor.dtype in SUMMED:
            return Landed(self.all_reduce(tensor, splits, group, lane))
        return begin(self._end, kind, tensor, splits, group, lane)

    def all_reduce(self, tensor: Tensor, splits: Sequence[int], group: Group, lane: str = "") -> Tensor:
        if tensor.dtype not in SUMMED or not tensor.numel():
            return self._end.all_reduce(tensor, splits, group)
        split = self._nodes.split([self._ranks.index(rank) for rank in group.ranks])
        members = [[self._ranks[p] for p in node] for node in split]
        as_one = getattr(self._end, "as_one", None)
        with nullcontext() if as_one is None else as_one("all_reduce", tensor, splits, group, lane):
            own = tensor.detach().contiguous().numpy()
            return torch.from_numpy(sum_over_nodes(own, members, self._end.rank, self._group, self._messages))

    def _messages(
        self, ranks: tuple[int, ...], sends: Mapping[int, Any], receives: Mapping[int, int], like: Any
    ) -> dict[int, Any]:
        """An exchange among some ranks: arrays go to each, and so many elements come from each."""
        to, come = [sends[r].size if r in sends else 0 for r in ranks], [receives.get(r, 0) for r in ranks]
        parts = [torch.from_numpy(sends[r]) for r in ranks if r in sends]
        packed = torch.cat(parts) if parts else torch.from_numpy(like[:0])
        got = self._end.exchange(packed, (to, come), Group(ranks, "native"))
        return {r: part.numpy() for r, part in zip(ranks, got.split(come), strict=True) if part.numel()}
