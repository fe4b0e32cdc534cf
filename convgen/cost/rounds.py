"""Who sends whom how much in each round of a collective, by place in the group.

These are collectives.py's formulas, for links of one kind, as messages: links.py puts them on a machine's links, and a
test adds them up to the formulas. A group of p ranks has places with digits: `factors` (inner first, their product is
p) say how many members share a unit of each level of the machine. A plain algorithm has one digit; a hierarchical one
goes digit by digit, so that the long messages of a reduce-scatter stay inside a unit, and only what is left crosses
([SW] 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.redistribute import Kind


@dataclass(frozen=True)
class Round:
    """Every member of a group sends one message.

    Attributes:
        to: the place in the group that each place sends to.
        share: the message's part of the whole vector.
        adds: whether what arrives is added to what is there.
        times: how many such rounds there are.
    """

    to: NDArray[np.int64]
    share: float
    adds: bool
    times: int = 1


def rounds(kind: Kind, algorithm: str, p: int, factors: tuple[int, ...]) -> tuple[Round, ...]:
    """The rounds of an algorithm of collectives.ALGORITHMS (all but a direct all-to-all, which has none).

    Args:
        p: ranks of the group, 2 or more.
        factors: how many members are in one unit of each level, inner first; hierarchical algorithms follow them.
    """
    digits = factors if algorithm.startswith("hierarchical") else (p,)
    match kind, algorithm:
        case _, "bruck":
            return tuple(_bruck(kind, p))
        case "all_gather", "ring":
            return tuple(_gathered(_ring(p, digits)))
        case "all_gather", _:
            return tuple(_gathered(_halving(p, digits)))
        case "reduce_scatter", "recursive-doubling":
            return tuple(Round(_apart(p, 1 << k), 1 - (1 << k) / p, adds=True) for k in range(p.bit_length() - 1))
        case "all_reduce", "recursive-doubling":
            return tuple(Round(_apart(p, 1 << k), 1.0, adds=True) for k in range(p.bit_length() - 1))
        case _:
            scatter = tuple((_ring if algorithm.endswith("ring") else _halving)(p, digits))
            return scatter if kind == "reduce_scatter" else (*scatter, *_gathered(iter(scatter)))


def _ring(p: int, digits: tuple[int, ...]) -> Iterator[Round]:
    """A reduce-scatter: each digit in turn passes pieces to the next place on it."""
    place, stride = np.arange(p), 1
    for size in digits:
        digit = place // stride % size
        yield Round(place + ((digit + 1) % size - digit) * stride, 1 / (stride * size), adds=True, times=size - 1)
        stride *= size


def _halving(p: int, digits: tuple[int, ...]) -> Iterator[Round]:
    """A reduce-scatter: on each digit in turn halves are exchanged, with the place farthest away first."""
    stride = 1
    for size in digits:
        for k in range(1, size.bit_length()):
            yield Round(_apart(p, stride * (size >> k)), 1 / (stride << k), adds=True)
        stride *= size


def _gathered(scatter: Iterator[Round]) -> Iterator[Round]:
    """An all-gather is a reduce-scatter run backwards."""
    for r in reversed(tuple(scatter)):
        yield Round(r.to, r.share, adds=False, times=r.times)


def _bruck(kind: Kind, p: int) -> Iterator[Round]:
    """[TRG] 4.1 and [TRG] 4.4: each place sends to the place 2^k before it what it has gathered so far; or, in an
    all-to-all, every block whose distance has bit k."""
    for k in range((p - 1).bit_length()):
        distance = 1 << k
        blocks = min(distance, p - distance) if kind == "all_gather" else sum(i >> k & 1 for i in range(p))
        yield Round((np.arange(p) - distance) % p, blocks / p, adds=False)


def _apart(p: int, distance: int) -> NDArray[np.int64]:
    return np.arange(p) ^ distance
