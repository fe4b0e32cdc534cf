# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Rows of a network on this rank: what moves for them, and which blocks their local code computes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.algebra.layout import Axes
from convgen.algebra.relations import Relation
from convgen.algebra.signature import Operand
from convgen.operations.autocast import taken_as, taken_each, types_under, usual_types
from convgen.operations.row import At, Operation, nest, standing
from convgen.operations.spare import spare_rows, with_spare
from convgen.operations.typed import under

from .blocks import Unmapped
from .here import held_at
from .layout import Box, common, interval
from .mesh import Place, coordinates, members
from .splits import Distribution, Plain, Side, Split
from .travel import Chain, Move


class Reach(NamedTuple):
    """A layout of an operand as a row reads it: along some dimensions the rows that a block of an index reads, along
    the others a block."""

    blocks: Split
    windows: tuple[tuple[Relation, int] | None, ...]

    @property
    def tensor(self) -> str:
        return self.blocks.tensor

    def frame(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        box = list(self.blocks.frame(layer, at, batch))
        for d, window in enumerate(self.windows):
            if window is not None:
                relation, extent = window
                block = interval(extent, 1, self.blocks.axes[d], layer.sizes, at)
                box[d] = relation.hull(*relation.window(*block), self.blocks.extents[d])
        return tuple(box)

    def held(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        return self.frame(layer, at, batch)


class Stand(Plain):
    """A row at one number of samples and other sizes: its operation, its layouts, and what conversions ask of a
    layer."""

    def __init__(self, row: Row, operation: Operation, net: Any, label: str) -> None:
        self.row, self.operation, self.signature = row, operation, operation.signatures[row.way]
        self.label = label
        self.name, self.grid, self.sizes, self.sums, self.device = net.name, net.grid, net.sizes, net.sums, net.device
        self.add = net.add
        self.low, self.boxes_at = net.low, net.boxes_at  # all rows of these sizes share the boxes
        inputs, results = self.signature.inputs, self.signature.results
        made = [f"{label}.{r.name}" if j else label for j, r in enumerate(results)]
        self.fetch = tuple(self._chain(c, o, f"{label}.{o.name}") for c, o in zip(row.fetch, inputs, strict=True))
        self.back = tuple(self._chain(c, o, f"{label}.d{o.name}") for c, o in zip(row.back, inputs, strict=True))
        self.store = tuple(self._chain(c, o, n) for c, o, n in zip(row.store, results, made, strict=True))
        self.given = tuple(self._chain(c, o, f"{label}.d{o.name}") for c, o in zip(row.given, results, strict=True))
        whole = zip(self.fetch, row.fetch, inputs, strict=True)
        self.windows: tuple[Any, ...] = tuple(f[-1].dst if f else self._read(c.start, o) for f, c, o in whole)
        gathered = {o.name: c[-1] for o, c in zip(inputs, self.fetch, strict=True) if c}
        scattered = {o.name: c[0] for o, c in zip(results, self.store, strict=True) if c}
        self.parts = {
            name: math.prod(self.grid[a] for a in move.over)
            for name, move in (gathered | scattered).items()
            if move.kind.endswith("_parts")
        }
        self.is_silent = not any((*self.fetch, *self.back, *self.store, *self.given))
        self.derived = {k: one.stand(net, f"{label}.d{inputs[k].name}") for k, one in row.derived.items()}
        self.autocast = row.autocast if net.low is not None and any(row.autocast) else ()
        self.mixes = net.mixes
        self.has_spare = any(map(any, operation.spare(row.way)))
        self._ats: dict[int, At] = {}
        self._still: dict[int, bool] = {}
        self._counts: dict[Any, Tensor] = {}
        self._totals: dict[tuple[int, ...], float] = {}

    def is_still(self, move: Move) -> bool:
        """Whether an exchange moves nothing for any rank at these sizes; at others it may."""
        if id(move) not in self._still:
            kind, over, src, dst, *_ = move
            ranks = range(math.prod(self.grid.values()))
            held, kept = ([held_at(self, side, p, 0) for p in ranks] for side in (src, dst))  # type: ignore[arg-type]
            if kind == "exchange":
                here = (self.size(common(a, b), "") == self.size(b, "") for a, b in zip(held, kept, strict=True))
            else:
                pairs = ((p, q) for p in ranks for q in members(self, p, over) if q != p)  # type: ignore[arg-type]
                here = (not self.size(common(held[p], kept[q]), "") for p, q in pairs)
            self._still[id(move)] = all(here)
        return self._still[id(move)]

    # ---- Layouts ----

    def _layouts(self, side: Side, operand: Operand) -> list[Any]:
        return [self._read(one, operand) for one in (side.start, *(to.made for to in side.steps))]

    def _read(self, there: Distribution, operand: Operand) -> Any:
        blocks = Split(operand.name, operand.shape, there.axes)
        if not there.reads:
            return blocks
        windows = tuple(
            (made.relation, self.signature.extent[made.indices[0]]) if d in there.reads and made.relation else None
            for d, made in enumerate(operand.dims)
        )
        return Reach(blocks, windows)

    def _chain(self, side: Side | None, operand: Operand, step: str) -> Chain:
        if side is None or not side.steps:
            return ()
        pairs = zip(side.steps, pairwise(self._layouts(side, operand)), strict=True)
        several = len(side.steps) > 1
        return tuple(
            Move(to.kind, to.over, *pair, f"{step}.{i}" if several else step, to.dtype)
            for i, (to, pair) in enumerate(pairs, 1)
        )

    # ---- Where local code stands ----

    def moves(self) -> Iterator[tuple[str, Move]]:
        """The row's conversions, each with the name of its chain; rows that make its gradients have their own."""
        sides = {"fetch": self.fetch, "store": self.store, "given": self.given, "back": self.back}
        for side, chains in sides.items():
            for chain in chains:
                yield from ((side, move) for move in chain)

    def at(self, place: Place) -> At:
        return self.at_rank(place.me)

    def counts(self, ranks: tuple[int, ...], device: Any, dtype: torch.dtype) -> Tensor:
        """How many elements the moments of each of these ranks are of: [ranks, ...]; brought to the device once."""
        key = (ranks, str(device), dtype)
        if key not in self._counts:
            operation = cast(Any, self.operation)
            found = torch.stack([operation.counts(self.row.way, self.at_rank(p)) for p in ranks])
            self._counts[key] = found.to(device, dtype)
        return self._counts[key]

    def shares(self, ranks: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, float]:
        """Each of these ranks' share of the elements that moments are of, and how many elements there are in all; none
        where these ranks have no channels."""
        key = (ranks, "shares", dtype)
        if key not in self._counts:
            counts = self.counts(ranks, "cpu", torch.float64).flatten(1)[:, :1].sum(1)
            self._totals[ranks] = float(counts.sum())
            self._counts[key] = (counts / max(self._totals[ranks], 1.0)).to(self.device, dtype)
        return self._counts[key], self._totals[ranks]

    def at_rank(self, me: int) -> At:
        """The blocks that the rank at a position computes."""
        if me not in self._ats:
            roles = self.row.roles
            at = self.at_blocks({i: self._block(n, roles.get(i, ()), me) for i, n in self.signature.extents})
            self._ats[me] = with_spare(at, self._spare(at, me)) if self.has_spare else at
        return self._ats[me]

    def _spare(self, at: At, me: int) -> tuple[tuple[int, ...], ...]:
        """The rows that a stored operand has and that no window reads."""
        whole = zip(self.windows, self.fetch, strict=True)
        held = [None if chain else held_at(self, there, me, 0) for there, chain in whole]  # type: ignore[arg-type]
        return spare_rows(self.operation, self.row.way, at, held)

    def _block(self, extent: int, axes: Axes, me: int) -> tuple[int, int]:
        """The block of an index that the rank at a position has."""
        if not axes:
            return 0, extent
        key = extent, axes, me
        if key not in self.boxes_at:
            here = coordinates(self, me)  # type: ignore[arg-type]
            self.boxes_at[key] = interval(extent, 1, axes, self.sizes, here)
        return self.boxes_at[key]

    def at_blocks(self, blocks: dict[str, tuple[int, int]]) -> At:
        """Local code's place for these blocks of the row's indices."""
        at = standing(self.signature, blocks)
        special = self.parts or self.low is not None or not self.signature.inputs
        return replace(at, parts=self.parts, low=self.low, device=self.device) if special else at

    def made_shape(self, result: Operand, at: At) -> list[int]:
        """The shape of a rank's part of a result."""
        return [
            math.prod(at.extent(i) for i in made.indices) if made.indices else n
            for made, n in zip(result.dims, result.shape, strict=True)
        ]

    def result_box(self, at: At) -> Box:
        """The box of the first result that these blocks make."""
        (result, *_) = self.signature.results
        return tuple(
            nest(made, self.signature, at.blocks) if made.indices else (0, n)
            for made, n in zip(result.dims, result.shape, strict=True)
        )

    def cut(self, k: int, tensor: Tensor, held: Box, at: At) -> Tensor:
        """The rows of an operand that local code takes, cut from what a rank has of it."""
        for d, start, rows in self.narrowed(k, held, at):
            tensor = tensor.narrow(d, start, rows)
        return tensor

    def narrowed(self, k: int, held: Box, at: At) -> tuple[tuple[int, int, int], ...]:
        """What `cut` takes of an operand: dimension, first row and number of rows, where it isn't all of them."""
        found: list[tuple[int, int, int]] = []
        for d, ((first, last), (lo, hi)) in enumerate(zip(held, at.inside[k], strict=True)):
            if hi <= lo:
                lo = hi = first
            if (lo, hi) != (first, last):
                found.append((d, lo - first, hi - lo))
        return tuple(found)

    # ---- Local code ----

    def taken(self, operands: Sequence[Any]) -> list[Any]:
        """Operands cast as autocast takes them; operands that have come in pieces have been cast before."""
        return taken_each(self.autocast, operands, self.low)

    def moved_type(self, k: int, kind: torch.dtype) -> torch.dtype:
        """The type in which an operand of this type moves: autocast's, where autocast takes the operand in it."""
        if not self.autocast or self.autocast[k] != "low":
            return kind
        return taken_as("low", [torch.empty(0, dtype=kind)], self.low)[0].dtype

    def local(self, at: At, parts: Sequence[Tensor], is_nothing: bool) -> tuple[Tensor, ...]:
        """The results of local code for these blocks; zeros where there is nothing to compute."""
        if is_nothing:
            results = self.signature.results
            given = [str(p.dtype).removeprefix("torch.") for p in parts]
            types = self.row.types or usual_types(results, given)
            if self.low is not None:
                low = str(self.low).removeprefix("torch.")
                types = types_under(self.operation, self.row.way, tuple(given), (), low)
            shapes = [self.made_shape(r, at) for r in results]
            kinds: list[torch.dtype] = [getattr(torch, kind) for kind in types]
            return tuple([torch.zeros(s, dtype=k, device=self.device) for s, k in zip(shapes, kinds, strict=True)])
        return self.operation.local(self.row.way, at, *parts)

    def fused(self, at: At, parts: Sequence[Tensor], between: Tensor) -> Tensor:
        """The result of a convolution and what follows it as one row, whose gradients' rows read the gradient of what
        lies between.

        Args:
            between: a tensor in the shape of what lies between; it gets that gradient.
        """
        operation: Any = self.operation  # of parts
        kernel = operation.kernel(at, parts)
        if kernel is None:
            return operation.behind(at, Valued.apply(between, operation.first(at, *parts)), *parts)
        return kernel(operation, at, between, *parts)


class Row:
    """One operation of a network: how it is laid out, and what moves for it.

    Args:
        operation: a function of the number of samples and of other sizes that are known at run time only.
        roles: by index the grid's axes that split it, outermost first.
        reads: for each operand how it is stored and fetched, and how its gradient comes back.
        makes: for each result how it is made and stored, and how its gradient is fetched.
        derived: by operand the row that makes its gradient.
        early: the operand whose halo travels while the row's interior is computed; or, of a gradient that is not
            `split`, while other gradients of its row are.
        autocast: how autocast takes the operands (convgen's spec/autocast.py): a word for all, or one each.
        chunks: the index that is cut, the number of chunks, the operand that travels by chunks or None, and whether the
            result does.
        types: the results' types, where they are not the usual ones.
    """

    def __init__(
        self,
        operation: Callable[..., Operation],
        roles: dict[str, Axes],
        reads: Sequence[Side | Distribution],
        makes: Sequence[Side | Distribution],
        *,
        way: int = 0,
        derived: dict[int, Row] | None = None,
        early: int | None = None,
        split: bool = True,
        chunks: tuple[str, int, int | None, bool] | None = None,
        autocast: str | tuple[str, ...] = "",
        types: tuple[str, ...] = (),
    ) -> None:
        self.operation, self.way, self.derived, self.early, self.split = operation, way, derived or {}, early, split
        self.chunks, self.roles, self.types = chunks, roles, types
        self.autocast = (autocast,) * len(reads) if isinstance(autocast, str) else autocast
        self.fetch, self.store = ([s if isinstance(s, Side) else Side(s) for s in sides] for sides in (reads, makes))
        self.back, self.given = ([side.back for side in sides] for sides in (self.fetch, self.store))
        # Weak: whoever runs the row at these sizes holds its Stand, and one that nobody runs any more is forgotten.
        self._stands: weakref.WeakValueDictionary[Any, Stand] = weakref.WeakValueDictionary()
        self._probed: dict[torch.dtype | None, list[Operation]] = {}
        self._expression = _expression(operation)
        self._asks: bool | None = None  # whether autocast changes arguments of the operation

    def _under(self, low: torch.dtype | None, sizes: tuple[int, ...]) -> Operation:
        operation = self.operation(*sizes)
        if self._asks is None:
            self._asks = under(operation, None) is not operation
        return under(operation, low) if self._asks else operation

    def stand(self, net: Any, label: str) -> Stand:
        """The row at the sizes of a call of a network.

        Args:
            label: the name of its steps.
        """
        key = (net.open, label, net.device, net.low, net.apart)
        found = self._stands.get(key)
        if found is None:
            operation = net.operations.get(self._expression)  # with its signatures
            if operation is None:
                if net.low not in self._probed:
                    self._probed[net.low] = [self._under(net.low, one) for one in net.probes]
                operation = self._under(net.low, net.open).for_any(*self._probed[net.low])
                net.operations[self._expression] = operation
            found = self._stands.setdefault(key, Stand(self, operation, net, label))  # one, if threads make it at once
        return found


def _expression(operation: Any) -> object:
    """A key that rows share whose operations are equal at any sizes: the code and the constants of a package's lambda;
    any other function is its own key."""
    code = getattr(operation, "__code__", None)
    if code is None or operation.__closure__ or operation.__defaults__:
        return operation
    return code.co_code, repr(code.co_consts), code.co_names, id(operation.__globals__)


# ---------------------------------------------------------------------------------------------------------------------


class Valued(Unmapped):
    """A value, for a tensor that stands for it and gets the same gradient as the value."""

    @staticmethod
    def forward(stands: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient if ctx.needs_input_grad[1] else None
