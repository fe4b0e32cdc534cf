"""Collectives in latency (alpha, s), transfer (beta, s/byte) and addition (gamma, s/byte): the ring forms.

    all_gather       (p-1) alpha + (p-1)/p n beta
    reduce_scatter   (p-1) alpha + (p-1)/p n (beta + gamma)
    all_reduce       2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma
    all_to_all       (p-1) alpha + n beta, n what goes to others
    exchange         peers alpha + n beta

n is the whole vector in bytes for the first three. Works on numbers and on sympy expressions alike. With
uneven blocks the slowest rank decides: `seconds` takes its bytes in place of (p-1)/p n.

Source: [TRG] sections 4 (ring all-gather, pairwise reduce-scatter) and Table 1; [CF] uses rings throughout.
"""

from __future__ import annotations

from typing import Any

from convgen.algebra.redistribute import Kind


def ring_all_gather(p: Any, n: Any, alpha: Any, beta: Any) -> Any:
    """Seconds for every rank to have all of n bytes, of which each has a p-th."""
    return (p - 1) * alpha + (p - 1) * n / p * beta


def ring_reduce_scatter(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Seconds for every rank to have a p-th of the sum of p vectors of n bytes."""
    return (p - 1) * alpha + (p - 1) * n / p * (beta + gamma)


def ring_all_reduce(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Seconds for every rank to have the sum of p vectors of n bytes: the two above, one after the other."""
    return ring_reduce_scatter(p, n, alpha, beta, gamma) + ring_all_gather(p, n, alpha, beta)


def direct_exchange(peers: Any, n: Any, alpha: Any, beta: Any) -> Any:
    """Seconds for n bytes to others, a message each."""
    return peers * alpha + n * beta


def seconds(kind: Kind, peers: Any, n: Any, alpha: Any, beta: Any, gamma: Any) -> Any:
    """Seconds of a conversion of which the slowest rank sends or receives n bytes; slices take none.

    Args:
        peers: ranks of the group besides this one; for an exchange, those that it has messages with.
    """
    match kind:
        case "slice":
            return 0 * n
        case "all_gather" | "all_to_all" | "exchange":
            return peers * alpha + n * beta
        case "reduce_scatter":
            return peers * alpha + n * (beta + gamma)
        case "all_reduce":
            return 2 * peers * alpha + n * beta + n / 2 * gamma
