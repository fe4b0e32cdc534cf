"""Equations 2-6 of [SW] 5.1: an all-reduce by recursive halving and doubling, on supernodes.

Adjacent numbering puts nodes q s .. q s + q - 1 into supernode s; round-robin puts node r into supernode r mod p/q.
The text has beta2 = beta1 / 4; a quarter of the bandwidth is four times the time a byte, beta2 = 4 beta1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convgen.errors import InputError

Numbering = Literal["adjacent", "round-robin"]
NUMBERINGS: tuple[Numbering, ...] = ("adjacent", "round-robin")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes and links.

    Args:
        nodes: p; supernode: q, nodes in one. Powers of two, q <= p: Eqs. 3-6 have log2 p steps.
        latency_s: alpha, of a message. inside_s_per_byte: beta1; across_s_per_byte: beta2, between supernodes.
        reduce_s_per_byte: gamma, of adding what arrives.
    Raises:
        InputError: other numbers of nodes, or a negative time.
    """

    nodes: int
    supernode: int
    latency_s: float = 1e-6
    inside_s_per_byte: float = 1 / 12e9
    across_s_per_byte: float = 4 / 12e9
    reduce_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for what, count in (("nodes", self.nodes), ("nodes in a supernode", self.supernode)):
            if count < 1 or count & (count - 1):
                below = 1 << max(count, 1).bit_length() - 1
                fact = f"{count} {what}: recursive halving and Eqs. 3-6 need a power of two"
                raise InputError(fact, hint=f"{below} or {2 * below}")
        if self.supernode > self.nodes:
            fact = f"supernodes of {self.supernode} nodes, and {self.nodes} in all"
            raise InputError(fact, hint=f"--supernode {self.nodes}")
        if min(self.latency_s, self.inside_s_per_byte, self.across_s_per_byte, self.reduce_s_per_byte) < 0:
            raise InputError("a negative time")

    @property
    def steps(self) -> int:
        """log2 p."""
        return self.nodes.bit_length() - 1

    def supernode_of(self, node: int, numbering: Numbering) -> int:
        if numbering == "adjacent":
            return node // self.supernode
        return node % (self.nodes // self.supernode)


def coefficients(network: Network, numbering: Numbering) -> tuple[int, int]:
    """Of beta1 n/p and beta2 n/p in one phase: (q - 1, p - q) adjacent, (p - p/q, p/q - 1) round-robin."""
    p, q = network.nodes, network.supernode
    return (q - 1, p - q) if numbering == "adjacent" else (p - p // q, p // q - 1)


@dataclass(frozen=True, slots=True)
class AllReduceTime:
    """Seconds of both phases."""

    reduce_scatter_s: float
    all_gather_s: float

    @property
    def all_reduce_s(self) -> float:
        """Eq. 2."""
        return self.reduce_scatter_s + self.all_gather_s


def all_reduce_time(network: Network, numbering: Numbering, total_bytes: float) -> AllReduceTime:
    """Eqs. 3 and 4 (adjacent), 5 and 6 (round-robin) for n bytes a node.

    Raises:
        InputError: negative bytes.
    """
    if total_bytes < 0:
        raise InputError(f"{total_bytes} bytes to reduce")
    p = network.nodes
    inside, across = coefficients(network, numbering)
    share = total_bytes / p
    gather = (
        network.steps * network.latency_s
        + inside * network.inside_s_per_byte * share
        + across * network.across_s_per_byte * share
    )
    return AllReduceTime(gather + (p - 1) * share * network.reduce_s_per_byte, gather)


def ring_time(network: Network, total_bytes: float) -> float:
    """A ring all-reduce without oversubscription: 2 (p-1) alpha + 2 (p-1)/p n beta1 + (p-1)/p n gamma."""
    p = network.nodes
    moved = (p - 1) / p * total_bytes
    return 2 * (p - 1) * network.latency_s + moved * (2 * network.inside_s_per_byte + network.reduce_s_per_byte)
