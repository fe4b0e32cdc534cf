"""The best options of a convolution for every pair of splits of its x and y, exactly and all at once.

Backward-filter shares the beginning of x's conversions with forward and of dy's with backward-data; forward and
backward-data share nothing. So with r the roles of the three phases

    least[x, w, y] = min over r_filter of  filter[x, w, y] + min over r_forward (forward[x, w, y] - saved[x])
                                                           + min over r_data    (data[x, w, y] - saved[y])

where each phase is a sum of a term of x, of w and of y. What is saved depends on r_filter by what it wants of x and of
y alone, so the inner minima are found once for each of these. Memory is what w takes and what forward holds of x: the
conversions that are shared. So options that share as much with as much of w take as much, and of each amount the least
time counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
NEVER = 1 << 59  # picoseconds of what isn't offered: nine times as much stays within 64 bits
APART = -1  # nothing shared, though it could be: x is gathered again


@dataclass(frozen=True, eq=False)
class Sums:
    """A phase's picoseconds as the sum of three tables: [x's split, roles], [w, roles], [y's split, roles]."""

    x: Table
    w: Table
    y: Table

    def only(self, roles: Table) -> Sums:
        return Sums(self.x[:, roles], self.w[:, roles], self.y[:, roles])

    def at(self, x: int, y: int) -> Sums:
        return Sums(self.x[x : x + 1], self.w, self.y[y : y + 1])


@dataclass(frozen=True, eq=False)
class Shared:
    """How many conversions of a tensor backward-filter shares with another phase, and what these are.

    Attributes:
        wants: for each of backward-filter's roles, the number of what it wants of the tensor; these ascend from 0.
        count: [split, roles of the other phase, want]: conversions in common.
        saved: [split, want, count]: picoseconds of so many conversions.
        held: [split, want, count]: bytes that holding their result takes.
    """

    wants: Table
    count: Table
    saved: Table
    held: Table

    def only(self, roles: Table) -> Shared:
        return replace(self, count=self.count[:, roles])

    def at(self, split: int) -> Shared:
        here = slice(split, split + 1)
        return Shared(self.wants, self.count[here], self.saved[here], self.held[here])


@dataclass(frozen=True, eq=False)
class Priced:
    """All that a convolution's options cost.

    Attributes:
        data, y: None where nothing needs dx.
        w_bytes, y_bytes: of parameters, by how w is stored and by y's split.
        apart: whether x may also be gathered again where it could be held.
    """

    forward: Sums
    data: Sums | None
    filter: Sums
    x: Shared
    y: Shared | None
    w_bytes: Table
    y_bytes: Table
    apart: bool

    def without_forward(self, roles: int) -> Priced | None:
        """The options that have other roles in forward; None if there are none."""
        if not (others := [r for r in range(self.forward.x.shape[1]) if r != roles]):
            return None
        rest = np.array(others, dtype=np.int64)
        return replace(self, forward=self.forward.only(rest), x=self.x.only(rest))

    def at(self, x: int, y: int) -> Priced:
        """Of one pair of splits."""
        return replace(
            self,
            forward=self.forward.at(x, y),
            data=self.data.at(x, y) if self.data is not None else None,
            filter=self.filter.at(x, y),
            x=self.x.at(x),
            y=self.y.at(y) if self.y is not None else None,
            y_bytes=self.y_bytes[y : y + 1],
        )


@dataclass(frozen=True, eq=False)
class Best:
    """[x's split, y's split, option]: picoseconds and bytes of the options that no other betters in both, fastest
    first; where a pair has fewer than another, its last repeats."""

    cost: Table
    memory: Table


class Picked(NamedTuple):
    """An option by numbers: of the roles of each phase, of how w is stored, and whether x is gathered again."""

    forward: int
    data: int
    filter: int
    w: int
    apart: bool


def best(priced: Priced) -> Best:
    """The options worth having, for every pair of splits."""
    behind = _behind(priced)
    fronts = [_front(priced, behind[i], i) for i in range(len(priced.x.count))]
    most = max(int(keep.sum(axis=0).max()) for _, _, keep in fronts)
    shape = (len(fronts), len(priced.y_bytes), most)
    cost, memory = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for i, (least, amounts, keep) in enumerate(fronts):
        # Memory ascends, so the last kept is the fastest.
        number = keep.sum(axis=0) - np.cumsum(keep, axis=0)
        amount, y = np.nonzero(keep)
        k = number[amount, y]
        cost[i, y, k], memory[i, y, k] = least[amount, y], amounts[amount]
        for k in range(1, most):
            missing = keep.sum(axis=0) <= k
            cost[i, missing, k], memory[i, missing, k] = cost[i, missing, k - 1], memory[i, missing, k - 1]
    return Best(cost, memory + priced.y_bytes[:, None])


def picked(priced: Priced, x: int, y: int, cost: int, memory: int) -> Iterator[Picked]:
    """Every option that costs and takes so much with one pair of splits."""
    one = priced.at(x, y)
    behind = _behind(one)[0]
    memory -= int(one.y_bytes[0])
    inner = _inner_data(one)
    for want, count, roles, least in _forward(one, 0):
        held = 0 if count == APART else int(one.x.held[0, want, count])
        total = least[:, 0] + behind[:, 0, want]
        saved = 0 if count == APART else int(one.x.saved[0, want, count])
        for w in np.flatnonzero((total == cost) & (one.w_bytes + held == memory)).tolist():
            sums = one.forward.x[0, roles] + one.forward.w[w, roles] + one.forward.y[0, roles] - saved
            first: list[int] = roles[sums == least[w, 0]].tolist()
            whole = one.filter.x[0] + one.filter.w[w] + one.filter.y[0]
            if inner is not None and one.y is not None:
                whole = whole + inner[0, w, 0, one.y.wants]
            last: list[int] = np.flatnonzero((whole == behind[w, 0, want]) & (one.x.wants == want)).tolist()
            for rb in last:
                second = [0]
                if inner is not None and one.y is not None and one.data is not None:
                    less = _saved_y(one.y)[0, one.y.wants[rb]]
                    sums = one.data.x[0] + one.data.w[w] + one.data.y[0] - less
                    second = np.flatnonzero(sums == inner[0, w, 0, one.y.wants[rb]]).tolist()
                yield from (Picked(rf, rd, rb, w, count == APART) for rf in first for rd in second)


def _saved_y(shared: Shared) -> Table:
    """[split, want, roles]: picoseconds."""
    return np.take_along_axis(shared.saved, shared.count.transpose(0, 2, 1), axis=2)


def _inner_data(priced: Priced) -> Table | None:
    """[x, w, y, want of y]: backward-data's least, less what sharing dy saves."""
    if priced.data is None or priced.y is None:
        return None
    data, saved = priced.data, _saved_y(priced.y)
    outer = data.x[:, None] + data.w[None]  # [x, w, roles]
    sums = data.y[:, None] - saved  # [y, want, roles]
    found = np.empty((*outer.shape[:2], *sums.shape[:2]), dtype=np.int64)
    for y in range(len(sums)):
        found[:, :, y] = (outer[:, :, None] + sums[y]).min(axis=-1)
    return found


def _behind(priced: Priced) -> Table:
    """[x, w, y, want of x]: backward-filter's and backward-data's least together."""
    filter_, wants = priced.filter, priced.x.wants
    order = np.argsort(wants, kind="stable")
    first = np.searchsorted(wants[order], np.arange(int(wants.max()) + 1))
    outer = filter_.x[:, None, None] + filter_.w[None, :, None] + filter_.y[None, None]
    inner = _inner_data(priced)
    if inner is not None and priced.y is not None:
        outer += inner[..., priced.y.wants]
    return np.minimum.reduceat(outer[..., order], first, axis=-1)


def _forward(priced: Priced, x: int) -> Iterator[tuple[int, int, Table, Table]]:
    """For each want of x and each count of shared conversions: the roles of forward that share so many, and the least
    [w, y] of them, less what that saves."""
    sums = priced.forward.x[x] + priced.forward.w[:, None] + priced.forward.y
    every = np.flatnonzero(np.ones(sums.shape[-1], dtype=np.bool_))
    for want in range(priced.x.count.shape[-1]):
        counts = priced.x.count[x, :, want]
        for count in np.unique(counts).tolist():
            roles = np.flatnonzero(counts == count)
            least = sums[..., roles].min(axis=-1) - priced.x.saved[x, want, count]
            yield want, count, roles, least
        if priced.apart and counts.any():
            yield want, APART, every, sums.min(axis=-1)


def _front(priced: Priced, behind: Table, x: int) -> tuple[Table, Table, NDArray[np.bool_]]:
    """[amount, y]: the least time of each amount of memory, the amounts, and which are worth having."""
    taken: list[Table] = []
    totals: list[Table] = []
    for want, count, _, least in _forward(priced, x):
        held = 0 if count == APART else priced.x.held[x, want, count]
        taken.append(priced.w_bytes + held)
        totals.append(least + behind[..., want])
    memory, total = np.concatenate(taken), np.concatenate(totals)
    order = np.argsort(memory, kind="stable")
    amounts, first = np.unique(memory[order], return_index=True)
    least = np.minimum.reduceat(total[order], first, axis=0)
    keep = np.ones(least.shape, dtype=np.bool_)
    keep[1:] = least[1:] < np.minimum.accumulate(least, axis=0)[:-1]
    keep &= least < NEVER
    return least, amounts, keep
