# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Conversions of a layer's tensor from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from .here import Here, frame_at, held_at
from .layout import Box, Layout, common, ith_part
from .transport import TIMED_OUT

if TYPE_CHECKING:
    from .layer import Layer


def within(tensor: Tensor, outer: Box, inner: Box) -> Tensor:
    """The view of a piece that sits at `outer` on the elements of `inner`."""
    pairs = zip(outer, inner, strict=False)  # kernel dimensions are whole in either
    return tensor[tuple(slice(lo - start, max(hi, lo) - start) for (start, _), (lo, hi) in pairs)]


def flat(tensor: Tensor, layer: Layer) -> Tensor:
    """A tensor's elements as a flat one, in memory order; a view where they lie side by side."""
    return (tensor.movedim(1, -1) if layer.channels_last and tensor.dim() > 1 else tensor).reshape(-1).contiguous()


def unflat(elements: Tensor, shape: tuple[int, ...], layer: Layer) -> Tensor:
    """A flat run of elements in memory order as a piece of this shape."""
    if not layer.channels_last or len(shape) == 1:
        return elements.view(shape)
    return elements.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def copy_parts(
    buffer: Tensor, tensor: Tensor, outer: Box, pieces: tuple[Box, ...], name: str, layer: Layer, unpack: bool
) -> None:
    """Copy pieces of a tensor to a flat buffer, one behind the other, or with `unpack` from there to their places."""
    for part, piece in zip(buffer.split([layer.size(p, name) for p in pieces]), pieces, strict=True):
        if part.numel():
            run, place = unflat(part, layer.shape(piece, name), layer), within(tensor, outer, piece)
            place.copy_(run) if unpack else run.copy_(place)


def consecutive(pieces: Sequence[Box], whole: Box, tensor: str, layer: Layer) -> bool:
    """Whether the pieces, in order, are the whole in memory order: then neither packing nor unpacking copies."""
    last = layer.channels_last and len(whole) > 1
    order = [0, *range(2, len(whole)), 1] if last else list(range(len(whole)))  # slowest first
    split = [d for d in order if any(p[d] != whole[d] for p in pieces)]
    if len(split) != 1:
        return False
    (d,) = split
    if last and tensor == "w" and d == 1 and math.prod(layer.kernel) > 1:  # taps lie between
        return False
    outer = order[: order.index(d)]
    ends = [whole[d][0], *(p[d][1] for p in pieces)]
    return (
        all(whole[o][1] - whole[o][0] == 1 for o in outer)
        and all(p[d][0] == end for p, end in zip(pieces, ends, strict=False))
        and ends[-1] == whole[d][1]
    )


def pack(tensor: Tensor, outer: Box, pieces: Sequence[Box], name: str, layer: Layer) -> Tensor:
    """The pieces of a tensor, one behind the other, flat."""
    if consecutive(pieces, outer, name, layer):
        return flat(tensor, layer)
    out = tensor.new_empty(sum(layer.size(p, name) for p in pieces))
    layer.copy(out, tensor, outer, tuple(pieces), name, layer, unpack=False)
    return out


def all_gather(step: str, value: Tensor, src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> Tensor:
    """Every rank of the group gets the blocks of all; rows of padding stay where they are."""
    layer, whole, own = here.layer, here.frame(dst), here.held(src)
    pieces = [held_at(layer, src, p, here.batch) for p in here.members(axes)]
    splits = [layer.size(p, src.tensor) for p in pieces]
    with named(step, "all_gather", axes, here):
        got = here.place.transport.all_gather(
            flat(within(value, here.frame(src), own), layer), splits, here.group(axes)
        )
    if consecutive(pieces, whole, src.tensor, layer):
        return unflat(got, here.shape(dst), layer)
    out = here.empty(dst, value, padded=whole != here.held(dst))
    layer.copy(got, out, whole, tuple(pieces), src.tensor, layer, unpack=True)
    return out


def all_gather_parts(step: str, value: Tensor, src: Layout, axes: tuple[str, ...], here: Here) -> Tensor:
    """Every rank of the group gets the blocks of all, one behind the other as they arrive."""
    layer = here.layer
    splits = [layer.size(held_at(layer, src, p, here.batch), src.tensor) for p in here.members(axes)]
    with named(step, "all_gather", axes, here):
        return here.place.transport.all_gather(flat(value, layer), splits, here.group(axes))


def reduce_scatter(step: str, value: Tensor, src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> Tensor:
    """Sum over the group; every rank keeps its block of the sum. A flat value is in the parts that ranks keep."""
    layer = here.layer
    pieces = [frame_at(layer, dst, p, here.batch) for p in here.members(axes)]
    whole = here.frame(src)
    packed = value if value.dim() < len(whole) else pack(value, whole, pieces, src.tensor, layer)
    with named(step, "reduce_scatter", axes, here):
        splits = [layer.size(p, src.tensor) for p in pieces]
        got = here.place.transport.reduce_scatter(packed, splits, here.group(axes))
    return unflat(got, here.shape(dst), layer)


def all_reduce(step: str, value: Tensor, src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> Tensor:
    """Sum over the group; every rank gets all of it."""
    group = here.group(axes)
    splits = [hi - lo for lo, hi in (ith_part(0, value.numel(), len(group.ranks), i) for i in range(len(group.ranks)))]
    with named(step, "all_reduce", axes, here):
        got = here.place.transport.all_reduce(flat(value, here.layer), splits, group)
    return unflat(got, here.shape(dst), here.layer)


def missing(src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> tuple[list[Box], list[Box]]:
    """For each rank of the group, the box that this rank owns and the other needs, and the box that this one needs and
    the other owns."""
    layer, me, batch = here.layer, here.place.me, here.batch
    own, need = here.held(src), here.held(dst)
    nothing = tuple((0, 0) for _ in own)
    peers = here.members(axes)
    sends = [nothing if p == me else common(own, held_at(layer, dst, p, batch)) for p in peers]
    receives = [nothing if p == me else common(held_at(layer, src, p, batch), need) for p in peers]
    return sends, receives


def exchange_rim(step: str, value: Tensor, src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> Tensor:
    """The boxes of a window that this rank needs and doesn't own, one behind the other as they arrive."""
    sends, receives = missing(src, dst, axes, here)
    size, name = here.layer.size, src.tensor
    splits = [size(b, name) for b in sends], [size(b, name) for b in receives]
    packed = pack(value, here.held(src), sends, name, here.layer)
    with named(step, "exchange", axes, here):
        return here.place.transport.exchange(packed, splits, here.group(axes))


def rim_size(src: Layout, dst: Layout, axes: tuple[str, ...], here: Here) -> int:
    """How many elements exchange_rim receives."""
    _, receives = missing(src, dst, axes, here)
    return sum(here.layer.size(b, src.tensor) for b in receives)


def rearrange(
    step: str, kind: str, value: Tensor, src: Layout, dst: Layout, axes: tuple[str, ...], here: Here
) -> Tensor:
    """Move what each rank needs and does not own from the rank of the group that owns it: a halo, a transposition."""
    layer, name = here.layer, src.tensor
    sends, receives = missing(src, dst, axes, here)
    splits = [layer.size(b, name) for b in sends], [layer.size(b, name) for b in receives]
    packed = pack(value, here.frame(src), sends, name, layer)
    with named(step, kind, axes, here):
        transport = here.place.transport
        move = transport.all_to_all if kind == "all_to_all" else transport.exchange
        got = move(packed, splits, here.group(axes))
    del packed
    whole, need = here.frame(dst), here.held(dst)
    out = here.empty(dst, value, padded=whole != need)
    mine = common(here.held(src), need)
    if layer.size(mine, name):
        within(out, whole, mine).copy_(within(value, here.frame(src), mine))
    layer.copy(got, out, whole, tuple(receives), name, layer, unpack=True)
    return out


def take(value: Tensor, src: Layout, dst: Layout, here: Here) -> Tensor:
    """The part of a piece that another layout wants; a view, or a copy where rows of padding are added."""
    whole, need, own = here.frame(dst), here.held(dst), here.frame(src)
    if whole == need == common(own, need):
        return within(value, own, need)
    out = here.empty(dst, value, padded=True)
    if here.layer.size(need, src.tensor):
        within(out, whole, need).copy_(within(value, own, need))
    return out


@contextmanager
def named(step: str, kind: str, axes: tuple[str, ...], here: Here) -> Generator[None]:
    """A context in which a transport's errors begin with which ranks did not come to which step of the schedule."""
    try:
        yield
    except Exception as error:
        what = f"step %{step} = {kind} over {','.join(axes)}"
        raise failure(what, here, here.group(axes).ranks, error) from error


def failure(what: str, here: Here, ranks: Sequence[int], error: Exception) -> Exception:
    """The error to raise for a transport's: it says which of these ranks did not come to `what`, then the transport's
    own words."""
    name, ask = here.layer.name, getattr(here.place.transport, "absent", None)
    absent = ask(f"{name} {what}", ranks) if ask else []
    who = f"ranks {absent} did not come to " if absent else ""
    late = isinstance(error, TimeoutError) or TIMED_OUT.search(str(error))
    return (TimeoutError if late else RuntimeError)(f"{name}: {who}{what}: {error}")
