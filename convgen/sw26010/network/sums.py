"""A sum over core groups and nodes, Algorithm 1 of [SW] 5.1, lines 7 to 9, message by message.

    7  the core groups of a node wait for each other: each initiates a handshake, core group 0 confirms
    8  core group 0 adds up what the others left in the shared memory, with the program of a sum
    9  nodes halve and double recursively; what arrives is added by the node's meshes, a share each
       the core groups wait for each other again, and read the sum

Sums are plain ones: a mean over samples divides by their number where the loss is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.allreduce.cost import Network
from convgen.sw26010.allreduce.run import halving_steps
from convgen.sw26010.allreduce.steps import crosses
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.machine.faults import HandshakeFault
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.network.core_group import CoreGroup
from convgen.sw26010.network.tasks import Task
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds, run_operation
from convgen.sw26010.target.sums import Sum, run_sum, sum_counts, sum_seconds

Array = NDArray[Any]
SUPERNODE = 256
LABEL, PART = "sums", "all-reduce"  # of an account
# Moves messages among some ranks: takes the ranks, what goes to each, how many elements come from each, and an array of
# their type; gives what has come from each.
Exchange = Callable[[tuple[int, ...], dict[int, Array], dict[int, int], Array], dict[int, Array]]


@dataclass(frozen=True)
class HandshakeTask:
    """A node's core groups wait for each other; this one initiates or confirms `count` handshakes."""

    count: int
    kind = "sums"

    @property
    def counts(self) -> Counts:
        return Counts(handshakes=self.count)

    @property
    def seconds(self) -> float:
        return 0.0  # not published

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        """Raises HandshakeFault: another core group is at another synchronisation."""
        own, *others = (int(t[0]) for t in operands)
        if any(other != own for other in others):
            raise HandshakeFault(own, others)
        return (), Counts(handshakes=len(others))


@dataclass(frozen=True)
class SumTask:
    """Core group 0 adds up gradients (target/sums.py)."""

    sum: Sum
    kind = "sums"

    @property
    def counts(self) -> Counts:
        return sum_counts(self.sum)

    @property
    def seconds(self) -> float:
        return sum_seconds(self.sum, taken_rates())

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        made, counts = run_sum(self.sum, np.stack(operands))
        return (made,), counts


@dataclass(frozen=True)
class NodeAddTask:
    """What has arrived from another node is added by the node's core groups, each of which adds a share."""

    elements: int
    core_groups: int
    dtype: Dtype
    kind = "sums"

    @property
    def _shares(self) -> list[Stream]:
        bounds = [self.elements * i // self.core_groups for i in range(self.core_groups + 1)]
        return [Stream("add", b - a, self.dtype) for a, b in pairwise(bounds) if b > a]

    @property
    def counts(self) -> Counts:
        return total(one.cost() for one in self._shares)

    @property
    def seconds(self) -> float:
        return max(operation_seconds(one, taken_rates()) for one in self._shares)

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        counts, made, at = Counts(), [], 0
        parts: list[Array] = made
        for one in self._shares:
            found, events = run_operation(one, *(t[at : at + one.elements] for t in operands))
            parts.append(found["y"])
            counts.add(events)
            at += one.elements
        return (np.concatenate(parts),), counts


@dataclass(frozen=True)
class MessageTask:
    """A message to another node while one comes from it; nodes are numbered round-robin ([SW] 5.1)."""

    nodes: int
    distance: int
    bytes: int
    kind = "network"

    @property
    def counts(self) -> Counts:
        return Counts(sends=1, sent_bytes=self.bytes)

    @property
    def seconds(self) -> float:
        network = Network(self.nodes, min(self.nodes, SUPERNODE))
        across = crosses(network, "round-robin", self.distance)
        return network.latency_s + self.bytes * (network.across_s_per_byte if across else network.inside_s_per_byte)

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        (sent,) = operands
        return (), Counts(sends=1, sent_bytes=sent.nbytes)


class Halving(NamedTuple):
    """A step of a node: with which one it exchanges, what of the vector it gives up and what it keeps."""

    distance: int
    partner: int
    gives: tuple[int, int]
    keeps: tuple[int, int]


def halvings(nodes: int, node: int, elements: int) -> list[Halving]:
    """The steps of a node's reduce-scatter; its all-gather takes them backwards."""
    found: list[Halving] = []
    for distance, messages in halving_steps(nodes, elements):
        mine, theirs = messages[node], messages[node ^ distance]
        found.append(Halving(distance, mine.receiver, (mine.lo, mine.hi), (theirs.lo, theirs.hi)))
    return found


def sum_tasks(nodes: Sequence[Sequence[int]], rank: int, elements: int, dtype: Dtype) -> list[Task]:
    """The tasks of a rank's core group in a sum, by closed form; `sum_over_nodes` runs the same."""
    number = next(n for n, members in enumerate(nodes) if rank in members)
    members, size = nodes[number], np.dtype(dtype).itemsize
    leads, several = rank == members[0], len(members) > 1
    wait: list[Task] = [HandshakeTask(len(members) - 1 if leads else 1)] if several else []
    if not leads:
        return [*wait, *wait]
    found: list[Task] = [*wait, *([SumTask(Sum(len(members), elements, dtype))] if several else [])]
    steps = halvings(len(nodes), number, elements)
    for step in steps:
        found += _message(len(nodes), step.distance, step.gives, size)
        if (kept := step.keeps[1] - step.keeps[0]) > 0:
            found.append(NodeAddTask(kept, len(members), dtype))
    for step in reversed(steps):
        found += _message(len(nodes), step.distance, step.keeps, size)
    return [*found, *wait]


def _message(nodes: int, distance: int, part: tuple[int, int], size: int) -> list[Task]:
    elements = part[1] - part[0]
    return [MessageTask(nodes, distance, elements * size)] if elements else []


def sum_over_nodes(
    own: Array, nodes: Sequence[Sequence[int]], rank: int, group: CoreGroup, exchange: Exchange
) -> Array:
    """The sum of all ranks' vectors, equal on all of them.

    Args:
        own: this rank's, float32 or float64.
        nodes: ranks by node; the first of each is its core group 0.
    Raises:
        HandshakeFault: a core group of the node is at another sum.
    """
    number = next(n for n, members in enumerate(nodes) if rank in members)
    members = tuple(nodes[number])
    leads = rank == members[0]
    dtype: Dtype = "float32" if own.dtype == np.float32 else "float64"

    def run(task: Task, *operands: Array) -> Any:
        return group.run(LABEL, PART, task, *operands)

    _wait(members, rank, group, exchange, own)
    whole = own
    if len(members) > 1:  # what is left in the shared memory
        sends = {} if leads else {members[0]: own}
        come = exchange(members, sends, dict.fromkeys(members[1:], own.size) if leads else {}, own)
        if leads:
            whole = run(SumTask(Sum(len(members), own.size, dtype)), own, *(come[r] for r in members[1:]))
    if leads:
        whole = _over_nodes(whole.copy(), [m[0] for m in nodes], number, len(members), dtype, run, exchange)
    _wait(members, rank, group, exchange, own)
    if len(members) > 1:
        sends = dict.fromkeys(members[1:], whole) if leads else {}
        come = exchange(members, sends, {} if leads else {members[0]: own.size}, own)
        whole = whole if leads else come[members[0]]
    return whole


def _over_nodes(
    whole: Array, leaders: Sequence[int], number: int, core_groups: int, dtype: Dtype, run: Any, exchange: Exchange
) -> Array:
    """Recursive halving and doubling among the first core groups of nodes."""
    steps = halvings(len(leaders), number, whole.size)

    def swap(step: Halving, sent: tuple[int, int], received: tuple[int, int]) -> Array:
        other, part = leaders[step.partner], whole[slice(*sent)]
        if part.size:
            run(MessageTask(len(leaders), step.distance, part.nbytes), part)
        pair = (min(leaders[number], other), max(leaders[number], other))
        come = exchange(pair, {other: part}, {other: received[1] - received[0]}, whole)
        return come.get(other, whole[:0])

    for step in steps:
        come = swap(step, step.gives, step.keeps)
        if come.size:
            kept = slice(*step.keeps)
            whole[kept] = run(NodeAddTask(come.size, core_groups, dtype), whole[kept], come)
    for step in reversed(steps):
        whole[slice(*step.gives)] = swap(step, step.keeps, step.gives)
    return whole


def _wait(members: tuple[int, ...], rank: int, group: CoreGroup, exchange: Exchange, like: Array) -> None:
    """Handshakes through a semaphore: the others initiate, core group 0 confirms."""
    if len(members) == 1:
        return
    first, *others = members
    group.synchronised += 1
    mine = np.array([group.synchronised], like.dtype)
    if rank == first:
        come = exchange(members, {}, dict.fromkeys(others, 1), like)
        group.run(LABEL, PART, HandshakeTask(len(others)), mine, *(come[r] for r in others))
        exchange(members, dict.fromkeys(others, mine), {}, like)
    else:
        exchange(members, {first: mine}, {}, like)
        come = exchange(members, {}, {first: 1}, like)
        group.run(LABEL, PART, HandshakeTask(1), mine, come[first])
