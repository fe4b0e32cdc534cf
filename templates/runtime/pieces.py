# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from convgen.operations.row import At, empty_as

from .conversions import missing, named, within
from .lanes import Pending, begin, noted
from .layout import Box, common
from .transport import wide_type
from .travel import Move, Packing, RowHere, slices

if TYPE_CHECKING:
    from .rows import Stand

HALOS = "halos"


class Share(NamedTuple):
    """A piece of a rank's part of a row: its place, and the box of the operand that it reads."""

    at: At
    box: Box


class Pieces(NamedTuple):
    """The interior and the boundary's pieces around it; no interior, and one piece that is all of it, where a row is
    not split."""

    interior: Share | None
    boundary: tuple[Share, ...]


def pieces_of(stand: Stand, here: RowHere, k: int) -> Pieces:
    """The pieces of a row whose operand k comes with a halo."""
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


class OfStrips(NamedTuple):
    """Gradients of the strips that the boundary reads.

    Attributes:
        moved: the type in which the halo has come; a rank without strips sends, and gets, its gradient in it, too.
        given: the type of the operand itself, which its gradient has.
    """

    gradients: Sequence[Tensor]
    moved: torch.dtype
    given: torch.dtype


class Sent(NamedTuple):
    """A halo's gradient on its way, and the strips' gradients, whose own rows stay here."""

    pending: Pending
    of: OfStrips


Copy = tuple[int, Any, Any]  # a part's number, where the copy goes, where in the part it comes from


class Halo:
    """Brings the rows that a rank's window lacks, and takes their gradient back; boxes are worked out once."""

    def __init__(self, move: Move, back: Move, here: RowHere, pieces: Pieces) -> None:
        self.move, self.step_back, self.here, layer = move, back.step, here, here.layer
        self.dtype = back.dtype  # the type in which the gradient travels, if not its own
        sends, receives = missing(move.src, move.dst, move.over, here)
        self.own, boxes = here.held(move.src), [p.box for p in pieces.boundary]
        self.inner = pieces.interior.box if pieces.interior else tuple((lo, lo) for lo, _ in self.own)
        self.group, self.is_all = here.group(move.over), self.inner == self.own
        self.sent, self.got = Packing(here.frame(move.src), sends, layer), [layer.size(b, "") for b in receives]
        self.came = [layer.shape(b, "") for b in receives]
        self.shapes, self.shape = [layer.shape(b, "") for b in boxes], layer.shape(self.own, "")
        self.to_strips = [_copies(box, [self.own, *receives], layer) for box in boxes]
        self.to_addends = [_copies(box, boxes, layer) for box in receives]
        self.to_own = _copies(self.own, [*boxes, *sends], layer)
        self.to_inner = slices(self.own, common(self.own, self.inner))
        self.returned = [layer.shape(b, "") for b in sends]

    def start(self, x: Tensor) -> Pending:
        return self._begin(self.move.step, self.sent.packed(x.contiguous()), (self.sent.sizes, self.got))

    def _begin(self, step: str, packed: Tensor, splits: tuple[list[int], list[int]]) -> Pending:
        with named(step, "exchange", self.move.over, self.here):
            return begin(self.here.place.transport, "exchange", packed, splits, self.group, HALOS)

    def _wait(self, pending: Pending, step: str, shapes: Sequence[tuple[int, ...]], sizes: list[int]) -> list[Tensor]:
        with noted("wait", step), named(step, "exchange", self.move.over, self.here):
            got = pending.wait()
        return [part.view(shape) for part, shape in zip(got.split(sizes), shapes, strict=True)]

    def strips(self, pending: Pending, x: Tensor) -> tuple[Tensor, ...]:
        """The strips that the boundary reads, made of own rows and of those that have arrived."""
        there = [x, *self._wait(pending, self.move.step, self.came, self.got)]
        made = [x.new_empty(shape) for shape in self.shapes]
        for strip, copies in zip(made, self.to_strips, strict=True):
            for n, to, of in copies:
                strip[to].copy_(there[n][of])
        return tuple(made)

    def start_back(self, of: OfStrips) -> Sent:
        """Send the gradients of rows that have arrived to where they came from; those of own rows stay."""
        like, device = self.dtype or of.moved, self.here.layer.device
        addends: list[Tensor] = []
        for shape, copies in zip(self.came, self.to_addends, strict=True):
            addend = torch.zeros(shape, dtype=wide_type(like), device=device)
            for n, to, where in copies:
                addend[to].add_(of.gradients[n][where])
            addends.append(addend.view(-1))
        packed = torch.cat(addends).to(like)
        return Sent(self._begin(self.step_back, packed, (self.got, self.sent.sizes)), of)

    def wait_back(self, sent: Sent, inside: Tensor | None, dy: Tensor) -> Tensor:
        """The gradient of own rows: the sum of the interior's, of the boundary's, and of what arrives.

        Args:
            inside: the interior's gradient, which is written over where nobody else has it; dy: the result's gradient.
        """
        if inside is None:
            inside = dy.new_empty([hi - lo for lo, hi in self.inner], dtype=sent.of.given)
        kind = wide_type(inside.dtype)
        if self.is_all:
            is_ours = inside.dtype == kind and lies_alone(inside, dy)
            total = inside if is_ours else inside.to(kind, copy=True)
        else:
            total = inside.new_zeros(self.shape, dtype=kind)
            if inside.numel():
                total[self.to_inner].copy_(inside)
        parts = [*sent.of.gradients, *self._wait(sent.pending, self.step_back, self.returned, self.sent.sizes)]
        for n, to, of in self.to_own:
            total[to].add_(parts[n][of])
        return total.to(inside.dtype)


def _copies(box: Box, parts: Sequence[Box], layer: Any) -> list[Copy]:
    """The copies that bring what parts have of a box to it."""
    found: list[Copy] = []
    for n, part in enumerate(parts):
        both = common(box, part)
        if layer.size(both, ""):
            found.append((n, slices(box, both), slices(part, both)))
    return found


def lies_alone(inside: Tensor, dy: Tensor) -> bool:
    """Whether nobody else has a gradient: it is dense, and doesn't share the memory of the result's gradient."""
    lies = any(inside.is_contiguous(memory_format=f) for f in (torch.contiguous_format, torch.channels_last))
    return lies and inside.untyped_storage().data_ptr() != dy.untyped_storage().data_ptr()


def put_together(whole: Box, places: Sequence[Box], pieces: Sequence[Tensor]) -> Tensor:
    """A tensor put together from its pieces."""
    if tuple(places) == (whole,):
        return pieces[0]
    shape = [hi - lo for lo, hi in whole]
    out = pieces[0].new_empty(shape) if pieces[0].is_cpu else empty_as(pieces[0], shape)
    for place, piece in zip(places, pieces, strict=True):
        within(out, whole, place).copy_(piece)
    return out
