"""Modelled cost of single steps of one layer on one machine; what schedules, plans and explanations add up.

A step takes as long as its slowest rank. Times are whole picoseconds, so that sums do not depend on their
order and equal costs compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.space import Space
from convgen.cost.collectives import seconds
from convgen.cost.local import convolution_elements, convolution_flops
from convgen.cost.machine import Machine
from convgen.cost.traffic import elements_received, elements_sent, most_peers
from convgen.spec.layer import DTYPE_BYTES

PICOSECONDS = 10**12


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of the busiest rank.

    Attributes:
        elements: the most that a rank sends.
        sent_bytes: the same in bytes.
        flops: the most that a rank computes.
        time_ps: modelled time in picoseconds.
    """

    elements: int = 0
    sent_bytes: int = 0
    flops: int = 0
    time_ps: int = 0

    @property
    def seconds(self) -> float:
        return self.time_ps / PICOSECONDS


Chain = tuple[tuple[Conversion, StepCost], ...]
FREE = StepCost()


class Model:
    """Costs of the steps of a convolution on a grid of a machine's ranks, in one dtype. Answers are cached."""

    def __init__(self, space: Space, machine: Machine, dtype: str) -> None:
        self.space, self.machine, self.dtype = space, machine, dtype
        self.element_bytes = DTYPE_BYTES[dtype]
        self._chains: dict[tuple[Layout, Layout], Chain] = {}
        self._conversions: dict[tuple[Layout, Layout], StepCost] = {}
        self._convolutions: dict[tuple[Layout, Layout, Layout], StepCost] = {}

    def chain(self, src: Layout, dst: Layout) -> Chain:
        """The conversions from one layout to another with their costs."""
        key = (src, dst)
        if (chain := self._chains.get(key)) is None:
            steps = redistribute(self.space, src, dst)
            chain = self._chains[key] = tuple((step, self.conversion(step)) for step in steps)
        return chain

    def conversion(self, step: Conversion) -> StepCost:
        if step.kind == "slice":
            return FREE
        key = (step.src, step.dst)
        if (cost := self._conversions.get(key)) is None:
            cost = self._conversions[key] = self._conversion(step)
        return cost

    def _conversion(self, step: Conversion) -> StepCost:
        what = (self.space, step.kind, step.over, step.src, step.dst)
        sent = elements_sent(*what)
        most_sent = int(sent.max())
        busiest = int(np.maximum(sent, elements_received(*what)).max())
        machine, beta = self.machine, 1 / self.machine.link_bytes_per_s
        n = busiest * self.element_bytes
        time_s = seconds(step.kind, most_peers(*what), n, machine.latency_s, beta, machine.add_s_per_byte)
        return StepCost(most_sent, most_sent * self.element_bytes, 0, round(time_s * PICOSECONDS))

    def convolution(self, operands: tuple[Layout, Layout, Layout]) -> StepCost:
        """A local convolution by the roofline of the slowest rank; `operands` are its two inputs and its output."""
        if (cost := self._convolutions.get(operands)) is None:
            flops = int(convolution_flops(self.space, operands).max())
            moved = int(convolution_elements(self.space, operands).max()) * self.element_bytes
            cost = self._convolutions[operands] = self._local(flops, moved)
        return cost

    def add_bias(self, y: Layout) -> StepCost:
        """Adding the bias to a stored y."""
        elements = int(self.space.elements(y).max())
        return self._local(elements, 2 * elements * self.element_bytes)

    def sum_bias(self, y: Layout) -> StepCost:
        """Summing a stored dy over all but its filters."""
        elements = int(self.space.elements(y).max())
        return self._local(elements, elements * self.element_bytes)

    def _local(self, flops: int, moved_bytes: int) -> StepCost:
        machine = self.machine
        busy_s = max(flops / machine.flops_per_s(self.dtype), moved_bytes / machine.memory_bytes_per_s)
        return StepCost(0, 0, flops, round((busy_s + machine.launch_s) * PICOSECONDS))
