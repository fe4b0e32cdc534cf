"""The busiest rank of a conversion: what it sends and receives, in elements; and the messages of an exchange."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import Uneven
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import overlapping, plain_axes, plainly
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, Kind
from convgen.cost.exchanges import exchange_traffic
from convgen.cost.traffic import elements_received, elements_sent

MANY, LAST = 256, 64  # on more ranks than MANY, conversions of the LAST tensors are remembered
Counts = NDArray[np.int64]


def sent_elements(sets: IndexSets, c: Conversion) -> Counts:
    """Elements that leave each rank."""
    if c.kind == "exchange" and c.reduction is not None:
        return _flows(sets, c.src, c.dst, adds=True)[0][0].sum(axis=1)
    return travelling(elements_sent(sets, c.kind, c.over, c.src, c.dst), c)


Elements = TypeVar("Elements", int, Counts)


def travelling(elements: Elements, c: Conversion) -> Elements:
    """Elements that travel: of moments, (count, mean, M2), ranks know the counts."""
    return elements // 3 * 2 if c.reduction == "merge" else elements


@lru_cache(maxsize=1 << 16)
def busiest(sets: IndexSets, kind: Kind, over: Axes, src: Layout, dst: Layout) -> tuple[int, int]:
    """The most elements that a rank sends in a collective, and sends or receives; in an all-reduce, that it holds."""
    if (plain := plainly(sets, src, dst)) is not None:
        return busiest(plain[0], kind, plain_axes(over, sets.grid), *plain[1:])
    held = _even(sets, src)
    if kind == "all_reduce":
        whole = int(sets.elements(src).max()) if held is None else held
        return whole, whole
    if kind in ("all_gather", "reduce_scatter") and held is not None and (there := _even(sets, dst)) is not None:
        several = (sets.grid.over(over) - 1) * min(held, there)
        return several, several
    what = (sets, kind, over, src, dst)
    sent = elements_sent(*what)
    found = int(sent.max()), int(np.maximum(sent, elements_received(*what)).max())
    _let_go(sets)
    return found


def _even(sets: IndexSets, layout: Layout) -> int | None:
    """Elements of each rank, where all ranks have as many by the block rule; else None."""
    if layout.has_window:
        return None
    count = sets.weight(layout.tensor)
    for dim, axes in zip(sets.dims(layout.tensor), layout.axes, strict=True):
        parts, shares = sets.grid.over(axes), any(isinstance(sets.grid.sizes[a], Uneven) for a in axes)
        if dim.groups > 1 or shares or dim.extent % parts:
            return None
        count *= dim.extent // parts
    return count


@lru_cache(maxsize=1 << 16)
def most_traffic(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[int, int, int]:
    """`exchange_traffic`, remembered."""
    if (plain := plainly(sets, src, dst)) is not None:
        return most_traffic(*plain, adds=adds)
    found = exchange_traffic(sets, src, dst, adds=adds)
    _let_go(sets)
    return found


def _let_go(sets: IndexSets) -> None:
    """Forget all but the last few tensors on many ranks: thousands of conversions would fill the memory."""
    if sets.grid.ranks > MANY:
        _last.pop(sets, None)
        _last[sets] = None
        if len(_last) > LAST:
            next(iter(_last)).forget()
            del _last[next(iter(_last))]


_last: dict[IndexSets, None] = {}


@lru_cache(maxsize=1 << 14)
def messages(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[Counts, Counts, Counts]:
    """The messages of an exchange: elements, sender and receiver of each.

    Args:
        adds: whether ranks hold overlapping parts, which are added where they are stored.
    """
    if (plain := plainly(sets, src, dst)) is not None:
        return messages(*plain, adds=adds)
    flows, members = _flows(sets, src, dst, adds=adds)
    group, one, other = np.nonzero(flows)
    return flows[group, one, other], members[group, one], members[group, other]


def _flows(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool) -> tuple[Counts, Counts]:
    """Elements that ranks send each other, [groups, from, to], and the ranks of each group."""
    if not adds:
        members, flows = sets.flows(src, dst)
        return flows, members
    flows = overlapping(sets, src, dst)
    np.fill_diagonal(flows, 0)
    return flows[None], np.arange(sets.grid.ranks)[None]
