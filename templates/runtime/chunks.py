# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Rows in chunks: what moves for one chunk of an index travels while another is computed.

    gather 1 | gather 2 | gather 3 |                      the lane
             | chunk 1  | chunk 2  | chunk 3  |           this rank
                        | scatter 1| scatter 2| scatter 3 the lane

In backward the last chunk comes first. An operand's rows that several chunks read come with the first of them, and
their gradient is complete, and goes, with that of the last that backward comes to: the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from convgen.operations.row import At

from .blocks import Unmapped
from .conversions import consecutive, flat, named, pack, unflat, within
from .here import held_at
from .lanes import Pending, begin, noted
from .layout import Box, block
from .pieces import Join

if TYPE_CHECKING:
    from .rows import Stand
    from .travel import Move, RowHere

CHUNKS = "chunks"

Stretch = tuple[int, int]  # an interval of the dimension that is cut


class Going(NamedTuple):
    """A chunk of a conversion on its way."""

    step: str
    move: Move
    here: RowHere
    pending: Pending
    landed: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        with noted("wait", self.step), named(self.step, self.move.kind, self.move.over, self.here):
            got = self.pending.wait()
        return self.landed(got)


def cut(box: Box, d: int, rows: Stretch) -> Box:
    """These rows of a box, of dimension d."""
    return (*box[:d], rows, *box[d + 1 :])


def send(move: Move, number: int, value: Tensor, d: int, rows: Stretch, here: RowHere) -> Going:
    """Start a conversion of some rows of a value.

    Args:
        value: those rows of what the rank has.
        d: the dimension of the rows, which the conversion leaves as it is.
    """
    kind, over, src, dst, step = move
    stand, group = here.layer, here.group(over)
    held, kept = cut(here.held(src), d, rows), cut(here.held(dst), d, rows)
    peers = here.members(over)
    if kind == "all_gather":
        pieces = [cut(held_at(stand, src, p, 0), d, rows) for p in peers]
        packed, splits = flat(value, stand), [stand.size(p, "") for p in pieces]

        def landed(got: Tensor) -> Tensor:
            if consecutive(pieces, kept, "", stand):
                return unflat(got, stand.shape(kept, ""), stand)
            out = value.new_empty(stand.shape(kept, ""))
            stand.copy(got, out, kept, tuple(pieces), "", stand, unpack=True)
            return out

    else:
        scatters = kind == "reduce_scatter"
        pieces = [cut(held_at(stand, dst, p, 0), d, rows) for p in peers] if scatters else []
        packed = pack(value, held, pieces, "", stand) if scatters else flat(value, stand)
        parts = [block(0, packed.numel(), len(peers), i) for i in range(len(peers))]
        splits = [stand.size(p, "") for p in pieces] if scatters else [hi - lo for lo, hi in parts]

        def landed(got: Tensor) -> Tensor:
            return unflat(got, stand.shape(kept, ""), stand)

    name = f"{step}:{number + 1}"
    with named(name, kind, over, here):
        pending = begin(here.place.transport, kind, packed, splits, group, CHUNKS)
    return Going(name, move, here, pending, landed)


class ChunkHere(NamedTuple):
    """A chunk: where it stands, its rows of the result, and of the operand those that it brings and that it reads."""

    at: At
    makes: Stretch
    brings: Stretch
    reads: Stretch


class Chunked:
    """A row in chunks, in one call: made before its other operands are fetched, so that backward, which goes the other
    way, has handed in their gradients when it waits for what it has sent."""

    def __init__(self, stand: Stand, here: RowHere, x: Tensor | None) -> None:
        assert stand.row.chunks is not None
        index, count, self.k, of_result = stand.row.chunks
        self.stand, self.here, self.index = stand, here, index
        (result,) = stand.signature.results
        self.store, self.given = (stand.store[0], stand.given[0]) if of_result else ((), ())
        self.of_result, self.e = of_result, _dimension(result.dims, index)
        self.parts = self._parts(count)
        self.coming: dict[int, Going] = {}
        self.going: dict[int, Going | Tensor] = {}
        self.carried: tuple[Stretch, Tensor] | None = None
        if x is not None:
            assert self.k is not None
            self.fetch, self.back = stand.fetch[self.k], stand.back[self.k]
            self.d = _dimension(stand.signature.inputs[self.k].dims, index)
            self.x, (self.first, _) = x.detach().contiguous(), self._held_here()[self.d]
            for j, part in enumerate(self.parts if self.fetch else ()):
                self.coming[j] = send(self.fetch[0], j, self._rows(self.x, part.brings), self.d, part.brings, here)
            if self.fetch:
                del self.x  # what is on its way is kept there
            self.link = Begun.apply(x, self)

    # ---- Which rows ----

    def _held_here(self) -> Box:
        assert self.k is not None
        return self.here.held(self.stand.windows[self.k])

    def _parts(self, count: int) -> list[ChunkHere]:
        at = self.stand.at(self.here.place)
        lo, hi = at.blocks[self.index]
        count = max(1, min(count, hi - lo))
        blocks = [block(lo, hi, count, j) for j in range(count)]
        ats = [self.stand.at_blocks({**at.blocks, self.index: rows}) for rows in blocks]
        if self.k is None:
            return [ChunkHere(a, rows, rows, rows) for a, rows in zip(ats, blocks, strict=True)]
        operand = self.stand.signature.inputs[self.k]
        d = _dimension(operand.dims, self.index)
        start, end = self._held_here()[d]
        parts: list[ChunkHere] = []
        for j, (a, rows) in enumerate(zip(ats, blocks, strict=True)):
            first, last = _read(operand, d, rows, start)
            last = end if j == count - 1 else max(start, min(last, end))
            parts.append(ChunkHere(a, rows, (start, last), (min(first, start), last)))
            start = last
        return parts

    def _rows(self, tensor: Tensor, rows: Stretch) -> Tensor:
        """Of all of the operand's rows that a rank has."""
        return tensor.narrow(self.d, rows[0] - self.first, rows[1] - rows[0])

    # ---- The operand ----

    def operand(self, j: int) -> Tensor:
        """What a chunk reads: what it brings, behind those rows that chunks before it have brought."""
        part = self.parts[j]
        if not self.fetch:
            return self._rows(self.x, part.reads)
        made = self.coming.pop(j).wait()
        if part.reads[0] < part.brings[0]:
            before = self.parts[j - 1].reads
            old = self.last.narrow(self.d, part.reads[0] - before[0], part.brings[0] - part.reads[0])
            made = torch.cat([old, made], self.d)
        overlaps = j + 1 < len(self.parts) and self.parts[j + 1].reads[0] < part.brings[1]
        self.last = made if overlaps else made.new_empty(0)
        return made

    def send_back(self, j: int, gradient: Tensor) -> None:
        """The gradient of what a chunk reads: of what it has brought it is complete, and goes."""
        part, d = self.parts[j], self.d
        total = gradient
        if self.carried is not None:
            (lo, hi), carried = self.carried
            total = gradient.to(carried.dtype, copy=True)
            total.narrow(d, lo - part.reads[0], hi - lo).add_(carried)
            self.carried = None
        own = total.narrow(d, part.brings[0] - part.reads[0], part.brings[1] - part.brings[0]).to(gradient.dtype)
        before = part.brings[0] - part.reads[0]
        if before:
            wide = torch.promote_types(torch.float32, gradient.dtype)  # as sums of parts are
            self.carried = (part.reads[0], part.brings[0]), total.narrow(d, 0, before).to(wide)
        if self.back:
            self.going[j] = send(self.back[0], j, own.contiguous(), d, part.brings, self.here)
        else:
            self.going[j] = own

    def collected(self) -> Tensor:
        """The gradient of this rank's block of the operand, when all chunks have been."""
        return self._together(self.d, self.here.held(self.back[-1].dst) if self.back else self._held_here(), "brings")

    def _together(self, d: int, whole: Box, rows: str) -> Tensor:
        """What has gone, when it is there, in the order in which it went."""
        out: Tensor | None = None
        for j in list(self.going):
            there = self.going.pop(j)
            piece = there if isinstance(there, Tensor) else there.wait()
            if len(self.parts) == 1:
                return piece
            if out is None:
                out = piece.new_empty(self.here.layer.shape(whole, ""))
            within(out, whole, cut(whole, d, getattr(self.parts[j], rows))).copy_(piece)
        assert out is not None
        return out

    # ---- The result ----

    def made(self, parts: Sequence[Tensor | None], held: Sequence[Box]) -> Tensor:
        """The result on this rank, as it is stored if it goes by chunks; autograd goes through.

        Args:
            parts: as they were fetched, but for the operand that comes by chunks.
            held: where they stand.
        """
        stand = self.stand
        of = [self._of_chunks(k, t, box) for k, (t, box) in enumerate(zip(parts, held, strict=True))]
        pieces: list[Tensor] = []
        for j, part in enumerate(self.parts):
            operands = [several[j] if several else Arrived.apply(self.link, self, j) for several in of]
            boxes = [self._box(k, j, box) for k, box in enumerate(held)]
            (piece,) = stand.local(
                part.at, [stand.cut(k, t, b, part.at) for k, (t, b) in enumerate(zip(operands, boxes, strict=True))]
            )
            pieces.append(Sent.apply(piece, self, j) if self.of_result else piece)
        if self.of_result:
            return Collected.apply(self, *pieces)
        whole = stand.result_box(stand.at(self.here.place))
        return Join.apply(pieces[0].new_empty(0), None, whole, [stand.result_box(p.at) for p in self.parts], *pieces)

    def _box(self, k: int, j: int, held: Box) -> Box:
        """Where a chunk's part of an operand stands."""
        operand, part = self.stand.signature.inputs[k], self.parts[j]
        if self.index not in operand.indices:
            return held
        d = _dimension(operand.dims, self.index)
        if k == self.k:
            return cut(self._held_here(), d, part.reads)
        first, last = _read(operand, d, part.makes, held[d][0])
        return cut(held, d, (max(first, held[d][0]), min(last, held[d][1])))

    def _of_chunks(self, k: int, tensor: Tensor | None, held: Box) -> Sequence[Tensor]:
        """An operand for each chunk; nothing for the one that comes by chunks."""
        if tensor is None:
            return ()
        if self.index not in self.stand.signature.inputs[k].indices:
            return [tensor] * len(self.parts)
        d = _dimension(self.stand.signature.inputs[k].dims, self.index)
        boxes = [self._box(k, j, held)[d] for j in range(len(self.parts))]
        return Cuts.apply(tensor, d, [(lo - held[d][0], hi - held[d][0]) for lo, hi in boxes])

    def put(self, j: int, piece: Tensor) -> None:
        """A chunk of the result, on its way."""
        if self.store:
            self.going[j] = send(self.store[0], j, piece.contiguous(), self.e, self.parts[j].makes, self.here)
        else:
            self.going[j] = piece

    def stored(self) -> Tensor:
        """This rank's block of the result."""
        return self._together(self.e, self._box_of(self.store, -1), "makes")

    def _box_of(self, chain: Any, end: int) -> Box:
        if chain:
            return self.here.held(chain[0].src if end == 0 else chain[-1].dst)
        return self.stand.result_box(self.stand.at(self.here.place))

    def take_gradient(self, dy: Tensor) -> None:
        """Chunks of the result's gradient, on their way: the last first."""
        first, _ = self._box_of(self.given, 0)[self.e]
        self.dy = {}
        for j in reversed(range(len(self.parts))):
            lo, hi = self.parts[j].makes
            piece = dy.narrow(self.e, lo - first, hi - lo)
            self.dy[j] = send(self.given[0], j, piece, self.e, (lo, hi), self.here) if self.given else piece

    def gradient(self, j: int) -> Tensor:
        there = self.dy.pop(j)
        return there if isinstance(there, Tensor) else there.wait()


def _dimension(dims: Any, index: str) -> int:
    return next(d for d, made in enumerate(dims) if index in made.indices)


def _read(operand: Any, d: int, rows: Stretch, nothing: int) -> Stretch:
    """The interval of an operand's dimension that a block of the index reads."""
    relation = operand.dims[d].relation
    if relation is None:
        return rows
    first, last = relation.hull(*relation.window(*rows), operand.shape[d])
    return (first, last) if last > first else (nothing, nothing)


class Begun(Unmapped):
    """An operand that comes by chunks; its gradient is put together when all chunks have been."""

    @staticmethod
    def forward(x: Tensor, chunked: Chunked) -> Tensor:
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.chunked = inputs

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> Any:
        return ctx.chunked.collected(), None


class OfChunk(Unmapped):
    """Of one chunk."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.chunked, ctx.j = inputs


class Arrived(OfChunk):
    """What a chunk reads, once it is there; its gradient goes on its way."""

    @staticmethod
    def forward(link: Tensor, chunked: Chunked, j: int) -> Tensor:
        return chunked.operand(j)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.chunked.send_back(ctx.j, gradient)
        return gradient.new_empty(0), None, None


class Sent(OfChunk):
    """A chunk of the result on its way; its gradient once it is there."""

    @staticmethod
    def forward(piece: Tensor, chunked: Chunked, j: int) -> Tensor:
        chunked.put(j, piece)
        return piece.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> Any:
        return ctx.chunked.gradient(ctx.j), None, None


class Collected(Unmapped):
    """The result, when all chunks of it are there; its gradient goes to them by chunks."""

    @staticmethod
    def forward(chunked: Chunked, *links: Tensor) -> Tensor:
        return chunked.stored()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.chunked, *links = inputs
        ctx.count = len(links)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.chunked.take_gradient(dy)
        return None, *(dy.new_empty(0) for _ in range(ctx.count))


class Cuts(Unmapped):
    """A part of a tensor for each chunk; gradients are added where the parts overlap."""

    @staticmethod
    def forward(tensor: Tensor, d: int, rows: Sequence[Stretch]) -> tuple[Tensor, ...]:
        return tuple(tensor.narrow(d, lo, hi - lo) for lo, hi in rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, ctx.d, ctx.rows = inputs
        ctx.shape = tensor.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wide = torch.promote_types(torch.float32, gradients[0].dtype)
        total = gradients[0].new_zeros(ctx.shape, dtype=wide)
        for (lo, hi), gradient in zip(ctx.rows, gradients, strict=True):
            total.narrow(ctx.d, lo, hi - lo).add_(gradient)
        return total.to(gradients[0].dtype), None, None
