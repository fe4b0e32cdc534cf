# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private)
"""Conversions of a network's value from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.algebra.layout import Axes
from convgen.operations.rimmed import Rimmed, RimPlaces, of_parts, to_parts
from convgen.operations.row import empty_as

from .conversions import all_gather, consecutive, failure, missing, reduce_scatter, take, within
from .here import Here, held_at
from .layout import Box, common, ith_part
from .transport import Group, wide_type


class Move(NamedTuple):
    """A conversion between two layouts, over the ranks that differ along some axes. `exchange_add` sums parts that
    overlap, `exchange_rim` leaves a halo beside the block, `all_gather_parts` and `reduce_scatter_parts` have channels
    in parts that lie one behind the other, `merge` makes moments of a union of moments of disjoint parts. `dtype` is
    the type in which the tensor travels, if not its own."""

    kind: str
    over: Axes
    src: Any
    dst: Any
    step: str
    dtype: torch.dtype | None = None


Chain = tuple[Move, ...]


class RowHere(Here):
    """This rank, as conversions of a row see it; the row's values need not have the network's dtype."""

    __slots__ = ()

    def empty(self, layout: Any, like: Tensor, padded: bool = False) -> Tensor:
        return like.new_zeros(self.shape(layout)) if padded else like.new_empty(self.shape(layout))

    def frame(self, layout: Any) -> Box:
        return super().frame(layout)

    def held(self, layout: Any) -> Box:
        return super().held(layout)

    def shape(self, layout: Any) -> tuple[int, ...]:
        return super().shape(layout)

    def group(self, axes: Axes) -> Group:
        return Group(tuple(self.place.ranks[p] for p in self.members(axes)), self.layer.sums, self.layer.add)


Moving = Callable[[Tensor], Any]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Slices = tuple[slice, ...]
OF_BOXES = ("exchange", "exchange_add", "all_to_all")  # these move boxes, whose channels stay where they are in memory


def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A tensor without gaps in memory. On a GPU channels are last where they are last in the tensor, or in `like`.

    On a CPU channels come first: with channels last ATen takes longer there, and gets some results wrong
    (operations/moments.py).
    """
    last = None if tensor.is_cpu else CHANNELS_LAST.get(tensor.dim())
    lies = tensor if like is None else like
    if last is not None and lies.is_contiguous(memory_format=last) and not lies.is_contiguous():
        return tensor.contiguous(memory_format=last)
    return tensor.contiguous()


def fills(tensor: Tensor) -> bool:
    """Whether the elements lie one behind the other in memory, whatever the order of the dimensions."""
    last = CHANNELS_LAST.get(tensor.dim())
    if tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last)):
        return True
    there = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride != there:
                return False
            there *= n
    return True


def flat_as(tensor: Tensor, last: bool) -> Tensor:
    """The elements of a tensor as a flat one; with `last`, images and volumes are read with channels last."""
    return (tensor.movedim(1, -1) if last and tensor.dim() in CHANNELS_LAST else tensor).reshape(-1)


def unflat_as(flat: Tensor, shape: Sequence[int], last: bool) -> Tensor:
    """The opposite of `flat_as`: a view of flat elements as a tensor of this shape."""
    if not last or len(shape) not in CHANNELS_LAST:
        return flat.view(tuple(shape))
    n, channels, *rows = shape
    return flat.view(n, *rows, channels).movedim(-1, 1)


def way_of(move: Move, here: RowHere) -> Moving:
    """The function that does a conversion on this rank, for tensors of any type; boxes, splits and groups are made
    once."""
    over, step = move.over, move.step
    way, kind = _way(move, here)
    memory = CHANNELS_LAST if move.kind.endswith(("_rim", "_parts")) else {}
    of_boxes = move.kind in OF_BOXES

    def travel(tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return travel(tensor.to(torch.uint8)).bool()
        if move.dtype not in (None, tensor.dtype):
            return travel(tensor.to(move.dtype)).to(tensor.dtype)
        if not kind:
            return way(dense(tensor))
        try:
            lying = memory.get(tensor.dim(), torch.contiguous_format)
            return way(dense(tensor) if of_boxes else tensor.contiguous(memory_format=lying))
        except Exception as error:
            what = f"step %{step} = {kind} over {','.join(over)}"
            raise failure(what, here, here.group(over).ranks, error) from error

    return travel


def _way(move: Move, here: RowHere) -> tuple[Moving, str]:
    """The conversion's function, and the transport's collective that it calls, for errors; "" where the function names
    its errors itself, or sends nothing."""
    kind, over, src, dst, step, _ = move
    if kind in ("exchange", "exchange_add") and cast(Any, here.layer).is_still(move):
        return lambda tensor: placed(tensor, here.held(src), here.held(dst)), ""
    group, splits = here.group(over), [here.layer.size(held_at(here.layer, src, p, 0), "") for p in here.members(over)]
    transport, shape = here.place.transport, here.shape(dst)
    match kind:
        case "slice":
            return lambda tensor: take(tensor, src, dst, here), ""
        case "all_reduce":
            count = math.prod(here.shape(src))
            parts = [hi - lo for lo, hi in (ith_part(0, count, len(splits), i) for i in range(len(splits)))]
            return lambda tensor: transport.all_reduce(tensor.view(-1), parts, group).view(shape), kind
        case "exchange_add":
            return _adding(move, here), "exchange"
        case "merge":
            return lambda tensor: merged(tensor, splits, over, here), "all_gather"
        case "exchange_rim":
            return _with_rim(move, here), "exchange"
        case "all_gather_parts":
            return lambda tensor: transport.all_gather(to_parts(tensor, 1), splits, group), "all_gather"
        case "reduce_scatter_parts":
            return _scattering(move, here), "reduce_scatter"
        case "exchange" | "all_to_all":
            return _exchanging(move, here), kind
        case "all_gather":
            return lambda tensor: all_gather(step, tensor, src, dst, over, here), ""
        case _:
            return lambda tensor: reduce_scatter(step, tensor, src, dst, over, here), ""


def slices(outer: Box, inner: Box) -> Slices:
    """A box as slices of the piece that stands at `outer`."""
    return tuple([slice(lo - start, max(hi, lo) - start) for (start, _), (lo, hi) in zip(outer, inner, strict=True)])


class Packing:
    """Packs boxes of a piece into one flat tensor, one behind the other, and unpacks them.

    Args:
        outer: where the piece stands; `boxes`: one for each rank of a group.
        last: whether elements are packed with channels last.
    """

    def __init__(self, outer: Box, boxes: Sequence[Box], layer: Any, *, last: bool = False) -> None:
        self.sizes, self.last = [layer.size(box, "") for box in boxes], last
        self.is_flat = not last and consecutive(boxes, outer, "", layer)
        self.parts = [
            (slices(outer, box), n, layer.shape(box, "")) for box, n in zip(boxes, self.sizes, strict=True) if n
        ]

    def packed(self, tensor: Tensor) -> Tensor:
        if self.is_flat and tensor.is_contiguous():
            return tensor.view(-1)
        tensors = [tensor[where] for where, *_ in self.parts]
        parts = [(t.movedim(1, -1) if self.last else t).reshape(-1) for t in tensors]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous() if parts else tensor.new_empty(0)

    def unpack(self, elements: Tensor, tensor: Tensor) -> None:
        """Copy flat elements to their boxes' places in a piece."""
        at = 0
        for where, n, shape in self.parts:
            tensor[where].copy_(elements.narrow(0, at, n).view(shape))
            at += n


def _exchanging(move: Move, here: RowHere) -> Moving:
    """The function by which each rank gets what it needs and doesn't own from the rank of the group that owns it."""
    kind, over, src, dst, *_ = move
    sends, receives = missing(src, dst, over, here)
    whole, need, frame = here.frame(dst), here.held(dst), here.frame(src)
    given, got = Packing(frame, sends, here.layer), Packing(whole, receives, here.layer)
    mine, shape, group = common(here.held(src), need), here.shape(dst), here.group(over)
    to, own, padded, splits = slices(whole, mine), slices(frame, mine), whole != need, (given.sizes, got.sizes)
    has_own = bool(here.layer.size(mine, ""))
    transport = here.place.transport
    send = transport.all_to_all if kind == "all_to_all" else transport.exchange

    def way(tensor: Tensor) -> Tensor:
        there = send(given.packed(tensor), splits, group)
        out = empty_as(tensor, shape)
        if padded:
            out.zero_()
        if has_own:
            out[to].copy_(tensor[own])
        got.unpack(there, out)
        return out

    return way


def _with_rim(move: Move, here: RowHere) -> Moving:
    """The function by which each rank gets what it needs and doesn't own, and keeps it as it arrives, box behind box,
    beside its own block."""
    (sends, receives), own = missing(move.src, move.dst, move.over, here), here.held(move.src)
    around = RimPlaces(here.held(move.dst), own, receives)
    given = Packing(own, sends, here.layer, last=around.last)
    splits = given.sizes, [here.layer.size(box, "") for box in receives]
    transport, group = here.place.transport, here.group(move.over)
    return lambda tensor: Rimmed(tensor, transport.exchange(given.packed(tensor), splits, group), around)


def _scattering(move: Move, here: RowHere) -> Moving:
    """The function by which each rank gets its part of a sum. Addends lie in parts, flat; the zeros of a rank that
    computes nothing come as a tensor in its shape."""
    shape, group, transport = here.shape(move.dst), here.group(move.over), here.place.transport
    count = len(group.ranks)
    splits = [math.prod(shape)] * count

    def way(tensor: Tensor) -> Tensor:
        packed = tensor if tensor.dim() == 1 else to_parts(tensor, count)
        return of_parts(transport.reduce_scatter(packed, splits, group), 1, shape)

    return way


def placed(value: Tensor, held: Box, kept: Box) -> Tensor:
    """The box that a rank keeps, cut from what it holds; zeros where it holds nothing."""
    mine = common(held, kept)
    if mine == kept:
        return within(value, held, kept)
    out = value.new_zeros([hi - lo for lo, hi in kept])
    if all(hi > lo for lo, hi in mine):
        within(out, kept, mine).copy_(within(value, held, mine))
    return out


class Cell(NamedTuple):
    """A box of which several ranks have addends.

    Attributes:
        at: where the box stands in what this rank keeps.
        addends: in rank order, a rank's number in the group and where the box stands in what comes from that rank; the
            number is None for this rank itself.
    """

    at: Slices
    addends: tuple[tuple[int | None, Slices], ...]


MOST_CELLS = 4  # at most so many cells of more than two addends: each addend of a cell is a launch


def cells_of(kept: Box, boxes: Sequence[Box | None]) -> list[Cell]:
    """The boxes of what a rank keeps to which others have addends, too.

    Args:
        boxes: in rank order, the box to which each rank has addends; None for this rank itself, which has one to all
            that it keeps.
    """
    come = [box for box in boxes if box is not None and all(hi > lo for lo, hi in box)]
    cuts = [sorted({*side, *(v for box in come for v in box[d])}) for d, side in enumerate(kept)]
    found: list[Cell] = []
    for cell in product(*(pairwise(side) for side in cuts)):
        has: list[tuple[int | None, Slices]] = []
        for k, box in enumerate(boxes):
            if box is None:
                has.append((None, ()))
            elif common(box, cell) == cell:
                has.append((k, slices(box, cell)))
        if len(has) > 1:
            found.append(Cell(slices(kept, cell), tuple(has)))
    return found


def add_up(into: Tensor, addends: Sequence[Tensor], wide: torch.dtype) -> None:
    """Write into `into`, which is one of the addends, their sum: added in this order in a wide type, rounded once."""
    first, *others = addends
    if len(others) == 1:  # the order of two doesn't matter, and ATen adds them in a wide type
        into.add_(others[0] if first is into else first)
        return
    total = first.to(wide, copy=True)
    for one in others:
        total.add_(one)
    into.copy_(total)


def _adding(move: Move, here: RowHere) -> Moving:
    """The function that adds overlapping parts where they are stored: in rank order, in a wide type, rounded once."""
    stand, me, src, dst = here.layer, here.place.me, move.src, move.dst
    held, kept, peers = here.held(src), here.held(dst), here.members(move.over)
    nothing = tuple((0, 0) for _ in held)
    sends = [nothing if p == me else common(held, held_at(stand, dst, p, 0)) for p in peers]
    receives = [nothing if p == me else common(held_at(stand, src, p, 0), kept) for p in peers]
    given, sizes = Packing(held, sends, stand), [stand.size(b, "") for b in receives]
    addends: list[tuple[Slices, Slices | None, int, int, tuple[int, ...]]] = []
    at = 0
    for p, box, n in zip(peers, receives, sizes, strict=True):
        mine = common(held, kept) if p == me else box
        if stand.size(mine, ""):
            own = slices(held, mine) if p == me else None
            addends.append((slices(kept, mine), own, at, n, stand.shape(mine, "")))
        at += n
    group, shape, transport = here.group(move.over), here.shape(dst), here.place.transport
    cells = cells_of(kept, [None if p == me else box for p, box in zip(peers, receives, strict=True)])
    fits = common(held, kept) == kept and sum(len(c.addends) > 2 for c in cells) <= MOST_CELLS
    whole, parts_of = slices(held, kept) if fits else None, [stand.shape(box, "") for box in receives]

    def way(tensor: Tensor) -> Tensor:
        got, wide = transport.exchange(given.packed(tensor), (given.sizes, sizes), group), wide_type(tensor.dtype)
        if whole is not None:  # only the cells, to which others have addends, are written twice
            out = empty_as(tensor, shape).copy_(tensor[whole])
            come = [t.view(part) if t.numel() else t for t, part in zip(got.split(sizes), parts_of, strict=True)]
            for cell in cells:
                rows = out[cell.at]
                add_up(rows, [rows if k is None else come[k][where] for k, where in cell.addends], wide)
            return out
        total = empty_as(tensor, shape, wide).zero_()
        for to, own, start, n, part in addends:
            total[to].add_(got.narrow(0, start, n).view(part) if own is None else tensor[own])
        return total.to(tensor.dtype)

    return way


def merged(value: Tensor, splits: Sequence[int], axes: Axes, here: RowHere) -> Tensor:
    """Moments [count, mean, M2] of the union of the ranks' parts, the same on all. Counts don't travel."""
    group, own = here.group(axes), value[1:].contiguous()
    got = here.place.transport.all_gather(own.view(-1), [own.numel()] * len(splits), group)
    mean, m2 = got.view(len(splits), *own.shape).unbind(1)
    count = cast(Any, here.layer).counts(here.members(axes), value.device, value.dtype)
    total = count.sum(0)
    whole = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, whole, (m2 + count * (mean - whole).square()).sum(0)])
