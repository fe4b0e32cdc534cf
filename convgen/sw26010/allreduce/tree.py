"""The reduction of the public code: whole vectors up a binomial tree to node 0, and down again.

Not what [SW] 5.1 describes, which halves vectors, but what its repository has (feifeibear/SWCaffe, caffe_mpi_reduce),
for every blob of parameters apart. In step s a node whose number ends in 1 and s zeros sends to the one 2^s below;
going down is the same backwards. Numbers are adjacent, and a message between supernodes takes beta2, as in Eqs. 3
and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.allreduce.cost import Network

ITEM_BYTES = 4
Array = NDArray[Any]


def tree_steps(network: Network) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(distance, (sender, receiver) of every message) of the steps up."""
    for step in range(network.steps):
        distance = 1 << step
        yield distance, [(node, node - distance) for node in range(distance, network.nodes, 2 * distance)]


def run_tree(network: Network, vectors: Any) -> tuple[Array, float]:
    """What every node holds in the end, and the seconds, message by message.

    Args:
        vectors: [nodes, elements].
    Raises:
        InputError: another number of vectors.
    """
    held = np.array(vectors, dtype=np.float64)
    if held.ndim != 2 or held.shape[0] != network.nodes:
        raise InputError(f"vectors {list(held.shape)} for {network.nodes} nodes: one each")
    size, seconds = ITEM_BYTES * held.shape[1], 0.0
    up = list(tree_steps(network))
    for _, messages in up:
        for sender, receiver in messages:
            held[receiver] += held[sender]
        seconds += max(_message_s(network, s, r, size) for s, r in messages) + size * network.reduce_s_per_byte
    for _, messages in reversed(up):
        for sender, receiver in messages:
            held[sender] = held[receiver]
        seconds += max(_message_s(network, s, r, size) for s, r in messages)
    return held, seconds


def _message_s(network: Network, sender: int, receiver: int, size: int) -> float:
    inside = network.supernode_of(sender, "adjacent") == network.supernode_of(receiver, "adjacent")
    return network.latency_s + size * (network.inside_s_per_byte if inside else network.across_s_per_byte)


def tree_seconds(network: Network, sizes: Iterable[int]) -> float:
    """Closed form, of blobs with so many elements one after the other: log2 q steps inside, log2 p/q across, twice."""
    across = (network.nodes // network.supernode).bit_length() - 1
    inside = network.steps - across
    a_byte = inside * network.inside_s_per_byte + across * network.across_s_per_byte
    seconds = 0.0
    for elements in sizes:
        size = ITEM_BYTES * elements
        seconds += 2 * (network.steps * network.latency_s + size * a_byte)
        seconds += network.steps * size * network.reduce_s_per_byte
    return seconds
