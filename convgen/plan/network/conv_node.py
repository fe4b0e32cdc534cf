"""Convolutions and linear layers in the planner's graph: options, tables of their costs, and the steps behind them.

An option is what a layer chooses by itself: a role for each grid axis, the same in all phases; which rows
backward-filter splits; how w is stored; and whether x is held as gathered. Given the option, x and y contribute each
on its own by how it is stored (terms.py), so a layer's cost is a table over (x's split, option), one over (y's split,
option), and one over options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles, nest, settle_groups
from convgen.cost.training_memory import parameter_bytes
from convgen.errors import InputError
from convgen.operations.layer import convolution
from convgen.plan.network.estimate import estimates
from convgen.plan.network.node_step import NodeStep, conversions
from convgen.plan.network.reduced import ReducedSpace, reduced_model
from convgen.plan.network.setting import Setting
from convgen.plan.network.splits import Split, natural
from convgen.plan.terms import Terms
from convgen.program.build import bias_layout
from convgen.spec.layer import DTYPE_BYTES

Table = NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """What a layer chooses: roles of each phase, how w is stored, whether x is held as gathered.

    `letters` are the roles axis by axis, "" for none; after refinement phases may differ from them.
    """

    letters: tuple[tuple[str, str], ...]
    roles: tuple[Roles, Roles, Roles]
    w: Layout
    hold_gathered: bool = True

    def roles_text(self) -> str:
        """The roles as printed: those of forward, and of backward where they differ."""
        forward, data, filter_ = self.roles
        text = str(forward)
        if data.nests != forward.nests:
            text += f"; dx {data}"
        if filter_.nests != forward.nests:
            text += f"; dw {replace(filter_, rows='output')}"
        return text + ("; dw by input rows" if filter_.rows == "input" else "")


@dataclass(frozen=True, eq=False)
class ConvTables:
    """Picoseconds and bytes a rank: [x's split, option], [y's split, option], [option]."""

    x: Table
    y: Table
    own: Table
    x_memory: Table
    own_memory: Table
    y_memory: Table


def candidates(conv: Conv, grid: Grid, setting: Setting, dtype: str, most: int) -> tuple[dict[str, str], ...]:
    """The role assignments with the best estimates, each as axis -> letter."""
    sizes = tuple(size for _, size in grid.axes)
    found = estimates(conv, sizes, setting, dtype).letters[:most]
    return tuple(dict(zip(grid.names, letters, strict=True)) for letters in found)


class ConvNode:
    """One convolution on one grid: all layers alike share it."""

    def __init__(
        self, conv: Conv, grid: Grid, dtype: str, setting: Setting, assigned: Sequence[dict[str, str]], *, dx: bool
    ) -> None:
        """
        Args:
            assigned: role assignments to make options of.
            dx: whether anything needs the gradient of x; nothing does for the network's input.
        """
        self.conv, self.grid, self.dtype, self.setting, self.dx = conv, grid, dtype, setting, dx
        self.model = reduced_model(
            conv, grid, setting.machine, dtype, virtual_padding=setting.target.pads_virtually, measured=setting.measured
        )
        self.space = self.model.reduced
        self._terms = {
            gathered: Terms(self.model, "seconds", hold_gathered=gathered, bias=conv.bias) for gathered in (True, False)
        }
        nothing = dict.fromkeys(grid.names, "")
        self.options = tuple(dict.fromkeys(self._options(assigned))) or tuple(self._options((nothing,)))

    def _options(self, assigned: Sequence[dict[str, str]]) -> Iterator[Option]:
        for letters in assigned:
            pairs = [(a, letters[a] or "none") for a in self.grid.names]
            try:
                forward, data, filter_ = (settle_groups(self.conv, self.grid, p, nest(pairs)) for p in PHASES)
            except InputError:
                continue
            rows = [filter_]
            if any(forward.axes(letter) for letter in self.conv.letters):
                rows.append(Roles(filter_.nests, "input"))
            for w in self._stored_w(forward):
                for one in rows:
                    yield from (
                        Option(tuple(letters.items()), (forward, data, one), w, held)
                        for held in ((True, False) if self.setting.regather else (True,))
                    )

    def _stored_w(self, roles: Roles) -> Iterator[Layout]:
        """As the roles want it; and split further over the axes that would hold copies."""
        dims = self.conv.dims("w")
        outer, inner = roles.axes("G") + roles.axes(dims[0].name), roles.axes(dims[1].name)
        yield Layout("w", (outer, inner))
        spare = tuple(a for a in self.grid.names if a not in outer + inner and self.grid.sizes[a] > 1)
        extents = tuple(d.extent for d in dims)
        for split in ((outer + spare, inner), (outer, inner + spare)):
            if spare and all(
                prod(self.grid.sizes[a] for a in axes) <= n for axes, n in zip(split, extents, strict=True)
            ):
                yield Layout("w", split)
                return

    def layout(self, tensor: str, split: Split) -> Layout:
        """A stored activation as this convolution's; a linear layer's has one pixel."""
        rows = split[2:] if len(split) == len(self.conv.dims(tensor)) else ((),) * len(self.conv.spatial)
        return Layout(tensor, (*split[:2], *rows))

    def same_blocks(self, tensor: str, split: Split) -> bool:
        """Whether the groups' block rule splits the channels as the plain one does; else a split isn't offered."""
        d = self.conv.dims(tensor)[1]
        sizes = tuple(self.grid.sizes[a] for a in split[1])
        if d.groups == 1 or not sizes:
            return True
        whole = prod(sizes)
        return d.groups % whole == 0 or (whole % d.groups == 0 and d.extent % whole == 0)

    def term(self, tensor: str, stored: Layout, option: Option) -> int:
        """Picoseconds of all conversions of one tensor and its gradient, the bias's with y."""
        terms = self._terms[option.hold_gathered]
        forward, data, filter_ = option.roles
        hidden = 0
        if tensor == "y" and terms.bias and self.setting.hide_dw:
            hidden = terms.bias_reduction(stored)[0][0]
        if self.dx:
            return terms.term(tensor, stored, forward, data, filter_)[0] - hidden
        one, first = terms.conversion("forward", tensor, stored, forward)
        two, second = terms.conversion("backward_filter", tensor, stored, filter_)
        cost = one[0] + two[0]
        if tensor == "x" and terms.hold_gathered:
            cost -= terms.saved(first, second)[0]
        if tensor == "y" and terms.bias:
            cost += terms.bias_addition(forward, stored)[0] + terms.bias_gradient(stored)[0]
        return cost - hidden

    def own(self, option: Option) -> int:
        """Picoseconds of the local convolutions and of w's conversions."""
        terms = self._terms[option.hold_gathered]
        phases = zip(PHASES, option.roles, strict=True)
        local = sum(terms.local(p, roles)[0] for p, roles in phases if self.dx or p != "backward_data")
        hidden = terms.conversion("backward_filter", "w", option.w, option.roles[2])[0][0]
        return local + self.term("w", option.w, option) - (hidden if self.setting.hide_dw else 0)

    def held(self, x: Layout, option: Option) -> int:
        """Elements that forward holds for backward-filter besides x as it is stored."""
        if not option.hold_gathered:
            return 0
        terms = self._terms[True]
        _, first = terms.conversion("forward", "x", x, option.roles[0])
        _, second = terms.conversion("backward_filter", "x", x, option.roles[2])
        last = None
        for (step, _), (same, _) in zip(first, second, strict=False):
            if step != same:
                break
            last = step.dst if step.kind != "slice" or last is not None else None
        return self.largest_frame(last) if last is not None else 0

    def largest_frame(self, layout: Layout) -> int:
        """The most elements that a rank has of a layout, rows of windows included."""
        total = self.space.weight(layout.tensor)
        for d, (axes, window) in enumerate(zip(layout.axes, layout.windows, strict=True)):
            if window is None:
                total *= self.space.largest_block(layout.tensor, d, axes)
            else:
                total *= _frame_rows(self.conv, d, layout, axes, self.grid, self.space.virtual_padding)
        return total

    def weight_bytes(self, option: Option) -> int:
        """Weights, gradients and the optimizer's states of the largest block."""
        elements = self.space.largest_elements(option.w)
        return sum(parameter_bytes(elements, self.dtype, self.setting.optimizer_states))

    def bias_bytes(self, y: Layout) -> int:
        """The same of the bias, which is stored as y's filters are."""
        elements = self.space.largest_elements(bias_layout({"y": y})) if self.conv.bias else 0
        return sum(parameter_bytes(elements, self.dtype, self.setting.optimizer_states))

    def tables(self, x_splits: Sequence[Split], y_splits: Sequence[Split]) -> ConvTables:
        """Costs of every option with every split of x and of y."""
        size = DTYPE_BYTES[self.dtype]
        xs, ys = ([self.layout(t, s) for s in splits] for t, splits in (("x", x_splits), ("y", y_splits)))
        return ConvTables(
            _table([[self.term("x", x, o) for o in self.options] for x in xs]),
            _table([[self.term("y", y, o) for o in self.options] for y in ys]),
            _table([self.own(o) for o in self.options]),
            _table([[self.held(x, o) * size for o in self.options] for x in xs]),
            _table([self.weight_bytes(o) for o in self.options]),
            _table([[self.bias_bytes(y)] * len(self.options) for y in ys]),
        )

    def steps(self, x_split: Split, y_split: Split, option: Option) -> Iterator[NodeStep]:
        """Every step of the layer, in order; what phases share comes once, where it is done first."""
        terms = self._terms[option.hold_gathered]
        stored = {"x": self.layout("x", x_split), "w": option.w, "y": self.layout("y", y_split)}
        for phase, roles in zip(PHASES, option.roles, strict=True):
            if phase == "backward_data" and not self.dx:
                continue
            grad = phase != "forward"
            *inputs, output = convolution(self.conv, phase).tensors
            for tensor in inputs:
                _, chain = terms.conversion(phase, tensor, stored[tensor], roles)
                chain = chain[self._shared(phase, tensor, stored, option) :]
                yield from conversions(phase, ("d" if grad and tensor == "y" else "") + tensor, chain)
            layouts = terms.wanted(phase, roles)
            cost = self.model.convolution(tuple(layouts[t] for t in (*inputs, output)))  # type: ignore[arg-type]
            how = "measured" if cost.measured else "by the roofline"
            yield NodeStep(phase, convolution(self.conv, phase).operation.name, how, cost)
            _, chain = terms.conversion(phase, output, stored[output], roles)
            moved = conversions(phase, ("d" if grad else "") + output, chain)
            yield from self._reductions(moved) if output == "w" else moved
            if phase == "forward" and self.conv.bias and not terms.takes_bias(roles, stored["y"]):
                yield NodeStep(phase, "add_bias", "y", self.model.add_bias(stored["y"]))
        if self.conv.bias:
            yield NodeStep("backward_filter", "sum_bias", "dy", self.model.sum_bias(stored["y"]))
            yield from self._reductions(conversions("backward_filter", "db", terms.bias_reduction(stored["y"])[1]))

    def _reductions(self, steps: Iterator[NodeStep]) -> Iterator[NodeStep]:
        """Reductions of gradients of parameters, which take no time where they are taken as hidden."""
        for step in steps:
            if self.setting.hide_dw:
                step = replace(step, what=f"{step.what}, hidden", cost=replace(step.cost, time_ps=0))
            yield step

    def _shared(self, phase: str, tensor: str, stored: dict[str, Layout], option: Option) -> int:
        """How many conversions of an operand another phase has done already."""
        alone = {"x": not option.hold_gathered, "y": not self.dx}
        if phase != "backward_filter" or alone[tensor]:
            return 0
        terms = self._terms[option.hold_gathered]
        before = 0 if tensor == "x" else 1
        _, one = terms.conversion(PHASES[before], tensor, stored[tensor], option.roles[before])
        _, two = terms.conversion(phase, tensor, stored[tensor], option.roles[2])
        count = 0
        for (a, _), (b, _) in zip(one, two, strict=False):
            if a != b:
                break
            count += 1
        return count


def wishes(letters: dict[str, str], tensor: str, dims: tuple[str, ...]) -> Iterator[Split]:
    """How a role assignment would have x or y stored: split over all it can, or as copies over axes it lacks."""
    for copies in (False, True):
        yield natural(letters, dims, tensor, copies=copies)


def _frame_rows(conv: Conv, dim: int, layout: Layout, axes: Axes, grid: Grid, virtual: bool) -> int:
    """The most rows of a window that a rank has."""
    small = Grid(tuple((a, grid.sizes[a]) for a in axes) or (("a", 1),))
    one = Conv(1, 1, 1, (conv.spatial[dim - 2],), transposed=conv.transposed)
    space = ReducedSpace(one, small, virtual_padding=virtual)
    box = space.frame(Layout(layout.tensor, ((), (), axes), (None, None, layout.windows[dim])))
    return int((box[:, 2, 1] - box[:, 2, 0]).max())


def _table(rows: list[list[int]] | list[int]) -> Table:
    return np.array(rows, dtype=np.int64)
