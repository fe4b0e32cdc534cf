"""Modelled cost of single steps of one layer on one machine; schedules, plans and explanations add them up.

A step takes as long as its slowest rank. A collective crosses the links that its group lies on (links.py). Times are
whole picoseconds, so sums don't depend on their order, and equal costs compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.algebra.involved import converted
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.space import Space
from convgen.cost.collectives import Collectives
from convgen.cost.local import convolution_elements, convolution_flops, layers_flops_per_s
from convgen.cost.machine import Machine, Operands
from convgen.cost.moving import PICOSECONDS, Moves
from convgen.spec.layer import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step, as its busiest rank has it.

    Attributes:
        elements: the most that a rank sends.
        sent_bytes: the same in bytes.
        flops: the most that a rank computes.
        time_ps: modelled time in picoseconds.
        measured: whether the time was measured.
    """

    elements: int = 0
    sent_bytes: int = 0
    flops: int = 0
    time_ps: int = 0
    measured: bool = False

    @property
    def seconds(self) -> float:
        return self.time_ps / PICOSECONDS

    def __add__(self, other: StepCost) -> StepCost:
        """The cost of both, one after the other; a sum is not measured."""
        return StepCost(
            self.elements + other.elements,
            self.sent_bytes + other.sent_bytes,
            self.flops + other.flops,
            self.time_ps + other.time_ps,
        )


Chain = tuple[tuple[Conversion, StepCost], ...]
FREE = StepCost()


class Model:
    """Costs of the steps of a convolution on a grid of a machine's ranks, in one dtype. Answers are cached."""

    def __init__(
        self,
        space: Space,
        machine: Machine,
        dtype: str,
        *,
        collectives: Collectives | None = None,
    ) -> None:
        """
        Args:
            collectives: the algorithms, instead of the machine's.
        """
        self.space, self.machine, self.dtype = space, machine, dtype
        self.element_bytes = DTYPE_BYTES[dtype]
        self.moves = Moves(space.grid, machine, self.element_bytes, collectives)
        self._chains: dict[tuple[Layout, Layout], Chain] = {}
        self._conversions: dict[tuple[Layout, Layout], StepCost] = {}
        self._convolutions: dict[tuple[Layout, Layout, Layout], StepCost] = {}

    def chain(self, src: Layout, dst: Layout) -> Chain:
        """The conversions from one layout to another with their costs."""
        key = (src, dst)
        if (chain := self._chains.get(key)) is None:
            steps = converted(self.space, src, dst)
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
        sent, ps = self.moves.moved(self.space, step)
        return StepCost(sent, sent * self.element_bytes, 0, ps)

    def convolution(self, operands: Operands) -> StepCost:
        """The cost of a local convolution: measured, or by the roofline of the slowest rank."""
        if (cost := self._convolutions.get(operands)) is None:
            flops = int(convolution_flops(self.space, operands).max())
            known = self.machine.timed(self.space, operands) if self.machine.timed is not None else None
            if known is not None:
                cost = StepCost(0, 0, flops, round(known * PICOSECONDS), measured=True)
            else:
                moved = int(convolution_elements(self.space, operands).max()) * self.element_bytes
                rate = layers_flops_per_s(self.machine, self.dtype, self.space, operands, flops)
                cost = self._local(flops, moved, rate)
            self._convolutions[operands] = cost
        return cost

    def add_bias(self, y: Layout) -> StepCost:
        """The cost of adding the bias to a stored y."""
        elements = int(self.space.elements(y).max())
        return self._local(elements, 2 * elements * self.element_bytes)

    def sum_bias(self, y: Layout, bias: Layout) -> StepCost:
        """The cost of summing a stored dy over all dimensions but its filters, for the bias's gradient."""
        read = self.space.elements(y)
        touched = int((read + self.space.elements(bias)).max())
        return self._local(int(read.max()), touched * self.element_bytes)

    def _local(self, flops: int, moved_bytes: int, flops_per_s: float | None = None) -> StepCost:
        machine = self.machine
        rate = flops_per_s or machine.flops_per_s(self.dtype)
        busy_s = max(flops / rate, moved_bytes / machine.memory_bytes_per_s)
        return StepCost(0, 0, flops, round((busy_s + machine.launch_s) * PICOSECONDS))
