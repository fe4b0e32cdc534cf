"""Messages carried out: the all-reduce of [SW] 5.1, and the public code's tree."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from convgen.sw26010.allreduce.cost import Network
from convgen.sw26010.allreduce.run import doubling_steps, halving_steps
from convgen.sw26010.allreduce.tree import ITEM_BYTES

Array = NDArray[Any]


def all_reduced(vectors: Array) -> Array:
    """[nodes, elements]: what every node holds after recursive halving and doubling."""
    held = vectors.copy()
    for _, messages in halving_steps(*held.shape):
        sent = [(m, held[m.sender, m.lo : m.hi].copy()) for m in messages]
        for m, data in sent:
            held[m.receiver, m.lo : m.hi] += data
    for _, messages in doubling_steps(*held.shape):
        sent = [(m, held[m.sender, m.lo : m.hi].copy()) for m in messages]
        for m, data in sent:
            held[m.receiver, m.lo : m.hi] = data
    return held


def by_tree(network: Network, vectors: Array) -> tuple[Array, float]:
    """What every node holds in the end, and the seconds, message by message: up to node 0, and down again."""
    held, size, seconds = vectors.copy(), ITEM_BYTES * vectors.shape[1], 0.0
    up = [
        [(node, node - distance) for node in range(distance, network.nodes, 2 * distance)]
        for distance in (1 << step for step in range(network.steps))
    ]

    def message_s(one: int, other: int) -> float:
        inside = network.supernode_of(one, "adjacent") == network.supernode_of(other, "adjacent")
        return network.latency_s + size * (network.inside_s_per_byte if inside else network.across_s_per_byte)

    for messages in up:
        for sender, receiver in messages:
            held[receiver] += held[sender]
        seconds += max(message_s(*m) for m in messages) + size * network.reduce_s_per_byte
    for messages in reversed(up):
        for sender, receiver in messages:
            held[sender] = held[receiver]
        seconds += max(message_s(*m) for m in messages)
    return held, seconds
