"""Collectives in latency (alpha, s), transfer (beta, s/byte) and addition (gamma, s/byte), on links of one kind.

| collective | algorithm | seconds |
|---|---|---|
| all_gather | ring | (p-1) alpha + (p-1)/p n beta |
| | bruck, recursive-doubling | lg p alpha + (p-1)/p n beta |
| reduce_scatter | ring, hierarchical-ring | (p-1) alpha + (p-1)/p n (beta + gamma) |
| | recursive-halving, hierarchical-halving | lg p alpha + (p-1)/p n (beta + gamma) |
| | recursive-doubling | lg p alpha + (lg p - (p-1)/p) n (beta + gamma) |
| all_reduce | ring, hierarchical-ring | 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma |
| | rabenseifner, hierarchical-halving | 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma |
| | recursive-doubling | lg p (alpha + n beta + n gamma) |
| all_to_all | direct | (p-1) alpha + m beta, m what goes to others |
| | bruck | lg p alpha + n/2 lg p beta |
| exchange | direct | peers alpha + m beta |

n is the whole vector in bytes (what a rank holds, for all_to_all); lg p is rounded up. Recursive halving and doubling
and Rabenseifner's need a power of two. Hierarchical: by levels of the machine, as [SW] 5.1; on one level the plain
one. All forms work on numbers and on sympy expressions alike. On links of several kinds, rounds.py says who sends whom
what.

Source: [TRG] sections 4 and 5 and Table 1; [CF] uses rings throughout. A ring reduce-scatter costs what [TRG]'s
pairwise one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from convgen.algebra.redistribute import Kind

Form = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Collectives:
    """The algorithm of each kind of collective: a name of ALGORITHMS, or `best`, the one of least modelled seconds."""

    all_gather: str = "ring"
    reduce_scatter: str = "ring"
    all_reduce: str = "ring"
    all_to_all: str = "direct"

    def of(self, kind: Kind) -> str:
        return getattr(self, kind, "direct")


RINGS = Collectives()
BEST = Collectives("best", "best", "best", "best")


def lg(p: Any) -> Any:
    """log2 rounded up, of a number or of an expression."""
    if isinstance(p, int):
        return (p - 1).bit_length()
    sympy = import_module("sympy")
    return sympy.ceiling(sympy.log(p, 2))


def ring_all_gather(p: Any, n: Any, alpha: Any, beta: Any) -> Any:
    """Seconds for every rank to have all of n bytes, of which each has a p-th."""
    return (p - 1) * alpha + (p - 1) * n / p * beta


def ring_reduce_scatter(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Seconds for every rank to have a p-th of the sum of p vectors of n bytes."""
    return (p - 1) * alpha + (p - 1) * n / p * (beta + gamma)


def ring_all_reduce(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Seconds for every rank to have the sum of p vectors of n bytes: the two above, one after the other."""
    return ring_reduce_scatter(p, n, alpha, beta, gamma) + ring_all_gather(p, n, alpha, beta)


def doubling_all_gather(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Bruck's or recursive doubling: as many rounds as p has doublings, each sending twice as much as the last."""
    return lg(p) * alpha + (p - 1) * n / p * beta


def halving_reduce_scatter(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Recursive halving: each round sends half of what the last one sent."""
    return lg(p) * alpha + (p - 1) * n / p * (beta + gamma)


def doubling_reduce_scatter(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Recursive doubling: each round sends all but what is final already."""
    return lg(p) * alpha + (lg(p) - (p - 1) / p) * n * (beta + gamma)


def halving_all_reduce(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Rabenseifner's: a reduce-scatter by recursive halving, then an all-gather by recursive doubling."""
    return halving_reduce_scatter(p, n, alpha, beta, gamma) + doubling_all_gather(p, n, alpha, beta)


def doubling_all_reduce(p: Any, n: Any, alpha: Any, beta: Any, gamma: Any = 0) -> Any:
    """Recursive doubling: the whole vector in every round."""
    return lg(p) * (alpha + n * (beta + gamma))


def direct_exchange(peers: Any, n: Any, alpha: Any, beta: Any) -> Any:
    """Seconds for n bytes to others, a message each."""
    return peers * alpha + n * beta


def _plain(form: Callable[[Any, Any, Any, Any], Any]) -> Form:
    return lambda p, n, alpha, beta, gamma: form(p, n, alpha, beta)


ALGORITHMS: dict[str, dict[str, Form]] = {
    "all_gather": {
        "ring": _plain(ring_all_gather),
        "bruck": doubling_all_gather,
        "recursive-doubling": doubling_all_gather,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "recursive-halving": halving_reduce_scatter,
        "recursive-doubling": doubling_reduce_scatter,
        "hierarchical-ring": ring_reduce_scatter,
        "hierarchical-halving": halving_reduce_scatter,
    },
    "all_reduce": {
        "ring": ring_all_reduce,
        "rabenseifner": halving_all_reduce,
        "recursive-doubling": doubling_all_reduce,
        "hierarchical-ring": ring_all_reduce,
        "hierarchical-halving": halving_all_reduce,
    },
    "all_to_all": {
        "direct": lambda p, n, alpha, beta, gamma: direct_exchange(p - 1, (p - 1) * n / p, alpha, beta),
        "bruck": lambda p, n, alpha, beta, gamma: lg(p) * alpha + lg(p) * n / 2 * beta,
    },
}
POWERS_OF_TWO = ("recursive-halving", "recursive-doubling", "rabenseifner", "hierarchical-halving")


def usable(kind: Kind, p: int) -> tuple[str, ...]:
    """The algorithms of a kind that work on p ranks."""
    return tuple(a for a in ALGORITHMS[kind] if a not in POWERS_OF_TWO or not p & (p - 1))


def seconds(kind: Kind, peers: Any, n: Any, alpha: Any, beta: Any, gamma: Any, algorithm: str = "ring") -> Any:
    """Seconds of a conversion whose slowest rank sends or receives n bytes; slices take none.

    With uneven blocks the slowest rank decides: its bytes stand for (p-1)/p n of the forms above.

    Args:
        peers: ranks of the group besides this one; for an exchange, those that it has messages with.
        n: bytes, as direct exchange counts them (docs/design.md, Two views of a step).
        algorithm: one of ALGORITHMS; of an exchange there is one only.
    """
    match kind:
        case "slice":
            return 0 * n
        case "exchange":
            return peers * alpha + n * beta
        case "all_gather" | "all_to_all" if algorithm in ("ring", "direct"):
            return peers * alpha + n * beta
        case "reduce_scatter" if algorithm == "ring":
            return peers * alpha + n * (beta + gamma)
        case "all_reduce" if algorithm == "ring":
            return 2 * peers * alpha + n * beta + n / 2 * gamma
        case _:
            return ALGORITHMS[kind][algorithm](peers + 1, whole(kind, peers + 1, n), alpha, beta, gamma)


def whole(kind: Kind, p: Any, n: Any) -> Any:
    """The whole vector in bytes where the slowest of p ranks sends n."""
    return n * p / (p - 1) / (2 if kind == "all_reduce" else 1)
