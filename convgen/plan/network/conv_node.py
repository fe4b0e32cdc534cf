"""Convolutions and linear layers in the planner's graph: choices, tables of their costs, and the steps behind them.

What a layer chooses by itself is an option: roles of each phase, how w is stored, and whether x is held as gathered.
Given the roles, x, w and y contribute each on its own by how it is stored (terms.py), and phases couple only where
backward-filter reads what forward or backward-data has read. So for each pair of splits of x and y every option is
priced together (conv_tables.py), and of these the layer's variable keeps those that no other betters in time and
memory both: all that a plan can want, with a budget or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, combinations
from math import prod

import numpy as np

from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.involved import most_elements
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.roles import Roles, nest, settle_groups
from convgen.cost.model import Chain
from convgen.cost.training_memory import parameter_bytes
from convgen.errors import InputError
from convgen.operations.layer import convolution
from convgen.plan.network.conv_tables import NEVER, Best, Picked, Priced, Shared, Sums, Table, best, picked
from convgen.plan.network.estimate import estimates
from convgen.plan.network.node_step import NodeStep, conversions
from convgen.plan.network.phase_roles import Letters, Places, Triple, triple_of, triples
from convgen.plan.network.reduced import ReducedSpace, reduced_model
from convgen.plan.network.setting import Setting
from convgen.plan.network.splits import Split, natural
from convgen.plan.terms import Terms
from convgen.program.build import bias_layout
from convgen.spec.layer import DTYPE_BYTES


@dataclass(frozen=True)
class Option:
    """What a layer chooses: roles of each phase, how w is stored, whether x is held as gathered."""

    roles: tuple[Roles, Roles, Roles]
    w: Layout
    hold_gathered: bool = True

    @property
    def letters(self) -> frozenset[str]:
        """The roles that some axis has in some phase."""
        return frozenset(role for roles in self.roles for role, _ in roles.nests)

    def roles_text(self) -> str:
        """The roles as printed: those of forward, and of backward where they differ."""
        forward, data, filter_ = self.roles
        text = str(forward)
        if data.nests != forward.nests:
            text += f"; dx {data}"
        if filter_.nests != forward.nests:
            text += f"; dw {replace(filter_, rows='output')}"
        return text + ("; dw by input rows" if filter_.rows == "input" else "")


@dataclass(frozen=True)
class Choices:
    """What the options of a layer are made of: every combination of one of each is an option."""

    forward: tuple[Roles, ...]
    data: tuple[Roles, ...]
    filter: tuple[Roles, ...]
    w: tuple[Layout, ...]


def candidates(conv: Conv, grid: Grid, setting: Setting, dtype: str, most: int) -> tuple[Letters, ...]:
    """The role assignments with the best estimates, if all phases had the same."""
    return estimates(conv, tuple(size for _, size in grid.axes), setting, dtype).letters[:most]


def same_blocks(conv: Conv, grid: Grid, tensor: str, split: Split) -> bool:
    """Whether the groups' block rule splits the channels as the plain one does; else a split isn't offered."""
    d = conv.dims(tensor)[1]
    sizes = tuple(grid.sizes[a] for a in split[1])
    if d.groups == 1 or not sizes:
        return True
    whole = prod(sizes)
    return d.groups % whole == 0 or (whole % d.groups == 0 and d.extent % whole == 0)


class ConvNode:
    """One convolution on one grid, between activations of given domains: all layers alike share it."""

    def __init__(
        self,
        conv: Conv,
        grid: Grid,
        dtype: str,
        setting: Setting,
        assigned: Sequence[Letters],
        x_splits: Sequence[Split],
        y_splits: Sequence[Split],
        *,
        dx: bool,
        most_more: int,
    ) -> None:
        """
        Args:
            assigned: role assignments that every phase may have.
            dx: whether anything needs the gradient of x; nothing does for the network's input.
            most_more: how many more each phase may have, and how many more ways there are to store w.
        """
        self.conv, self.grid, self.dtype, self.setting, self.dx = conv, grid, dtype, setting, dx
        self.model = reduced_model(
            conv, grid, setting.machine, dtype, virtual_padding=setting.target.pads_virtually, measured=setting.measured
        )
        self.space: ReducedSpace = self.model.reduced
        self.terms = Terms(self.model, "seconds", hold_gathered=True, bias=conv.bias)
        self.xs = tuple(self.layout("x", split) for split in x_splits)
        self.ys = tuple(self.layout("y", split) for split in y_splits)
        self.choices = self._choices(assigned, most_more)

    def _choices(self, assigned: Sequence[Letters], most_more: int) -> Choices:
        """The roles assigned, w stored as they have it or split over other axes too; and what suits single phases."""
        phases: tuple[dict[Roles, None], ...] = ({}, {}, {})
        ws: dict[Layout, None] = {}
        for letters in assigned:
            if (roles := self._settled(letters)) is not None:
                for found, phase in zip(phases, PHASES, strict=True):
                    found |= dict.fromkeys(self._rows(phase, roles))
                ws |= dict.fromkeys(self._stored_w(roles))
        if not phases[0]:  # none can be settled
            phases = tuple({Roles(()): None} for _ in PHASES)
            ws = dict.fromkeys(self._stored_w(Roles(())))
        self._assigned = tuple(map(tuple, phases))
        sizes = tuple(size for _, size in self.grid.axes)
        what = self.conv, sizes, self.setting, self.dtype
        limits = [len(found) + most_more for found in phases]
        most_w = len(ws) + most_more
        xs, ys = (tuple(self._places(layout) for layout in layouts) for layouts in (self.xs, self.ys))
        same = (triple_of(*what, letters, dx=self.dx) for letters in assigned)
        for triple in chain(triples(*what, xs, ys, dx=self.dx), same) if most_more else ():
            if len(ws) >= most_w and all(len(found) >= most for found, most in zip(phases, limits, strict=True)):
                break
            three = [self._settled(letters) for letters in (triple.forward, triple.data, triple.filter)]
            for found, phase, roles, most in zip(phases, PHASES, three, limits, strict=True):
                if roles is not None and len(found) < most:
                    found |= dict.fromkeys(self._rows(phase, roles))
            if three[0] is not None and len(ws) < most_w:
                ws |= dict.fromkeys((self._placed_w(triple, three[0]),))
        forward, data, filter_ = map(tuple, phases)
        return Choices(forward, data, filter_, tuple(ws))

    def _settled(self, letters: Letters) -> Roles | None:
        pairs = [(a, letter or "none") for a, letter in zip(self.grid.names, letters, strict=True)]
        try:
            return settle_groups(self.conv, self.grid, "forward", nest(pairs))
        except InputError:
            return None

    def _rows(self, phase: str, roles: Roles) -> tuple[Roles, ...]:
        """Backward-filter by output rows or by input rows, where a spatial dimension is split."""
        if phase != "backward_filter" or not any(roles.axes(letter) for letter in self.conv.letters):
            return (roles,)
        return roles, Roles(roles.nests, "input")

    def _places(self, layout: Layout) -> Places:
        return tuple(next((d for d, axes in enumerate(layout.axes) if a in axes), -1) for a in self.grid.names)

    def _stored_w(self, roles: Roles) -> Iterator[Layout]:
        """As the roles want it; and its outer dimension, or else its inner one, split further over other axes."""
        outer, inner = self._w_axes(roles)
        spare = tuple(a for a in self.grid.names if a not in outer + inner and self.grid.sizes[a] > 1)
        for count in range(len(spare) + 1):
            for some in combinations(spare, count):
                splits = (outer + some, inner), (outer, inner + some)
                yield from [Layout("w", split) for split in splits if not some or self._fits_w(split)][:1]

    def _placed_w(self, triple: Triple, roles: Roles) -> Layout:
        """w split over the axes that the triple says, those that the roles split outermost."""

        def axes(dim: int, by_role: Axes) -> Axes:
            own = tuple(a for a, d in zip(self.grid.names, triple.w, strict=True) if d == dim)
            return tuple(a for a in by_role if a in own) + tuple(a for a in own if a not in by_role)

        outer, inner = self._w_axes(roles)
        return Layout("w", (axes(0, outer), axes(1, inner)))

    def _w_axes(self, roles: Roles) -> tuple[Axes, Axes]:
        """The axes that split w's two dimensions by role."""
        outer, inner = (roles.axes(d.name) for d in self.conv.dims("w")[:2])
        return roles.axes("G") + outer, inner

    def _fits_w(self, split: tuple[Axes, Axes]) -> bool:
        extents = [d.extent for d in self.conv.dims("w")[:2]]
        return all(prod(self.grid.sizes[a] for a in axes) <= n for axes, n in zip(split, extents, strict=True))

    def layout(self, tensor: str, split: Split) -> Layout:
        """A stored activation as this convolution's; a linear layer's has one pixel."""
        rows = split[2:] if len(split) == len(self.conv.dims(tensor)) else ((),) * len(self.conv.spatial)
        return Layout(tensor, (*split[:2], *rows))

    @cached_property
    def priced(self) -> Priced:
        """Every choice with every split of x and of y.

        Raises:
            OverflowError: sums of picoseconds that 64 bits would not hold.
        """
        choices = self.choices
        found = Priced(
            self._sums("forward", choices.forward),
            self._sums("backward_data", choices.data) if self.dx else None,
            self._sums("backward_filter", choices.filter),
            self._shared("forward", "x", self.xs),
            self._shared("backward_data", "y", self.ys) if self.dx else None,
            _table([self.weight_bytes(w) for w in choices.w]),
            _table([self.bias_bytes(y) for y in self.ys]),
            self.setting.regather,
        )
        phases = (found.forward, found.data, found.filter)
        if sum(int(t[t < NEVER].max()) for p in phases if p is not None for t in (p.x, p.w, p.y)) >= NEVER:
            raise OverflowError
        return found

    def _sums(self, phase: str, roles: Sequence[Roles]) -> Sums:
        """A phase's conversions of each tensor; with y's, its local convolution and the bias."""
        terms, output = self.terms, convolution(self.conv, phase).tensors[2]

        def conversions_of(tensor: str, stored: Sequence[Layout]) -> Table:
            numbers, wants = self._wants(phase, tensor, roles)
            pairs = [[(want, s) if tensor == output else (s, want) for want in wants] for s in stored]
            offered = [[self.offers(phase, s, want) for want in wants] for s in stored]
            rows = [
                [terms.chain(*pair)[0][0] if offer else NEVER for pair, offer in zip(*row, strict=True)]
                for row in zip(pairs, offered, strict=True)
            ]
            return _table(rows)[:, numbers]

        y = conversions_of("y", self.ys) + _table([terms.local(phase, r)[0] for r in roles])
        if self.conv.bias and phase == "forward":
            y = y + _table([[terms.bias_addition(r, s)[0] for r in roles] for s in self.ys])
        if self.conv.bias and phase == "backward_filter":
            hidden = [terms.bias_reduction(s)[0][0] if self.setting.hide_dw else 0 for s in self.ys]
            y = y + (_table([terms.bias_gradient(s)[0] for s in self.ys]) - _table(hidden))[:, None]
        w = conversions_of("w", self.choices.w)
        hide = phase == "backward_filter" and self.setting.hide_dw
        return Sums(conversions_of("x", self.xs), np.zeros_like(w) if hide else w, y)

    def offers(self, phase: str, stored: Layout, want: Layout) -> bool:
        """Whether a phase may read or make a tensor in one layout that is stored in another.

        All phases may what the roles assigned to all want of x and y. Else each dimension is split further or less far
        by the inner axes, and no axis goes from one dimension to another: other conversions move nearly everything.
        """
        return want in self._assigned_wants[phase, want.tensor] or _nested(stored.axes, want.axes)

    @cached_property
    def _assigned_wants(self) -> dict[tuple[str, str], frozenset[Layout]]:
        found = {(phase, "w"): frozenset[Layout]() for phase in PHASES}
        for phase, roles in zip(PHASES, self._assigned, strict=True):
            for t in "xy":
                found[phase, t] = frozenset(self.terms.wanted(phase, r)[t] for r in roles)
        return found

    def _wants(self, phase: str, tensor: str, roles: Sequence[Roles]) -> tuple[Table, tuple[Layout, ...]]:
        """The distinct layouts that roles want of a tensor, and for each of the roles the number of its own."""
        number: dict[Layout, int] = {}
        numbers = [number.setdefault(self.terms.wanted(phase, r)[tensor], len(number)) for r in roles]
        return _table(numbers), tuple(number)

    def _shared(self, phase: str, tensor: str, stored: Sequence[Layout]) -> Shared:
        """What backward-filter shares of a tensor's conversions with another phase."""
        choices = self.choices
        others, other_wants = self._wants(phase, tensor, choices.forward if phase == "forward" else choices.data)
        wants, own_wants = self._wants("backward_filter", tensor, choices.filter)
        several = (phase, other_wants), ("backward_filter", own_wants)
        chains = [
            [
                [self.terms.chain(s, want)[1] if self.offers(p, s, want) else () for want in wants]
                for p, wants in several
            ]
            for s in stored
        ]
        longest = max((len(c) for row in chains for both in row for c in both), default=0)
        count = np.zeros((len(stored), len(other_wants), len(own_wants)), dtype=np.int64)
        saved = np.zeros((len(stored), len(own_wants), longest + 1), dtype=np.int64)
        held = np.zeros_like(saved)
        for s, (other, own) in enumerate(chains):
            number: dict[tuple[int, Conversion], int] = {}
            first, second = (np.array([_path(c, number, longest) for c in both]) for both in (other, own))
            alike = (first[:, None] == second) & (first[:, None] > 0)
            count[s] = np.logical_and.accumulate(alike, axis=-1).sum(axis=-1)
            for want, steps in enumerate(own):
                for n in range(1, len(steps) + 1):
                    saved[s, want, n] = saved[s, want, n - 1] + steps[n - 1][1].time_ps
                    if tensor == "x":
                        held[s, want, n] = self._held(steps[:n]) * DTYPE_BYTES[self.dtype]
        return Shared(wants, count[:, others], saved, held)

    def _held(self, steps: Chain) -> int:
        """Elements of what conversions lead to, nothing where they only cut."""
        first = next((n for n, (step, _) in enumerate(steps) if step.kind != "slice"), None)
        return self.largest_frame(steps[-1][0].dst) if first is not None else 0

    @cached_property
    def best(self) -> Best:
        """The options worth having, by numbers of splits of x and y."""
        return best(self.priced)

    def option(self, x: int, y: int, number: int) -> Option:
        """One of `best`'s; of equals the one whose phases' roles differ least."""
        return self._option(self.priced, self.choices.forward, x, y, self.best, number)

    def _option(self, priced: Priced, forward: Sequence[Roles], x: int, y: int, found: Best, number: int = 0) -> Option:
        choices, cost, memory = self.choices, int(found.cost[x, y, number]), int(found.memory[x, y, number])

        def roles(one: Picked) -> tuple[Roles, Roles, Roles]:
            first, last = forward[one.forward], choices.filter[one.filter]
            return first, choices.data[one.data] if self.dx else first, last

        def differ(one: Picked) -> tuple[bool, int]:
            return one.apart, len({r.nests for r in roles(one)})

        one = min(picked(priced, x, y, cost, memory), key=differ)
        return Option(roles(one), choices.w[one.w], not one.apart)

    def other_roles(self, option: Option) -> tuple[Table, Callable[[int, int], Option]] | None:
        """Least picoseconds by splits of x and y with other roles in forward than an option's, and the option that has
        them; None where there are no other roles."""
        forward = self.choices.forward
        number = forward.index(option.roles[0])
        if (priced := self.priced.without_forward(number)) is None:
            return None
        found, rest = best(priced), (*forward[:number], *forward[number + 1 :])
        return found.cost[..., 0], lambda x, y: self._option(priced, rest, x, y, found)

    def held(self, x: Layout, option: Option) -> int:
        """Elements that forward holds for backward-filter besides x as it is stored."""
        count = self._shared_steps("backward_filter", "x", {"x": x}, option)
        _, steps = self.terms.conversion("backward_filter", "x", x, option.roles[2])
        return self._held(steps[:count])

    def largest_frame(self, layout: Layout) -> int:
        """The most elements that a rank has of a layout, rows of windows included."""
        total = self.space.weight(layout.tensor)
        for d, (axes, window) in enumerate(zip(layout.axes, layout.windows, strict=True)):
            if window is None:
                total *= self.space.largest_block(layout.tensor, d, axes)
            else:
                total *= _frame_rows(self.conv, d, layout, axes, self.grid, self.space.virtual_padding)
        return total

    def weight_bytes(self, w: Layout) -> int:
        """Weights, gradients and the optimizer's states of the largest block."""
        elements = most_elements(self.space, w)
        return sum(parameter_bytes(elements, self.dtype, self.setting.optimizer_states))

    def bias_bytes(self, y: Layout) -> int:
        """The same of the bias, which is stored as y's filters are."""
        elements = most_elements(self.space, bias_layout({"y": y})) if self.conv.bias else 0
        return sum(parameter_bytes(elements, self.dtype, self.setting.optimizer_states))

    def steps(self, x_split: Split, y_split: Split, option: Option) -> Iterator[NodeStep]:
        """Every step of the layer, in order; what phases share comes once, where it is done first."""
        terms = self.terms
        stored = {"x": self.layout("x", x_split), "w": option.w, "y": self.layout("y", y_split)}
        for phase, roles in zip(PHASES, option.roles, strict=True):
            if phase == "backward_data" and not self.dx:
                continue
            grad = phase != "forward"
            *inputs, output = convolution(self.conv, phase).tensors
            for tensor in inputs:
                _, found = terms.conversion(phase, tensor, stored[tensor], roles)
                found = found[self._shared_steps(phase, tensor, stored, option) :]
                yield from conversions(phase, ("d" if grad and tensor == "y" else "") + tensor, found)
            layouts = terms.wanted(phase, roles)
            cost = self.model.convolution(tuple(layouts[t] for t in (*inputs, output)))  # type: ignore[arg-type]
            how = "measured" if cost.measured else "by the roofline"
            yield NodeStep(phase, convolution(self.conv, phase).operation.name, how, cost)
            _, found = terms.conversion(phase, output, stored[output], roles)
            moved = conversions(phase, ("d" if grad else "") + output, found)
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

    def _shared_steps(self, phase: str, tensor: str, stored: Mapping[str, Layout], option: Option) -> int:
        """How many conversions of an operand another phase has done already."""
        alone = {"x": not option.hold_gathered, "y": not self.dx}
        if phase != "backward_filter" or alone[tensor]:
            return 0
        before = 0 if tensor == "x" else 1
        _, one = self.terms.conversion(PHASES[before], tensor, stored[tensor], option.roles[before])
        _, two = self.terms.conversion(phase, tensor, stored[tensor], option.roles[2])
        count = 0
        for (a, _), (b, _) in zip(one, two, strict=False):
            if a != b:
                break
            count += 1
        return count


def wishes(letters: Mapping[str, str], tensor: str, dims: tuple[str, ...]) -> Iterator[Split]:
    """How a role assignment would have x or y stored: split over all it can, or as copies over axes it lacks."""
    for copies in (False, True):
        yield natural(letters, dims, tensor, copies=copies)


def _path(steps: Chain, number: dict[tuple[int, Conversion], int], length: int) -> list[int]:
    """A number above 0 for each beginning of a chain of conversions, the same for the same; then zeros."""
    found = [0] * length
    place = 0
    for n, (step, _) in enumerate(steps):
        found[n] = place = number.setdefault((place, step), len(number) + 1)
    return found


def _frame_rows(conv: Conv, dim: int, layout: Layout, axes: Axes, grid: Grid, virtual: bool) -> int:
    """The most rows of a window that a rank has."""
    small = Grid(tuple((a, grid.sizes[a]) for a in axes) or (("a", 1),))
    one = Conv(1, 1, 1, (conv.spatial[dim - 2],), transposed=conv.transposed)
    space = ReducedSpace(one, small, virtual_padding=virtual)
    box = space.frame(Layout(layout.tensor, ((), (), axes), (None, None, layout.windows[dim])))
    return int((box[:, 2, 1] - box[:, 2, 0]).max())


@lru_cache(maxsize=1 << 16)
def _nested(one: tuple[Axes, ...], other: tuple[Axes, ...]) -> bool:
    """Whether on every dimension the axes of one begin with those of the other, and no axis is on two."""
    if any(a[: len(b)] != b[: len(a)] for a, b in zip(one, other, strict=True)):
        return False
    return not any(a in axes for d, axes in enumerate(one) for e, own in enumerate(other) if d != e for a in own)


def _table(rows: object) -> Table:
    return np.array(rows, dtype=np.int64)
