# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Rows in chunks: what moves for one chunk of an index travels while another is computed.

    gather 1 | gather 2 | gather 3 |                      the lane
             | chunk 1  | chunk 2  | chunk 3  |           this rank
                        | scatter 1| scatter 2| scatter 3 the lane

In backward the last chunk comes first. An operand's rows that several chunks read come with the first of these chunks.
Backward comes to that chunk last, so the rows' gradient is complete there and leaves with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from convgen.operations.rimmed import to_parts
from convgen.operations.row import At

from .conversions import consecutive, flat, named, pack, unflat, within
from .here import held_at
from .lanes import Pending, begin, noted
from .layout import Box, ith_part
from .pieces import put_together
from .transport import wide_type

if TYPE_CHECKING:
    from .rows import Stand
    from .travel import Move, RowHere

CHUNKS = "chunks"

Rows = tuple[int, int]  # an interval of the dimension that is cut


class Going(NamedTuple):
    """A chunk of a conversion on its way."""

    step: str
    kind: str
    over: tuple[str, ...]
    here: RowHere
    pending: Pending
    landed: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        with noted("wait", self.step), named(self.step, self.kind, self.over, self.here):
            got = self.pending.wait()
        return self.landed(got)


def cut(box: Box, d: int, rows: Rows) -> Box:
    """A box cut to these rows of dimension d."""
    return (*box[:d], rows, *box[d + 1 :])


def send(move: Move, step: str, value: Tensor, d: int, rows: Rows, here: RowHere) -> Going:
    """Start a conversion of some rows of a value.

    Args:
        value: those rows of what the rank has; its channels lie in parts if the conversion moves parts.
        d: the dimension of the rows, which the conversion leaves as it is.
    """
    kind, over, src, dst, _, dtype = move
    in_parts, kind = kind.endswith("_parts"), kind.removesuffix("_parts")
    own, value = value.dtype, value if dtype is None else value.to(dtype)
    stand, group = here.layer, here.group(over)
    held, kept = cut(here.held(src), d, rows), cut(here.held(dst), d, rows)
    peers = here.members(over)
    if kind == "all_gather":
        pieces = [cut(held_at(stand, src, p, 0), d, rows) for p in peers]
        packed, splits = flat(value, stand), [stand.size(p, "") for p in pieces]

        def landed(got: Tensor) -> Tensor:
            if in_parts:
                return got.to(own)
            if consecutive(pieces, kept, "", stand):
                return unflat(got, stand.shape(kept, ""), stand).to(own)
            out = _empty(value, kept, stand)
            stand.copy(got, out, kept, tuple(pieces), "", stand, unpack=True)
            return out.to(own)

    else:
        scatters = kind == "reduce_scatter"
        pieces = [cut(held_at(stand, dst, p, 0), d, rows) for p in peers] if scatters else []
        if in_parts:  # the zeros of a rank that computes nothing aren't in parts
            packed = value if value.dim() == 1 else to_parts(value, len(peers))
        else:
            packed = pack(value, held, pieces, "", stand) if scatters else flat(value, stand)
        parts = [ith_part(0, packed.numel(), len(peers), i) for i in range(len(peers))]
        splits = [stand.size(p, "") for p in pieces] if scatters else [hi - lo for lo, hi in parts]

        def landed(got: Tensor) -> Tensor:
            return unflat(got, stand.shape(kept, ""), stand).to(own)

    with named(step, kind, over, here):
        pending = begin(here.place.transport, kind, packed, splits, group, CHUNKS)
    return Going(step, kind, over, here, pending, landed)


class ChunkHere(NamedTuple):
    """A chunk: its place, the rows of the result that it makes, and the rows of the operand that come with it and that
    it reads."""

    at: At
    makes: Rows
    brings: Rows
    reads: Rows


class Chunked:
    """A row in chunks on this rank.

    Args:
        last: whether activations lie, and travel, with channels last.

    Attributes:
        k: the operand that comes by chunks, if any, along its dimension `d`; `of_result`: whether what is made goes by
            chunks, along its dimension `e`.
        held: for each operand, the box that the rank has of it.
    """

    def __init__(self, stand: Stand, here: RowHere, last: bool = False) -> None:
        assert stand.row.chunks is not None
        index, count, self.k, self.of_result = stand.row.chunks
        if last:
            stand = copy(stand)
            stand.channels_last = True
            here = here._replace(layer=stand)  # type: ignore[arg-type]
        self.stand, self.here, self.index = stand, here, index
        (result,) = stand.signature.results
        nothing = tuple[Any, ...]()
        self.store, self.given = (stand.store[0], stand.given[0]) if self.of_result else (nothing, nothing)
        self.fetch, self.back = (nothing, nothing) if self.k is None else (stand.fetch[self.k], stand.back[self.k])
        self.e = dimension_of(result.dims, index)
        self.d = 0 if self.k is None else dimension_of(stand.signature.inputs[self.k].dims, index)
        self.held = [here.held(layout) for layout in stand.windows]
        self.whole = stand.result_box(stand.at(here.place))
        self.parts = self._parts(count)
        self.places = [stand.result_box(p.at) for p in self.parts]

    def _parts(self, count: int) -> list[ChunkHere]:
        at = self.stand.at(self.here.place)
        lo, hi = at.blocks[self.index]
        count = max(1, min(count, hi - lo))
        blocks = [ith_part(lo, hi, count, j) for j in range(count)]
        ats = [self.stand.at_blocks({**at.blocks, self.index: rows}) for rows in blocks]
        if self.k is None:
            return [ChunkHere(a, rows, rows, rows) for a, rows in zip(ats, blocks, strict=True)]
        operand = self.stand.signature.inputs[self.k]
        start, end = self.held[self.k][self.d]
        parts: list[ChunkHere] = []
        for j, (a, rows) in enumerate(zip(ats, blocks, strict=True)):
            first, last = _read(operand, self.d, rows, start)
            last = end if j == count - 1 else max(start, min(last, end))
            parts.append(ChunkHere(a, rows, (start, last), (min(first, start), last)))
            start = last
        return parts

    def box(self, k: int, j: int) -> Box:
        """The box of an operand that a chunk reads."""
        operand, part, held = self.stand.signature.inputs[k], self.parts[j], self.held[k]
        if self.index not in operand.indices:
            return held
        d = dimension_of(operand.dims, self.index)
        if k == self.k:
            return cut(held, d, part.reads)
        first, last = _read(operand, d, part.makes, held[d][0])
        return cut(held, d, (max(first, held[d][0]), min(last, held[d][1])))

    # ---- What travels ----

    def start(self, side: str, j: int, step: str, value: Tensor) -> Going:
        """Start chunk j of a conversion; the value is the whole one on sides `fetch` and `given`, else the chunk."""
        part, rows = self.parts[j], self.held[self.k][self.d] if self.k is not None else (0, 0)
        match side:
            case "fetch":
                lo, hi = part.brings
                piece = self._lying(value).narrow(self.d, lo - rows[0], hi - lo)
                return send(self.fetch[0], step, piece, self.d, part.brings, self.here)
            case "store":
                return send(self.store[0], step, self._lying(value), self.e, part.makes, self.here)
            case "given":
                return send(self.given[0], step, self._of_result(j, value), self.e, part.makes, self.here)
            case _:
                assert self.back
                return send(self.back[0], step, self._lying(value), self.d, part.brings, self.here)

    def _lying(self, value: Tensor) -> Tensor:
        """A value as packing takes it: any memory format where channels travel last, else contiguous."""
        return value if self.stand.channels_last else value.contiguous()

    def _of_result(self, j: int, dy: Tensor) -> Tensor:
        """The rows of the result's gradient that belong to chunk j."""
        (first, _), (lo, hi) = self.here.held(self.given[0].src)[self.e], self.parts[j].makes
        return dy.narrow(self.e, lo - first, hi - lo)

    def gradient(self, j: int, dy: Tensor) -> Tensor:
        """A chunk's part of the result's gradient: all of what has come for it, or cut from what the rank has."""
        return dy if self.given else within(dy, self.whole, self.places[j])

    # ---- The operand ----

    def arrived(self, j: int, there: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows that a chunk reads: those that came with it, behind those that came with chunks before it; and again
        the same if the next chunk reads some of them, else None."""
        part = self.parts[j]
        if part.reads[0] < part.brings[0]:
            assert before is not None
            first = self.parts[j - 1].reads[0]
            old = before.narrow(self.d, part.reads[0] - first, part.brings[0] - part.reads[0])
            there = torch.cat([old, there], self.d)
        overlaps = j + 1 < len(self.parts) and self.parts[j + 1].reads[0] < part.brings[1]
        return there, there if overlaps else None

    def operands(self, j: int, given: Sequence[Tensor], *, has_come: bool) -> list[Tensor]:
        """The parts of the operands that a chunk reads."""
        return [t if k == self.k and has_come else within(t, self.held[k], self.box(k, j)) for k, t in enumerate(given)]

    def brought(self, j: int, gradient: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradient of the rows that came with a chunk, which is complete, and in a wide type that of the rows
        before them, for the chunk before."""
        part, d, total = self.parts[j], self.d, gradient
        if carried is not None:
            lo, hi = self.parts[j + 1].reads[0], self.parts[j + 1].brings[0]
            total = gradient.to(carried.dtype, copy=True)
            total.narrow(d, lo - part.reads[0], hi - lo).add_(carried)
        before = part.brings[0] - part.reads[0]
        own = total.narrow(d, before, part.brings[1] - part.brings[0]).to(gradient.dtype)
        if not before:
            return own, None
        return own, total.narrow(d, 0, before).to(wide_type(gradient.dtype))  # sums of parts are made in a wide type

    # ---- Together ----

    def joined(self, pieces: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """The result on this rank, put together; laid out as it is stored if it goes by chunks.

        Args:
            bias: is added to a result that goes by chunks.
        """
        pieces = pieces[: len(self.parts)]
        if not self.of_result:
            return put_together(self.whole, self.places, pieces)
        whole = self.here.held(self.store[-1].dst) if self.store else self.whole
        return self._together(self.e, whole, "makes", pieces, bias)

    def collected(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of this rank's block of the operand that came by chunks; the last chunk first."""
        assert self.k is not None
        whole = self.here.held(self.back[-1].dst) if self.back else self.held[self.k]
        return self._together(self.d, whole, "brings", gradients[::-1][: len(self.parts)])

    def _together(self, d: int, whole: Box, rows: str, pieces: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        if len(self.parts) == 1:
            return pieces[0] if bias is None else pieces[0] + bias
        out = _empty(pieces[0], whole, self.stand)
        for part, piece in zip(self.parts, pieces, strict=True):
            place = within(out, whole, cut(whole, d, getattr(part, rows)))
            if bias is None:
                place.copy_(piece)
            else:
                torch.add(piece, bias, out=place)
        return out

    def summed(self, k: int, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of another operand, of which chunks read parts; the last chunk first."""
        gradients = gradients[-len(self.parts) :]
        held = self.held[k]
        total = gradients[0].new_zeros([hi - lo for lo, hi in held], dtype=wide_type(gradients[0].dtype))
        for j, gradient in enumerate(gradients[::-1]):
            within(total, held, self.box(k, j)).add_(gradient)
        return total.to(gradients[0].dtype)


def _empty(like: Tensor, box: Box, stand: Any) -> Tensor:
    """Memory for a box, in the memory format of what travels."""
    shape = stand.shape(box, "")
    return unflat(like.new_empty(math.prod(shape)), shape, stand)


def dimension_of(dims: Any, index: str) -> int:
    return next(d for d, made in enumerate(dims) if index in made.indices)


def _read(operand: Any, d: int, rows: Rows, nothing: int) -> Rows:
    """The interval of an operand's dimension that a block of the index reads."""
    relation = operand.dims[d].relation
    if relation is None:
        return rows
    first, last = relation.hull(*relation.window(*rows), operand.shape[d])
    return (first, last) if last > first else (nothing, nothing)
