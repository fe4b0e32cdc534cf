"""How ranks lie on nodes, by the names of their hosts; what a machine file can't say is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from convgen.errors import InputError, Note


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of equally many ranks, numbered node by node.

    Attributes:
        count: how many nodes.
        ranks: of one node.
    """

    count: int
    ranks: int

    @property
    def size(self) -> int:
        """Ranks of all nodes."""
        return self.count * self.ranks

    @property
    def text(self) -> str:
        return f"{self.size} ranks on {self.count} node{'s' if self.count > 1 else ''}"


def nodes_of(hosts: Sequence[str]) -> Nodes:
    """The nodes of ranks on these hosts.

    Args:
        hosts: a name a rank, in rank order.
    Raises:
        InputError: a node's ranks don't follow one another, or nodes have different numbers of ranks.
    """
    runs = [(host, len(list(group))) for host, group in groupby(hosts)]
    counts = Counter(hosts)
    if len(runs) > len(counts):
        apart = next(host for host, length in runs if length < counts[host])
        ranks = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == apart)
        raise InputError(
            f"ranks {ranks} share a node, and do not follow one another",
            notes=(Note("nodes", ", ".join(f"{length} on {host}" for host, length in runs)),),
            hint="torchrun, which numbers ranks node by node; a machine file counts on it",
        )
    if len(set(counts.values())) > 1:
        raise InputError(
            f"nodes have {', '.join(str(length) for _, length in runs)} ranks",
            notes=(Note("nodes", ", ".join(f"{length} on {host}" for host, length in runs)),),
            hint=f"as many on each, e.g. --nproc-per-node={min(counts.values())}",
        )
    return Nodes(count=len(counts), ranks=runs[0][1])
