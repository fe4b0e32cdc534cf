# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Rows in pieces: the interior while the halo travels, then the boundary.

         own rows                      in the order in which a rank comes to them
    +---------------+
    | boundary      | <- halo          start the halo; interior; wait; boundary
    +-+-----------+-+
    |b| interior  |b|                  backward: boundary; start the halo's gradient; interior; wait
    +-+-----------+-+
    | boundary      | <- halo
    +---------------+

Pieces are blocks of the row's indices like any others, so local code does not know of them. Of several split dimensions
the outer one's boundary goes from end to end, corners included, and the inner one's lies between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from convgen.operations.row import At

from .blocks import Unmapped
from .conversions import missing, named, pack, unflat, within
from .lanes import Pending, begin, noted
from .layout import Box, common

if TYPE_CHECKING:
    from .rows import Stand
    from .travel import Move, RowHere

HALOS = "halos"


class Share(NamedTuple):
    """A part of a rank's part of a row: where it stands, and what of the operand it reads."""

    at: At
    box: Box


class Pieces(NamedTuple):
    """An interior, if there is one, and the boundary around it; or all of it, where a row is not split."""

    interior: Share | None
    boundary: tuple[Share, ...]


def pieces_of(stand: Stand, here: RowHere, k: int) -> Pieces:
    """Of a row whose operand k comes with a halo."""
    at, held = stand.at(here.place), here.held(stand.fetch[k][0].src)
    operand, inner = stand.signature.inputs[k], dict[str, tuple[int, int]]()
    for made, own, extent in zip(operand.dims, held, operand.shape, strict=True):
        if made.relation is not None:
            (i,) = made.indices
            inner[i] = made.relation.inside(*at.blocks[i], own, extent)
    if not stand.row.split or any(hi <= lo for lo, hi in inner.values()):
        return Pieces(None, (_piece(stand, here, k, at.blocks),))
    sides: list[Share] = []
    blocks = dict(at.blocks)
    for i, (lo, hi) in inner.items():
        first, last = at.blocks[i]
        sides += [_piece(stand, here, k, blocks | {i: side}) for side in ((first, lo), (hi, last)) if side[1] > side[0]]
        blocks[i] = (lo, hi)
    return Pieces(_piece(stand, here, k, blocks), tuple(sides))


def _piece(stand: Stand, here: RowHere, k: int, blocks: Any) -> Share:
    at, operand = stand.at_blocks(blocks), stand.signature.inputs[k]
    whole = here.held(stand.windows[k])
    box = list(whole)
    for d, made in enumerate(operand.dims):
        if made.relation is not None:
            box[d] = made.relation.hull(*made.relation.window(*blocks[made.indices[0]]), operand.shape[d])
    return Share(at, tuple(box))


class Halo:
    """What a rank's window lacks, under way; and its gradient, on the way back.

    Attributes:
        sends, receives: boxes to and from each rank of the group.
        of: where the memory of the result's gradient begins, once it is there.
    """

    def __init__(self, move: Move, step_back: str, x: Tensor, here: RowHere) -> None:
        self.move, self.step_back, self.here = move, step_back, here
        self.sends, self.receives = missing(move.src, move.dst, move.over, here)
        self.own, self.of = here.held(move.src), 0
        packed = pack(x.detach(), here.frame(move.src), self.sends, "", here.layer)
        self.pending = self._begin(move.step, packed, self.sends, self.receives)

    def _begin(self, step: str, packed: Tensor, sends: Sequence[Box], receives: Sequence[Box]) -> Pending:
        splits = tuple([self.here.layer.size(b, "") for b in boxes] for boxes in (sends, receives))
        with named(step, "exchange", self.move.over, self.here):
            group = self.here.group(self.move.over)
            return begin(self.here.place.transport, "exchange", packed, splits, group, HALOS)

    def _wait(self, step: str, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
        with noted("wait", step), named(step, "exchange", self.move.over, self.here):
            got = self.pending.wait()
        for box, part in zip(boxes, got.split([self.here.layer.size(b, "") for b in boxes]), strict=True):
            if part.numel():
                yield box, unflat(part, self.here.layer.shape(box, ""), self.here.layer)

    def strips(self, x: Tensor, boxes: Sequence[Box]) -> tuple[Tensor, ...]:
        """What the boundary reads: own rows, and those that have arrived."""
        there = [(self.own, x), *self._wait(self.move.step, self.receives)]
        made = [x.new_empty(self.here.layer.shape(box, "")) for box in boxes]
        for strip, box in zip(made, boxes, strict=True):
            for held, part in there:
                both = common(held, box)
                if self.here.layer.size(both, ""):
                    within(strip, box, both).copy_(within(part, held, both))
        return tuple(made)

    def send_back(self, gradients: Sequence[Tensor], boxes: Sequence[Box]) -> None:
        """Gradients of what has arrived, to where it came from; of own rows they stay."""
        self.parts = [*zip(boxes, gradients, strict=True)]
        wide = torch.promote_types(self.here.group(self.move.over).wide, gradients[0].dtype)
        addends: list[Tensor] = []
        for box in self.receives:
            addend = gradients[0].new_zeros(self.here.layer.shape(box, ""), dtype=wide)
            _add(addend, box, self.parts, self.here)
            addends.append(addend.reshape(-1))
        packed = torch.cat(addends).to(gradients[0].dtype)
        self.pending = self._begin(self.step_back, packed, self.receives, self.sends)

    def add_to(self, inside: Tensor, box: Box) -> Tensor:
        """The gradient of own rows: that of the interior, which stands at `box`, of the boundary, and what arrives."""
        wide = torch.promote_types(self.here.group(self.move.over).wide, inside.dtype)
        if box == self.own:
            total = inside if inside.dtype == wide and self._is_ours(inside) else inside.to(wide, copy=True)
        else:
            total = inside.new_zeros(self.here.layer.shape(self.own, ""), dtype=wide)
            if inside.numel():
                within(total, self.own, box).copy_(inside)
        _add(total, self.own, [*self.parts, *self._wait(self.step_back, self.sends)], self.here)
        del self.parts
        return total.to(inside.dtype)

    def _is_ours(self, inside: Tensor) -> bool:
        """Whether nobody else has this gradient, so that it may be written over: an operation that reads windows made
        it, and it is no view of the result's gradient."""
        lies = any(inside.is_contiguous(memory_format=f) for f in (torch.contiguous_format, torch.channels_last))
        return lies and not inside.requires_grad and inside.untyped_storage().data_ptr() != self.of


def _add(total: Tensor, place: Box, parts: Sequence[tuple[Box, Tensor]], here: RowHere) -> None:
    """Parts of a tensor to what of it stands at a place."""
    for box, part in parts:
        both = common(place, box)
        if here.layer.size(both, ""):
            within(total, place, both).add_(within(part, box, both))


class Inner(Unmapped):
    """Of a block what the interior reads; its gradient waits for what the boundary's sends back.

    `link` has no elements: through it backward comes here after the boundary.
    """

    @staticmethod
    def forward(x: Tensor, halo: Halo, box: Box) -> tuple[Tensor, Tensor]:
        return within(x, halo.own, box), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.halo, ctx.box = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, link: Tensor) -> Any:
        return ctx.halo.add_to(gradient, ctx.box), None, None


class Boundary(Unmapped):
    """What the boundary reads, once the halo is there, and a link for those ranks that have no boundary."""

    @staticmethod
    def forward(link: Tensor, x: Tensor, halo: Halo, boxes: Sequence[Box]) -> tuple[Tensor, ...]:
        return *halo.strips(x, boxes), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, ctx.halo, ctx.boxes = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *strips, link = gradients
        ctx.halo.send_back([*strips, link], [*ctx.boxes, tuple((0, 0) for _ in ctx.halo.own)])
        return link, None, None, None


class Join(Unmapped):
    """Pieces of a result, put together."""

    @staticmethod
    def forward(link: Tensor, halo: Halo | None, whole: Box, places: Sequence[Box], *pieces: Tensor) -> Tensor:
        if tuple(places) == (whole,):
            return pieces[0].view_as(pieces[0])
        out = pieces[0].new_empty([hi - lo for lo, hi in whole])
        for place, piece in zip(places, pieces, strict=True):
            within(out, whole, place).copy_(piece)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        link, ctx.halo, ctx.whole, ctx.places, *_ = inputs
        ctx.like = link.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.halo is not None:
            ctx.halo.of = gradient.untyped_storage().data_ptr()
        parts = [within(gradient, ctx.whole, place) for place in ctx.places]
        return gradient.new_empty(0, dtype=ctx.like), None, None, None, *parts


class Cut(Unmapped):
    """Pieces of what stands for a result; their gradients are put together."""

    @staticmethod
    def forward(stands: Tensor, whole: Box, places: Sequence[Box]) -> tuple[Tensor, ...]:
        return tuple(within(stands, whole, place) for place in places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.whole, ctx.places = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        out = gradients[0].new_empty([hi - lo for lo, hi in ctx.whole])
        for place, gradient in zip(ctx.places, gradients, strict=True):
            within(out, ctx.whole, place).copy_(gradient)
        return out, None, None


class Early:
    """A row whose halo is under way: made before its other operands are fetched, so that backward, which goes the other
    way, has handed in their gradients when it waits."""

    def __init__(self, stand: Stand, here: RowHere, k: int, x: Tensor) -> None:
        (move,), back = stand.fetch[k], stand.back[k]
        self.stand, self.here, self.k, self.x = stand, here, k, x.contiguous()
        self.halo = Halo(move, back[0].step if back else move.step, self.x, here)
        self.pieces = pieces_of(stand, here, k)
        nowhere = tuple((lo, lo) for lo, _ in self.halo.own)
        box = self.pieces.interior.box if self.pieces.interior else nowhere
        self.inside, self.link = Inner.apply(self.x, self.halo, box)

    def made(self, parts: Sequence[Tensor], between: Tensor | None = None) -> Tensor:
        """The result on this rank; autograd goes through.

        Args:
            parts: as local code takes them, but for operand k.
            between: of a fused row, what stands for what its convolution makes.
        """
        stand, (interior, boundary) = self.stand, self.pieces
        whole = stand.result_box(stand.at(self.here.place))
        places = [stand.result_box(p.at) for p in (interior, *boundary) if p]
        stands = [None] * len(places) if between is None else list(Cut.apply(between, whole, places))
        made = [] if interior is None else [self._of(interior, self.inside, parts, stands.pop(0))]
        *strips, link = Boundary.apply(self.link, self.x.detach(), self.halo, [p.box for p in boundary])
        for piece, strip, one in zip(boundary, strips, stands, strict=True):
            made.append(self._of(piece, strip, parts, one))
        return Join.apply(link, self.halo, whole, places, *made)

    def _of(self, piece: Share, tensor: Tensor, parts: Sequence[Tensor], between: Tensor | None) -> Tensor:
        k, stand = self.k, self.stand
        given = [*parts[:k], stand.cut(k, tensor, piece.box, piece.at), *parts[k + 1 :]]
        if between is not None:
            return stand.fused(piece.at, given, between)
        (made,) = stand.local(piece.at, given)
        return made
