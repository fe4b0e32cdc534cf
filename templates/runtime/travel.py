# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""From one layout of a network's value to another, and gradients the way back."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.algebra.layout import Axes

from .blocks import Unmapped
from .buckets import Buckets
from .conversions import (
    all_gather,
    all_reduce,
    flat,
    named,
    pack,
    rearrange,
    reduce_scatter,
    take,
    unflat,
    within,
)
from .here import Here, held_at
from .lanes import noted
from .layout import Box, common
from .transport import Group


class Move(NamedTuple):
    """A step between two layouts, over the ranks that differ along some axes. `exchange_add` sums parts that overlap,
    `merge` moments of disjoint parts."""

    kind: str
    over: Axes
    src: Any
    dst: Any
    step: str


Chain = tuple[Move, ...]


class RowHere(Here):
    """This rank in a row: its values need not have the network's dtype."""

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
        return Group(
            tuple(self.place.ranks[p] for p in self.members(axes)), self.layer.sums, cast(Any, self.layer).wide
        )


def moved(tensor: Tensor, there: Chain, back: Chain, here: RowHere, buckets: Buckets | None = None) -> Tensor:
    """A tensor in another layout; its gradient comes the way back, in buckets where these take it."""
    if not there and not back:
        return tensor
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return travel(tensor, there, here, buckets)
    return Travel.apply(tensor, there, back, here, buckets)


class Travel(Unmapped):
    """Conversions one way, and those of the gradient the other way."""

    @staticmethod
    def forward(tensor: Tensor, there: Chain, back: Chain, here: RowHere, buckets: Buckets | None) -> Tensor:
        made = travel(tensor, there, here, buckets)
        return made.view_as(made) if made is tensor else made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.there, ctx.back, ctx.here, ctx.buckets = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dx = Travel.apply(gradient.contiguous(), ctx.back, ctx.there, ctx.here, ctx.buckets)
        return dx, None, None, None, None


def travel(tensor: Tensor, chain: Chain, here: RowHere, buckets: Buckets | None = None) -> Tensor:
    """One conversion after the other; a gradient that is in a bucket is handed in."""
    for move in chain:
        if tensor.dtype == torch.bool:
            return travel(tensor.to(torch.uint8), chain, here).bool()
        if buckets is not None and move.step in buckets:
            return buckets.give(move.step, tensor)
        with noted("move", move.step):
            tensor = converted(tensor.contiguous(), move, here)
    return tensor


def converted(tensor: Tensor, move: Move, here: RowHere) -> Tensor:
    """A tensor after one conversion."""
    kind, over, src, dst, step = move
    if kind in ("exchange", "exchange_add") and cast(Any, here.layer).is_still(move):
        return placed(tensor, here.held(src), here.held(dst))
    match kind:
        case "slice":
            return take(tensor, src, dst, here)
        case "all_gather":
            return all_gather(step, tensor, src, dst, over, here)
        case "reduce_scatter":
            return reduce_scatter(step, tensor, src, dst, over, here)
        case "all_reduce":
            return all_reduce(step, tensor, src, dst, over, here)
        case "exchange_add":
            return exchange_add(step, tensor, src, dst, over, here)
        case "merge":
            return merge(step, tensor, over, here)
        case _:
            return rearrange(step, kind, tensor, src, dst, over, here)


def placed(value: Tensor, held: Box, kept: Box) -> Tensor:
    """What a rank keeps of what it holds; zeros where it holds nothing."""
    mine = common(held, kept)
    if mine == kept:
        return within(value, held, kept)
    out = value.new_zeros([hi - lo for lo, hi in kept])
    if all(hi > lo for lo, hi in mine):
        within(out, kept, mine).copy_(within(value, held, mine))
    return out


def exchange_add(step: str, value: Tensor, src: Any, dst: Any, axes: Axes, here: RowHere) -> Tensor:
    """Parts that overlap, added where they are stored: in rank order, in a wide type, rounded once."""
    stand, me = here.layer, here.place.me
    held, kept = here.held(src), here.held(dst)
    peers = here.members(axes)
    nothing = tuple((0, 0) for _ in held)
    sends = [nothing if p == me else common(held, held_at(stand, dst, p, 0)) for p in peers]
    receives = [nothing if p == me else common(held_at(stand, src, p, 0), kept) for p in peers]
    splits = [stand.size(b, "") for b in sends], [stand.size(b, "") for b in receives]
    packed = pack(value, held, sends, "", stand)
    with named(step, "exchange", axes, here):
        got = here.place.transport.exchange(packed, splits, here.group(axes))
    total = torch.zeros(here.shape(dst), dtype=here.group(axes).wide, device=value.device)
    for p, piece, box in zip(peers, got.split(splits[1]), receives, strict=True):
        mine = common(held, kept) if p == me else box
        if stand.size(mine, ""):
            addend = within(value, held, mine) if p == me else unflat(piece, stand.shape(mine, ""), stand)
            within(total, kept, mine).add_(addend)
    return total.to(value.dtype)


def merge(step: str, value: Tensor, axes: Axes, here: RowHere) -> Tensor:
    """Moments [count, mean, M2] of the union of the ranks' parts, the same on all. Counts don't travel."""
    group, own = here.group(axes), value[1:].contiguous()
    with named(step, "all_gather", axes, here):
        got = here.place.transport.all_gather(flat(own, here.layer), [own.numel()] * len(group.ranks), group)
    mean, m2 = got.view(len(group.ranks), *own.shape).unbind(1)
    count = cast(Any, here.layer).counts(here.members(axes), value.device, value.dtype)
    total = count.sum(0)
    whole = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, whole, (m2 + count * (mean - whole).square()).sum(0)])
