# pyright: reportUnknownMemberType=false
# (parts of torch.distributed have no types)
"""Links between ranks: messages inside a node and between nodes, and how the ranks of a node share the links out of it.

A level's latency and rate are those of messages that a rank sends while it receives one as long, as in a round of a
collective; machine files mean the same. Inside a node all ranks do so at once, since the first level has no number for
how ranks share it. Between nodes one rank of each node does so; then all ranks do, which shows what they share. Pairs
that send in turns, one message on the way at a time, are measured for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from convgen.calibrate.fit import Fit, fit_line
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.race import Case, Timing, climb, race
from convgen.calibrate.team import Call, Team
from convgen.cost.machine import Level

SIZES = tuple(64 << 2 * k for k in range(10))  # bytes: 64 to 16 Mi
LEAST_SIZES = 9  # sizes up to 4 MiB are measured in any case: below, a busy machine's latencies hide the rate


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who sends to whom.

    Attributes:
        to: the rank that each rank sends to, by (from, to); ranks not among them wait.
        turns: whether one message goes there, then one back; otherwise all are on the way at once.
    """

    label: str
    to: tuple[tuple[int, int], ...]
    turns: bool = False


@dataclass(frozen=True, slots=True)
class Messages:
    """What a pattern's messages took: seconds one way, and the line through them."""

    pattern: Pattern
    timings: tuple[Timing, ...]
    fit: Fit


def patterns(nodes: Nodes) -> dict[str, Pattern]:
    """The patterns to measure; `inside`, `across` and `shared` are what levels are made of."""
    found: dict[str, Pattern] = {}
    r, size = nodes.ranks, nodes.size
    for other in sorted({1, r // 2, r - 1} - {0}) if r > 1 else ():
        found[f"pair {other}"] = _pair(f"ranks 0 and {other}, in turns", 0, other)
    if r > 1:
        every = tuple((k, k // r * r + (k + 1) % r) for k in range(size))
        found["inside"] = Pattern("all ranks of a node, each to the next", every)
    if nodes.count > 1:
        found["pair across"] = _pair(f"ranks 0 and {r}, in turns", 0, r)
        found["across"] = Pattern(
            "one rank a node, each to the next node", tuple((k, (k + r) % size) for k in range(0, size, r))
        )
        if r > 1:
            found["shared"] = Pattern(
                "all ranks, each to the next node", tuple((k, (k + r) % size) for k in range(size))
            )
    return found


def _pair(label: str, a: int, b: int) -> Pattern:
    return Pattern(label, ((a, b), (b, a)), turns=True)


def measure_messages(team: Team, nodes: Nodes, seconds: float) -> dict[str, Messages]:
    """Times of every pattern over sizes that grow while time lasts, and lines through them.

    Raises:
        InputError: no line fits the times.
    """
    chosen = patterns(nodes)
    out, back = (torch.zeros(SIZES[-1], dtype=torch.uint8, device=team.device) for _ in range(2))
    rungs = [
        [Case(key, size, message(team, pattern, out[:size], back[:size])) for key, pattern in chosen.items()]
        for size in SIZES
    ]
    timings = race(team, climb(team, rungs, 0.5 * seconds, LEAST_SIZES), 0.5 * seconds)
    return {key: _messages(pattern, [t for t in timings if t.label == key]) for key, pattern in chosen.items()}


def _messages(pattern: Pattern, timings: Sequence[Timing]) -> Messages:
    ways = 2 if pattern.turns else 1
    one_way = tuple(Timing(t.label, t.size, t.seconds / ways, t.laps, t.spread) for t in timings)
    return Messages(pattern, one_way, fit_line([t.size for t in one_way], [t.seconds for t in one_way], pattern.label))


def message(team: Team, pattern: Pattern, out: Any, back: Any) -> Call | None:
    """This rank's part of a pattern; None where it only waits."""
    to, fro = dict(pattern.to), {b: a for a, b in pattern.to}
    if team.rank not in to:
        return None
    dst, src, world = to[team.rank], fro[team.rank], dist.group.WORLD
    assert world is not None

    def shift() -> None:
        if team.device.type == "cpu":  # as modules do (templates/runtime/transport.py)
            works = [world.recv([back], src, 0), world.send([out], dst, 0)]
        else:
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, back, src), dist.P2POp(dist.isend, out, dst)])
        for work in works:
            work.wait()

    def serve() -> None:
        dist.send(out, dst)
        dist.recv(back, src)

    def answer() -> None:
        dist.recv(back, src)
        dist.send(out, dst)

    return team.communicate((serve if team.rank < dst else answer) if pattern.turns else shift)


def levels_of(nodes: Nodes, messages: Mapping[str, Messages]) -> tuple[Level, ...]:
    """The levels of a machine file, innermost first."""
    inner, outer = messages.get("inside"), messages.get("across")
    if outer is None or inner is None:
        one = messages["inside" if outer is None else "across"].fit
        return (Level(name="machine", latency_s=one.latency_s, bytes_per_s=one.bytes_per_s),)
    shared = nodes.ranks * messages["shared"].fit.bytes_per_s
    return (
        Level(name="node", ranks=nodes.ranks, latency_s=inner.fit.latency_s, bytes_per_s=inner.fit.bytes_per_s),
        Level(
            name="machine",
            latency_s=outer.fit.latency_s,
            bytes_per_s=outer.fit.bytes_per_s,
            shared_bytes_per_s=shared,
        ),
    )
