"""One all-reduce of all layers' gradients against one a layer ([SW] 5.1), and packs between the two.

Packed, gradients are copied into one buffer and back, on the meshes; they wait for the backward pass to end. A layer's
own all-reduce can start when its gradient is there, beside the backward pass of the layers before it, one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.sw26010.allreduce.cost import Network
from convgen.sw26010.allreduce.steps import mesh_all_reduce_s
from convgen.sw26010.machine.rates import Rates, taken_rates
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds
from convgen.sw26010.training.layers import Layers
from convgen.sw26010.training.step import CORE_GROUPS, Plans, layer_times, nodes_network

NUMBERING = "round-robin"
PACKS = tuple(2**i for i in range(12, 30))  # bytes that a pack has at least


@dataclass(frozen=True, slots=True)
class Gradient:
    """A layer's gradient: its elements, and the seconds from the backward pass's start until it is there."""

    name: str
    elements: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """Gradients reduced in some packs.

    `network_s`: of all-reduces and copies, one after the other; `exposed_s`: what remains of them after the backward
    pass, where a pack is reduced as soon as its last gradient is there.
    """

    packs: int
    network_s: float
    exposed_s: float


def gradients(layers: Layers, batch: int, plans: Plans = "model") -> list[Gradient]:
    """Gradients of the layers that have parameters, in the order of the backward pass."""
    times = layer_times(layers.layers, -(-batch // CORE_GROUPS), plans)
    found: list[Gradient] = []
    now = 0.0
    for time in reversed(times):
        now += time.backward_s
        if time.layer.parameters:
            found.append(Gradient(time.layer.name, time.layer.parameters, now))
    return found


def backward_s(layers: Layers, batch: int, plans: Plans = "model") -> float:
    """Seconds of the whole backward pass."""
    return sum(time.backward_s for time in layer_times(layers.layers, -(-batch // CORE_GROUPS), plans))


def copies_s(elements: int, rates: Rates) -> float:
    """Seconds to copy gradients into the pack and out of it, by four core groups."""
    return 2 * operation_seconds(Stream("relu", max(1, -(-elements // CORE_GROUPS))), rates)


def packs_of(given: Sequence[Gradient], least_bytes: float) -> list[list[Gradient]]:
    """Packs of gradients that follow each other backward, each of `least_bytes` or more; the last may have fewer."""
    found: list[list[Gradient]] = [[]]
    for gradient in given:
        if found[-1] and 4 * sum(g.elements for g in found[-1]) >= least_bytes:
            found.append([])
        found[-1].append(gradient)
    return found if given else []


def reduce_packs(packs: Sequence[Sequence[Gradient]], network: Network, backward: float, *, copied: bool) -> Reduced:
    """All-reduces of the packs, each as soon as it can.

    Args:
        backward: seconds of the backward pass.
        copied: packs of several gradients are copied together and apart; else they lie together from the start.
    """
    rates = taken_rates()
    taken = free = 0.0
    for pack in packs:
        elements = sum(gradient.elements for gradient in pack)
        seconds = mesh_all_reduce_s(network, NUMBERING, elements, rates)
        seconds += copies_s(elements, rates) if copied and len(pack) > 1 else 0.0
        taken += seconds
        free = max(free, pack[-1].ready_s) + seconds
    return Reduced(len(packs), taken, max(0.0, free - backward))


def break_even_elements(total: int, network: Network) -> int:
    """From how many elements on a layer is better reduced alone than copied into a pack that has `total` others.

    By bisection; the difference is monotonous but for the rounding of messages.
    """
    rates = taken_rates()
    packed = mesh_all_reduce_s(network, NUMBERING, total, rates)

    def alone_is_better(elements: int) -> bool:
        alone = mesh_all_reduce_s(network, NUMBERING, elements, rates)
        more = mesh_all_reduce_s(network, NUMBERING, total + elements, rates) - packed
        return alone < more + copies_s(elements, rates)

    low, high = 1, 2**32
    if alone_is_better(low) or not alone_is_better(high):
        return low if alone_is_better(low) else high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if alone_is_better(middle) else (middle, high)
    return high


def best_pack(given: Sequence[Gradient], network: Network, backward: float) -> tuple[int, Reduced]:
    """The smallest of the bytes of a pack with the least exposed time, copied."""
    tried = [(least, reduce_packs(packs_of(given, least), network, backward, copied=True)) for least in PACKS]
    return min(tried, key=lambda item: item[1].exposed_s)


@dataclass(frozen=True, slots=True)
class Packing:
    """A network's gradients on so many nodes, in three ways, and in the best packs between."""

    network: str
    batch: int
    nodes: int
    layers: int
    elements: int
    alone: Reduced
    packed: Reduced
    in_place: Reduced
    best_bytes: int
    best: Reduced
    break_even_bytes: int


def packing_of(
    layers: Layers, batch: int, nodes: int, plans: Plans = "model", latency_s: float | None = None
) -> Packing:
    """Raises InputError: nodes that are no power of two."""
    network, given, backward = (
        nodes_network(nodes, latency_s),
        gradients(layers, batch, plans),
        backward_s(layers, batch, plans),
    )
    everything = packs_of(given, float("inf"))
    best_bytes, best = best_pack(given, network, backward)
    total = sum(gradient.elements for gradient in given)
    return Packing(
        layers.name, batch, nodes, len(given), total,
        alone=reduce_packs([[gradient] for gradient in given], network, backward, copied=False),
        packed=reduce_packs(everything, network, backward, copied=True),
        in_place=reduce_packs(everything, network, backward, copied=False),
        best_bytes=best_bytes, best=best, break_even_bytes=4 * break_even_elements(total, network),
    )  # fmt: skip
