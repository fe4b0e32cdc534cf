"""The price of a layer's rows, by which a search minimises what `schedule_cost` counts.

Convolutions are priced as in a layer's module, and blocks of channels are whole groups. The bias is priced with y: the
convolution adds it where it makes y as y is stored. `shared` has what two rows save by sharing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import NAME, converted
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, Kind
from convgen.algebra.signature import Reduction, Signature
from convgen.algebra.space import Space
from convgen.algebra.tensors import Tensor
from convgen.algebra.wants import layouts
from convgen.cost.busiest import Counts
from convgen.cost.machine import Machine
from convgen.cost.model import Model, StepCost
from convgen.cost.moving import Moves, Priced
from convgen.cost.rows import Price, held
from convgen.operations.row import Operation
from convgen.program.build import bias_layout
from convgen.program.rows import Stored

Objective = Literal["seconds", "bytes"]
SENT, TOOK = 1 << 16, 1 << 22  # the price of a byte; picoseconds for 1, which decide among equal bytes


def price_of(step: StepCost, objective: Objective) -> int:
    """Picoseconds; or bytes, where picoseconds decide among equal bytes."""
    return step.time_ps if objective == "seconds" else step.sent_bytes * SENT + step.time_ps // TOOK


def sent_bytes(price: int) -> int:
    """The bytes of a price in bytes."""
    return price // SENT


class _Sent(Moves):
    """Conversions, priced by the bytes that a rank sends."""

    def _measured(self, kind: Kind, over: Axes, sent: int, modelled_s: float) -> Priced:
        found = super()._measured(kind, over, sent, modelled_s)
        return Priced(sent, sent * self.element_bytes * SENT + found.ps // TOOK)


class LayerPrice(Price):
    """What the steps of a layer cost, in picoseconds, or in bytes that a rank sends.

    Args:
        space: the layer's index space, on a grid without axes of one rank.
    """

    def __init__(self, space: Space, machine: Machine, dtype: str, objective: Objective = "seconds") -> None:
        super().__init__(space.grid, machine, dtype)
        self.space, self.model = space, Model(space, machine, dtype)
        self.objective: Objective = objective
        self.moves = self.model.moves if objective == "seconds" else _Sent(space.grid, machine, self.element_bytes)
        self.sets = {name: self._alone(tensor) for name, tensor in space.conv.tensors.items()}
        self._begun: dict[tuple[IndexSets, Stored, Layout], tuple[tuple[Conversion, int], ...]] = {}

    def _alone(self, tensor: Tensor) -> IndexSets:
        rows = {(NAME, d): rows for (name, d), rows in self.space.conv.rows.items() if name == tensor.name}
        one = {NAME: replace(tensor, name=NAME)}
        return IndexSets(self.space.grid, one, rows, virtual_padding=self.space.virtual_padding)

    def of(self, kind: str) -> Price:
        return self

    def tensors(self, signature: Signature) -> dict[str, IndexSets]:
        return self.sets

    def _find_local(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None,
        derived: Collection[int],
    ) -> int:
        first, second, made = layouts(self.space, operation.signatures[way], roles)
        return held(price_of(self.model.convolution((first, second, made)), self.objective))

    def reduced(
        self,
        sets: IndexSets,
        made: Layout,
        stored: tuple[Stored, ...],
        reduction: Reduction,
        *,
        parameter: bool = False,
    ) -> Counts:
        found = super().reduced(sets, made, stored, reduction, parameter=parameter)
        if sets is self.sets["y"] and self.space.conv.bias:
            found = found + np.array([self._bias(made, s) for s in stored], dtype=np.int64)
        return found

    def _bias(self, made: Layout, stored: Stored) -> int:
        """The price of adding the bias to y, of summing its gradient from the stored dy, and of reducing that."""
        y, model = Layout("y", stored), self.model
        bias = bias_layout({"y": y})
        summed = self.grid.ordered(a for d, axes in enumerate(stored) if d != 1 for a in axes)
        found = Layout("bias", bias.axes, partial=summed)
        steps = [model.sum_bias(y, found), *(step for _, step in model.chain(found, bias))]
        if made != Layout(NAME, stored) or self.space.conv.transposed:
            steps.append(model.add_bias(y))
        return sum(price_of(step, self.objective) for step in steps)

    def shared(self, sets: IndexSets, stored: tuple[Stored, ...], one: Layout, other: Layout) -> Counts:
        """By storage, what two rows that read a value save by doing once the conversions with which both begin."""

        def saved(stored: Stored) -> int:
            total = 0
            for (a, price), (b, _) in zip(
                self._chain(sets, stored, one), self._chain(sets, stored, other), strict=False
            ):
                if a != b:
                    break
                total += price
            return total

        return np.array([saved(s) for s in stored], dtype=np.int64)

    def _chain(self, sets: IndexSets, stored: Stored, wanted: Layout) -> tuple[tuple[Conversion, int], ...]:
        key = sets, stored, wanted
        if (found := self._begun.get(key)) is None:
            chain = converted(sets, Layout(NAME, stored), wanted)
            found = self._begun[key] = tuple((c, self.moves.conversion(sets, c)) for c in chain)
        return found
