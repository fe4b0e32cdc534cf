"""The cost of a layer under given storage and roles, as a sum of terms of one tensor each.

Given the roles of the three phases, x, w and y contribute independently: a phase reads a tensor in the layout
its roles want, or makes it in the layout its roles give, and what that takes depends on how this tensor is
stored and on nothing else. The phases couple only where two of them want the same conversion:

    forward          x -> wanted   w -> wanted   made -> y
    backward_data    made -> dx    w -> wanted   dy -> wanted
    backward_filter  x -> wanted   made -> dw    dy -> wanted      x shared with forward (held gathered),
                                                                  dy with backward_data

What `share` merges is the common beginning of two chains of conversions of one value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.cost.model import Chain, Model, StepCost
from convgen.operations.layer import convolution, wanted
from convgen.program.build import bias_layout

Objective = Literal["seconds", "bytes"]
Cost = tuple[int, int]  # (picoseconds, bytes), or (bytes, picoseconds) where bytes are the objective
ZERO: Cost = (0, 0)


class Terms:
    """Costs of a layer's conversions and convolutions, ordered by the objective. Answers are cached."""

    def __init__(self, model: Model, objective: Objective, *, hold_gathered: bool, bias: bool) -> None:
        self.model, self.space = model, model.space
        self.objective: Objective = objective
        self.hold_gathered, self.bias = hold_gathered, bias
        self._tensors = {phase: convolution(self.space.conv, phase).tensors for phase in PHASES}
        self._wanted: dict[tuple[str, Roles], dict[str, Layout]] = {}
        self._same: dict[Layout, Layout] = {}  # equal layouts as one object, which dictionaries find fastest
        self._local: dict[tuple[str, Roles], Cost] = {}
        self._chains: dict[tuple[Layout, Layout], tuple[Cost, Chain]] = {}
        self._bias: dict[Layout, Cost] = {}

    def wanted(self, phase: str, roles: Roles) -> dict[str, Layout]:
        """For each tensor, the layout that a phase reads or makes it in."""
        key = (phase, roles)
        if (found := self._wanted.get(key)) is None:
            layouts = (self._same.setdefault(layout, layout) for layout in wanted(self.space, phase, roles))
            found = self._wanted[key] = dict(zip(self._tensors[phase], layouts, strict=True))
        return found

    def cost(self, step: StepCost) -> Cost:
        if self.objective == "seconds":
            return step.time_ps, step.sent_bytes
        return step.sent_bytes, step.time_ps

    def local(self, phase: str, roles: Roles) -> Cost:
        """The local convolution of a phase."""
        key = (phase, roles)
        if (found := self._local.get(key)) is None:
            layouts = self.wanted(phase, roles)
            first, second, out = self._tensors[phase]
            found = self.cost(self.model.convolution((layouts[first], layouts[second], layouts[out])))
            self._local[key] = found
        return found

    def chain(self, src: Layout, dst: Layout) -> tuple[Cost, Chain]:
        """What turning one layout into another costs, and its steps."""
        key = (src, dst)
        if (found := self._chains.get(key)) is None:
            chain = self.model.chain(src, dst)
            found = self._chains[key] = total(self.cost(cost) for _, cost in chain), chain
        return found

    def saved(self, one: Chain, other: Chain) -> Cost:
        """What sharing saves where two phases convert the same value: the cost of the common beginning."""
        saved = ZERO
        for (step, cost), (same, _) in zip(one, other, strict=False):
            if step is not same and step != same:
                break
            saved = add(saved, self.cost(cost))
        return saved

    def conversion(self, phase: str, tensor: str, stored: Layout, roles: Roles) -> tuple[Cost, Chain]:
        """What a phase needs to read a tensor from how it is stored, or to store what it made."""
        here = self.wanted(phase, roles)[tensor]
        return self.chain(here, stored) if self._tensors[phase][2] == tensor else self.chain(stored, here)

    def term(self, tensor: str, stored: Layout, forward: Roles, data: Roles, filter_: Roles) -> Cost:
        """All conversions of one tensor and its gradient, shared; the bias and its gradient go with y."""
        one, first = self.conversion("forward", tensor, stored, forward)
        two, second = self.conversion("backward_data", tensor, stored, data)
        three, third = self.conversion("backward_filter", tensor, stored, filter_)
        saved = ZERO
        if tensor == "x" and self.hold_gathered:
            saved = self.saved(first, third)
        elif tensor == "y":
            saved = self.saved(second, third)
        cost = one[0] + two[0] + three[0] - saved[0], one[1] + two[1] + three[1] - saved[1]
        if tensor == "y" and self.bias:
            cost = total((cost, self.bias_addition(forward, stored), self.bias_gradient(stored)))
        return cost

    def takes_bias(self, forward: Roles, y: Layout) -> bool:
        """Whether the convolution makes y as it is stored, and adds the bias itself; a transposed one never does."""
        return self.wanted("forward", forward)["y"] == y and not self.space.conv.transposed

    def bias_addition(self, forward: Roles, y: Layout) -> Cost:
        """Adding the bias; nothing where the convolution takes it."""
        return ZERO if not self.bias or self.takes_bias(forward, y) else self.cost(self.model.add_bias(y))

    def bias_gradient(self, y: Layout) -> Cost:
        """Summing the stored dy over all but the filters."""
        if not self.bias:
            return ZERO
        if (found := self._bias.get(y)) is None:
            found = self._bias[y] = add(self.cost(self.model.sum_bias(y)), self.bias_reduction(y)[0])
        return found

    def bias_reduction(self, y: Layout) -> tuple[Cost, Chain]:
        """What reducing the gradient of the bias costs, and its steps."""
        bias = bias_layout({"y": y})
        summed = self.space.grid.ordered(a for d, axes in enumerate(y.axes) if d != 1 for a in axes)
        return self.chain(Layout("bias", bias.axes, partial=summed), bias)

    def total(self, stored: Mapping[str, Layout], roles: Mapping[str, Roles]) -> Cost:
        """The whole layer: what `schedule_cost` gives for the schedule lowered from the same and shared."""
        three = roles["forward"], roles["backward_data"], roles["backward_filter"]
        return total(
            (
                *(self.term(tensor, layout, *three) for tensor, layout in stored.items()),
                *(self.local(phase, r) for phase, r in roles.items()),
            )
        )


def add(a: Cost, b: Cost) -> Cost:
    return a[0] + b[0], a[1] + b[1]


def total(costs: Iterable[Cost]) -> Cost:
    first = second = 0
    for a, b in costs:
        first, second = first + a, second + b
    return first, second
