"""Ranks as core groups of nodes: which node each is of, and who sums for it ([SW] 5.1, Algorithm 1).

An axis M numbers nodes, and the other axes number core groups of a node; without it four ranks in a row are a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from convgen.errors import InputError

NODES = "M"
CORE_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Nodes:
    """`ranks` core groups, `each` of them on a node, in the order of the grid."""

    ranks: int
    each: int

    def of(self, position: int) -> int:
        return position // self.each

    def split(self, members: Sequence[int]) -> list[tuple[int, ...]]:
        """Positions of a group, node by node, in the group's order; the first of each sums for it.

        Raises:
            InputError: nodes that are no power of two.
        """
        found: dict[int, list[int]] = {}
        for p in members:
            found.setdefault(self.of(p), []).append(p)
        if len(found) & (len(found) - 1):
            below = 1 << (len(found).bit_length() - 1)
            fact = f"{len(found)} nodes reduce together: recursive halving needs a power of two"
            raise InputError(fact, hint=f"{below} or {2 * below} nodes")
        return [tuple(one) for one in found.values()]


def nodes_of(grid: Mapping[str, int]) -> Nodes:
    """The nodes of a grid.

    Raises:
        InputError: more than four core groups on a node, ranks that fill no whole nodes, or no power of two of these.
    """
    ranks = prod(int(n) for n in grid.values())
    count = int(grid.get(NODES, -(-ranks // CORE_GROUPS)))
    if next(iter(grid), NODES) != NODES and NODES in grid and count > 1:
        order = ",".join(f"{a}={n}" for a, n in grid.items() if a != NODES)
        raise InputError(f"axis {NODES} is of nodes, which come before their core groups", hint=f"M={count},{order}")
    each = ranks // count
    if ranks % count or each > CORE_GROUPS:
        fact = f"{ranks} core groups are on {count} nodes, which have {CORE_GROUPS} each"
        if NODES not in grid and ranks % CORE_GROUPS:
            fact = f"{ranks} core groups fill no whole nodes, which have {CORE_GROUPS} each"
        raise InputError(fact, hint=f"axes M (nodes) and N (up to {CORE_GROUPS} core groups), as in M=2,N=4")
    nodes = Nodes(ranks, each)
    nodes.split(range(ranks))
    return nodes
