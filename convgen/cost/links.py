"""Messages on a machine's links: which level each crosses, and how ranks of one unit share the links out of it.

Ranks are numbered node by node, so rank r is in unit r // (ranks of one unit) of each level. A message crosses the
innermost level in which both its ends are in one unit. It leaves the units below by their links out, which all
messages that leave at the same time share equally; links in are apart from these:

    seconds of a round = max over messages of alpha + n max(beta, messages through its fullest links / their shared
    rate)

A plain ring is laid as libraries lay it: there are as many rings as a unit has members of the group, and each leaves
the unit from another member with its part of the vector. So what one rank can send out does not limit a ring; what the
ranks share does. A ring's rounds are not in step: each piece passes one link after the other, so latencies of links add
up, and only the slowest link's beta counts.

A grid's order decides all of it: the last axis varies fastest, so its groups are inside nodes where they fit.

Source: [CF] 6.1 and [SP] VI (four GPUs share two adapters), [SW] 5.1 (links between supernodes carry a quarter);
    latencies of rings as in NCCL's own model (src/graph/tuning.cc: steps inside nodes and between them, each times its
    latency).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Kind
from convgen.cost.collectives import seconds, usable, whole
from convgen.cost.machine import Level
from convgen.cost.rounds import rounds

Ranks = NDArray[np.int64]
MOST_PAIRS = 1 << 14  # messages of an exchange that are looked at one by one


class Line(NamedTuple):
    """Seconds alpha + beta n of a message of n bytes over one level, with its links shared as in some round."""

    level: str
    alpha: float
    beta: float


class LineRound(NamedTuple):
    """A round of a collective: the lines of its messages; the slowest line counts."""

    times: int
    share: float
    adds: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Loads:
    """What the messages of an exchange put on the links.

    Attributes:
        peers: by level, the most messages that a rank sends, or receives.
        busy: by level, what a rank sends, or receives, in all; ranks with equal loads stand once.
        fullest: for each shared level, what the fullest link out of a unit, or into one, carries.
    """

    peers: tuple[int, ...]
    busy: NDArray[np.float64]
    fullest: tuple[tuple[int, float], ...]

    def line(self, levels: tuple[Level, ...], unit: int = 1) -> tuple[float, float]:
        """Seconds until all messages are started, and seconds that the bytes take.

        Args:
            unit: bytes of one counted element.
        """
        start, busy = 0.0, np.zeros(self.busy.shape[1])
        for level, peers, some in zip(levels, self.peers, self.busy, strict=True):
            start += peers * level.latency_s
            busy += some * unit / level.bytes_per_s
        shared = [n * unit / (levels[j].shared_bytes_per_s or inf) for j, n in self.fullest]
        return start, max([float(busy.max()), *shared])


class Links:
    """A grid's ranks on the levels of a machine."""

    def __init__(self, grid: Grid, levels: tuple[Level, ...]) -> None:
        self.grid, self.levels = grid, levels
        rank = np.arange(grid.ranks)
        self.units = [rank // level.ranks if level.ranks else np.zeros_like(rank) for level in levels]

    def level(self, src: Ranks, dst: Ranks) -> Ranks:
        """Which level each message crosses."""
        crossed = np.zeros(src.shape, dtype=np.int64)
        for unit in self.units:
            crossed += unit[src] != unit[dst]
        return crossed

    def lines(self, src: Ranks, dst: Ranks, senders: Callable[[int], Ranks] | None = None) -> tuple[Line, ...]:
        """By level, what messages of one size cost that travel at once; each rank sends and receives at most one.

        Args:
            senders: by level, over how many ranks of its unit each message is spread on that level; one by default.
        """
        crossed = self.level(src, dst)
        beta = np.zeros(len(src))
        used: list[int] = np.unique(crossed).tolist()
        for i in used:
            here = crossed == i
            beta[here] = (1 / self.levels[i].bytes_per_s) / (1 if senders is None else senders(i)[here])
        for j, level in enumerate(self.levels):
            if level.shared_bytes_per_s is not None:
                out = crossed >= j
                inner, count = self.units[j - 1], int(self.units[j - 1].max()) + 1
                leaving = np.bincount(inner[src[out]], minlength=count)[inner[src]]
                arriving = np.bincount(inner[dst[out]], minlength=count)[inner[dst]]
                beta = np.where(out, np.maximum(beta, np.maximum(leaving, arriving) / level.shared_bytes_per_s), beta)
        return tuple(Line(self.levels[i].name, self.levels[i].latency_s, float(beta[crossed == i].max())) for i in used)

    def members_beside(self, members: Ranks, level: int) -> Ranks:
        """[groups, members]: how many members of its group, itself included, are in a member's unit of the level
        below."""
        if level == 0:
            return np.ones_like(members)
        rows, inner = np.arange(len(members))[:, None], self.units[level - 1][members]
        _, where, counts = np.unique(rows * self.grid.ranks + inner, return_inverse=True, return_counts=True)
        return counts[where].reshape(members.shape)

    def factors(self, over: Axes) -> tuple[int, ...]:
        """How a group over these axes lies on the levels: members in one unit of the first, such units in one unit of
        the second, and so on. Levels on which groups lie unevenly, or which add nothing, are left out.

        Example:
            >>> node = Level(name="node", ranks=4, latency_s=0, bytes_per_s=1)
            >>> cluster = Level(name="machine", latency_s=0, bytes_per_s=1)
            >>> Links(Grid((("data", 4), ("chan", 2))), (node, cluster)).factors(("data",))
            (2, 2)
        """
        members = self.grid.groups(over)
        found: list[int] = []
        inside = 1
        for unit in self.units:
            rows = np.arange(len(members))[:, None] * self.grid.ranks
            _, counts = np.unique((rows + unit[members]).ravel(), return_counts=True)
            if counts.min() == counts.max() and counts[0] > inside and counts[0] % inside == 0:
                found.append(int(counts[0]) // inside)
                inside = int(counts[0])
        return tuple(found)

    def exchange(self, src: Ranks, dst: Ranks, sizes: Ranks) -> float:
        """Seconds of messages of these sizes in bytes that travel at once: each rank starts its messages one by one,
        and its bytes, or its unit's, take their time."""
        start, moving = self.exchange_line(src, dst, sizes)
        return start + moving

    def exchange_line(self, src: Ranks, dst: Ranks, sizes: Ranks) -> tuple[float, float]:
        """Seconds until all messages are started, and seconds that the bytes take: these are proportional to sizes."""
        return self.loads(src, dst, sizes, self.level(src, dst)).line(self.levels)

    def loads(self, src: Ranks, dst: Ranks, sizes: Ranks, crossed: Ranks) -> Loads:
        """What messages that all travel at once put on the links.

        Args:
            sizes: in any unit.
            crossed: the level that each message crosses.
        """
        shape = len(self.levels), self.grid.ranks
        ends = [crossed * self.grid.ranks + end for end in (src, dst)]
        counts = np.stack([np.bincount(end, minlength=prod(shape)) for end in ends])
        busy = np.concatenate([np.bincount(end, sizes, prod(shape)).reshape(shape) for end in ends], axis=1)
        peers: list[int] = counts.reshape(2, *shape).max(axis=(0, 2)).tolist()
        fullest: list[tuple[int, float]] = []
        for j, level in enumerate(self.levels):
            if level.shared_bytes_per_s is not None and any(peers[j:]):
                unit, out = self.units[j - 1], sizes * (crossed >= j)
                fullest.append((j, max(float(np.bincount(unit[end], out).max()) for end in (src, dst))))
        return Loads(tuple(peers), np.array([*{*zip(*busy.tolist(), strict=True)}]).T, tuple(fullest))

    def all_to_all(self, over: Axes, n: float) -> float:
        """Seconds of a direct all-to-all in which a rank sends n bytes in all, to each other member as many."""
        src, dst = pairs(self.grid.groups(over))
        return self.exchange(src, dst, np.full(len(src), n / (self.grid.over(over) - 1)))


def pairs(members: Ranks) -> tuple[Ranks, Ranks]:
    """Every member of every group with every other: (from, to)."""
    one, other = np.nonzero(~np.eye(members.shape[1], dtype=np.bool_))
    return members[:, one].ravel(), members[:, other].ravel()


@lru_cache(maxsize=4096)
def _round_lines(
    grid: Grid, levels: tuple[Level, ...], over: Axes, kind: Kind, algorithm: str
) -> tuple[LineRound, ...]:
    links, members = Links(grid, levels), grid.groups(over)
    found = rounds(kind, algorithm, members.shape[1], links.factors(over))

    def beside(level: int) -> Ranks:
        return links.members_beside(members, level).ravel()

    senders = beside if algorithm == "ring" else None
    lines = [links.lines(members.ravel(), members[:, r.to].ravel(), senders) for r in found]
    if algorithm == "ring":
        alpha = sum(share * levels[level].latency_s for level, share in ring_hops(grid, levels, over).items())
        lines = [(max(one, key=lambda line: line.beta)._replace(alpha=alpha),) for one in lines]
    return tuple(LineRound(r.times, r.share, r.adds, one) for r, one in zip(found, lines, strict=True))


def ring_hops(grid: Grid, levels: tuple[Level, ...], over: Axes) -> dict[int, float]:
    """For each level the share of a ring's hops that cross it, in the group where they take longest."""
    members = grid.groups(over)
    crossed = Links(grid, levels).level(members, np.roll(members, -1, axis=1))
    latencies = np.array([level.latency_s for level in levels])
    slowest = crossed[latencies[crossed].sum(axis=1).argmax()]
    used, counts = np.unique(slowest, return_counts=True)
    return {int(level): int(count) / members.shape[1] for level, count in zip(used, counts, strict=True)}


def collective_seconds(
    grid: Grid, levels: tuple[Level, ...], kind: Kind, over: Axes, n: float, gamma: float, algorithm: str
) -> tuple[float, str]:
    """(seconds, algorithm) of a collective of all groups over some axes at once; the slowest rank sends n bytes.

    Args:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        n: as direct exchange counts (docs/design.md, Two views of a step); with uneven blocks that of the slowest rank.
        algorithm: one of collectives.ALGORITHMS, or best. Where a named one needs a power of two and the group is
            none, the ring takes its place (Bruck's for an all-gather).
    """
    p = grid.over(over)
    known = usable(kind, p)
    if algorithm == "best":
        return min(
            (collective_seconds(grid, levels, kind, over, n, gamma, name) for name in known), key=lambda found: found[0]
        )
    if algorithm not in known:
        algorithm = "bruck" if kind == "all_gather" else known[0]
    if (kind, algorithm) == ("all_to_all", "direct"):
        return Links(grid, levels).all_to_all(over, n), algorithm
    costs = _round_lines(grid, levels, over, kind, algorithm)
    if algorithm == "ring":
        line = costs[0].lines[0]
        return seconds(kind, p - 1, n, line.alpha, line.beta, gamma), algorithm
    vector = whole(kind, p, n)
    time_s = 0.0
    for r in costs:
        added = gamma if r.adds else 0.0
        time_s += r.times * max(line.alpha + r.share * vector * (line.beta + added) for line in r.lines)
    return time_s, algorithm


def ring_line(grid: Grid, levels: tuple[Level, ...], over: Axes) -> Line:
    """A line with the mean latency of a ring's hops over these axes, and its slowest level's beta, links shared."""
    return _round_lines(grid, levels, over, "all_gather", "ring")[0].lines[0]


@lru_cache(maxsize=1 << 12)
def direct_all_to_all(grid: Grid, levels: tuple[Level, ...], over: Axes) -> tuple[float, float]:
    """Seconds until a direct all-to-all has started its messages, and seconds for each byte that a rank sends."""
    if len(levels) == 1 and levels[0].shared_bytes_per_s is None:
        return (grid.over(over) - 1) * levels[0].latency_s, 1 / levels[0].bytes_per_s
    if grid.ranks * grid.over(over) > 16 * MOST_PAIRS:
        return (grid.over(over) - 1) * max(one.latency_s for one in levels), slowest(grid, levels, over)
    links = Links(grid, levels)
    start = links.all_to_all(over, 0.0)
    return start, (links.all_to_all(over, 1e9) - start) / 1e9


@lru_cache(maxsize=1 << 12)
def outermost(grid: Grid, levels: tuple[Level, ...], over: Axes) -> int:
    """The number of the outermost level that groups over these axes reach."""
    if len(levels) == 1:
        return 0
    members = grid.groups(over)
    return int(Links(grid, levels).level(np.repeat(members[:, 0], members.shape[1]), members.ravel()).max())


@lru_cache(maxsize=1 << 12)
def slowest(grid: Grid, levels: tuple[Level, ...], over: Axes) -> float:
    """Seconds for a byte over the outermost level that groups over these axes reach, if all ranks of a unit send."""
    top = outermost(grid, levels, over)
    level, unit = levels[top], (levels[top - 1].ranks or 1) if top else 1
    shared = unit / level.shared_bytes_per_s if level.shared_bytes_per_s is not None else 0.0
    return max(1 / level.bytes_per_s, shared)
