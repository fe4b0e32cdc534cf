"""The all-reduce of [SW] 5.1, message by message: recursive halving, then recursive doubling.

In step s of the reduce-scatter a node exchanges the half of its vector that it gives up with the node at distance
p / 2^(s+1), and adds what it receives to the half that it keeps; the all-gather goes the same way back. Both
numberings run the same program: only the supernode that a number stands for differs, so that with round-robin numbers
the large messages stay inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgen.sw26010.allreduce.cost import Network, Numbering


@dataclass(frozen=True, slots=True)
class Message:
    """What one node sends another in a step: the part [lo, hi) of its vector, in elements."""

    sender: int
    receiver: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """One step, over all nodes. `seconds` is that of the slowest node."""

    phase: str
    distance: int
    message_bytes: int
    total_bytes: int
    crossing_bytes: int
    seconds: float


def halving_steps(nodes: int, elements: int) -> Iterator[tuple[int, list[Message]]]:
    """(distance, messages) of every step of the reduce-scatter.

    A node keeps the half that its number's bit of this distance says: 0 the lower, 1 the upper.
    """
    spans = [(0, elements)] * nodes
    distance = nodes // 2
    while distance:
        messages: list[Message] = []
        kept: list[tuple[int, int]] = []
        for node, (lo, hi) in enumerate(spans):
            middle = (lo + hi) // 2
            halves = ((lo, middle), (middle, hi))
            upper = bool(node & distance)
            kept.append(halves[upper])
            messages.append(Message(node, node ^ distance, *halves[not upper]))
        spans = kept
        yield distance, messages
        distance //= 2


def doubling_steps(nodes: int, elements: int) -> Iterator[tuple[int, list[Message]]]:
    """(distance, messages) of every step of the all-gather: the halving backwards, the kept halves sent."""
    for distance, messages in reversed(list(halving_steps(nodes, elements))):
        by_sender = {m.sender: m for m in messages}
        yield (
            distance,
            [Message(m.receiver, m.sender, m.lo, m.hi) for m in sorted(by_sender.values(), key=lambda m: m.receiver)],
        )


def simulate_traffic(network: Network, numbering: Numbering, elements: int, itemsize: int) -> tuple[StepTraffic, ...]:
    """The steps of an all-reduce of so many elements; where nodes don't divide them, parts differ by one."""
    phases = (("reduce-scatter", halving_steps), ("all-gather", doubling_steps))
    return tuple(
        _traffic(phase, distance, messages, network, numbering, itemsize)
        for phase, steps in phases
        for distance, messages in steps(network.nodes, elements)
    )


def _traffic(
    phase: str, distance: int, messages: list[Message], network: Network, numbering: Numbering, itemsize: int
) -> StepTraffic:
    """Sum up a step. A node sends and receives at once; adding what arrived takes gamma a byte."""
    crossing = total = most = 0
    seconds = 0.0
    for message in messages:
        size = (message.hi - message.lo) * itemsize
        inside = network.supernode_of(message.sender, numbering) == network.supernode_of(message.receiver, numbering)
        per_byte = network.inside_s_per_byte if inside else network.across_s_per_byte
        adding = network.reduce_s_per_byte if phase == "reduce-scatter" else 0.0
        seconds = max(seconds, network.latency_s + size * (per_byte + adding))
        total += size
        crossing += 0 if inside else size
        most = max(most, size)
    return StepTraffic(phase, distance, most, total, crossing, seconds)
