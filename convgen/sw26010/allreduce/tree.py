"""The reduction of the public code: whole vectors up a binomial tree to node 0, and down again.

Not what [SW] 5.1 describes, which halves vectors, but what its repository has (feifeibear/SWCaffe, caffe_mpi_reduce),
for every blob of parameters apart. In step s a node whose number ends in 1 and s zeros sends to the one 2^s below;
going down is the same backwards. Numbers are adjacent, and a message between supernodes takes beta2, as in Eqs. 3
and 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from convgen.sw26010.allreduce.cost import Network

ITEM_BYTES = 4


def tree_seconds(network: Network, sizes: Iterable[int]) -> float:
    """Seconds of blobs of these elements, one after the other: log2 q steps inside, log2 p/q across, both ways."""
    across = (network.nodes // network.supernode).bit_length() - 1
    inside = network.steps - across
    a_byte = inside * network.inside_s_per_byte + across * network.across_s_per_byte
    seconds = 0.0
    for elements in sizes:
        size = ITEM_BYTES * elements
        seconds += 2 * (network.steps * network.latency_s + size * a_byte)
        seconds += network.steps * size * network.reduce_s_per_byte
    return seconds
