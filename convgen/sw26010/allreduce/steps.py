"""Seconds of every step of an all-reduce by closed form, with its additions on the meshes of a node.

The largest message of step s of the halving has ceil(n / 2^s) elements, and a step crosses supernodes with all its
messages or with none. What arrives is added by the four core groups, a quarter each, with the program of
operations/stream.py: small messages come in small blocks, for which DMA is slow ([SW] 5.1).
"""

from __future__ import annotations

from dataclasses import replace

from convgen.sw26010.allreduce.cost import Network, Numbering
from convgen.sw26010.machine.rates import Rates
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds

CORE_GROUPS = 4
ITEM_BYTES = 4


def step_elements(network: Network, elements: int) -> list[tuple[int, int]]:
    """(distance, elements of the largest message) of every step of the reduce-scatter."""
    return [(network.nodes >> (s + 1), -(-elements // 2 ** (s + 1))) for s in range(network.steps)]


def crosses(network: Network, numbering: Numbering, distance: int) -> bool:
    """Whether nodes at this distance are in different supernodes."""
    if numbering == "adjacent":
        return distance >= network.supernode
    return distance < network.nodes // network.supernode


def message_seconds(network: Network, numbering: Numbering, distance: int, elements: int) -> float:
    """Seconds of a step's message; a node sends and receives at once."""
    per_byte = network.across_s_per_byte if crosses(network, numbering, distance) else network.inside_s_per_byte
    return network.latency_s + ITEM_BYTES * elements * per_byte


def mesh_all_reduce_s(network: Network, numbering: Numbering, elements: int, rates: Rates) -> float:
    """Seconds of both phases. The network's `reduce_s_per_byte` is not used: the meshes' programs add."""
    plain = replace(network, reduce_s_per_byte=0.0)
    seconds = 0.0
    for distance, size in step_elements(network, elements):
        seconds += 2 * message_seconds(plain, numbering, distance, size)
        seconds += operation_seconds(Stream("add", max(1, -(-size // CORE_GROUPS))), rates)
    return seconds
