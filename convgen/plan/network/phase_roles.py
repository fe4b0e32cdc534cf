"""Which roles a phase by itself may have, and how w may be stored: what suits some way to store x and y.

In closed form for all role assignments, all splits of x and all of y at once: to prune by, not to plan with. A phase
costs its slowest rank's roofline and, for each tensor that it reads or makes otherwise than stored, a ring over the
axes that move. For every pair of splits this gives the best roles of each phase, backward-filter's reading of x and dy
shared with the other two where these want the same, and the best storage of w for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.conv import Conv
from convgen.plan.network.estimate import Floats, assignments, axis_lines, blocks_of, fitting
from convgen.plan.network.setting import Setting
from convgen.spec.layer import DTYPE_BYTES

MOST_PAIRS = 64
Letters = tuple[str, ...]  # the role of each axis of a grid, "" for none
Places = tuple[int, ...]  # the dimension that each axis splits, -1 for none
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Triple:
    """Roles of forward, backward-data and backward-filter, and the dimensions of w that each axis splits."""

    forward: Letters
    data: Letters
    filter: Letters
    w: Places


def triples(
    conv: Conv,
    sizes: tuple[int, ...],
    setting: Setting,
    dtype: str,
    xs: Sequence[Places],
    ys: Sequence[Places],
    *,
    dx: bool,
) -> Iterator[Triple]:
    """The best choice for pairs of splits of x and y, the cheapest pairs first, MOST_PAIRS of them."""
    known = _assigned(conv, sizes, setting, dtype)
    x, y = np.array(xs, dtype=np.int64), np.array(ys, dtype=np.int64)
    reads_x, reads_y = known.read(x, "x"), known.read(y, "y")
    forward = known.local_s + known.halo_s["x"] + (reads_x[:, None] + known.made(y, "y")[None])
    data = known.local_s + known.halo_s["y"] + (reads_y[None] + known.made(x, "x")[:, None])
    data *= dx
    filter_ = known.local_s + known.reduced_s + (reads_x[:, None] + reads_y[None])
    filter_ += np.minimum(forward.min(-1)[..., None], known.best_alike(forward, "x") - reads_x[:, None])
    if dx:
        filter_ += np.minimum(data.min(-1)[..., None], known.best_alike(data, "y") - reads_y[None])
    chosen = filter_.argmin(-1)
    seen: set[tuple[int, int, int]] = set()
    for flat in np.argsort(filter_.min(-1), axis=None, kind="stable")[:MOST_PAIRS].tolist():
        i, j = divmod(flat, len(ys))
        rb = int(chosen[i, j])
        alike = {t: known.wants[t] == known.wants[t][rb] for t in "xy"}
        rf = int((forward[i, j] - np.where(alike["x"], reads_x[i, rb], 0)).argmin())
        rd = int((data[i, j] - np.where(alike["y"], reads_y[j, rb], 0)).argmin()) if dx else rf
        if (rf, rd, rb) not in seen:
            seen.add((rf, rd, rb))
            yield known.triple(rf, rd, rb, dx=dx)


def triple_of(
    conv: Conv, sizes: tuple[int, ...], setting: Setting, dtype: str, letters: Letters, *, dx: bool
) -> Triple:
    """The same roles in all phases, and how w is best stored for them."""
    known = _assigned(conv, sizes, setting, dtype)
    if letters not in known.number:
        return Triple(letters, letters, letters, (-1,) * len(letters))
    r = known.number[letters]
    return known.triple(r, r, r, dx=dx)


class _Assigned:
    """Every role assignment that leaves no rank empty, and what it wants of each tensor."""

    def __init__(self, conv: Conv, sizes: tuple[int, ...], setting: Setting, dtype: str) -> None:
        known = ("N", *(("G",) if conv.groups > 1 else ("C", "F")), *conv.letters, "")
        assigned, place, degrees = assignments(known, sizes)
        fits = fitting(conv, dict(zip(known, degrees.T, strict=True)))
        kept: list[int] = np.flatnonzero(fits).tolist()
        self.letters = tuple(assigned[i] for i in kept)
        self.number = {letters: i for i, letters in enumerate(self.letters)}
        self.sizes = np.array(sizes, dtype=np.int64)
        self.alpha, self.beta = np.array(axis_lines(sizes, setting.machine)).reshape(len(sizes), 2).T
        self.element_bytes = DTYPE_BYTES[dtype]
        blocks = blocks_of(conv, {k: v[fits] for k, v in zip(known, degrees.T, strict=True)})
        self.elements = {"x": blocks.x, "w": blocks.w, "y": blocks.y}
        self.local_s = blocks.busy_s(setting.machine, dtype) + setting.machine.launch_s
        rows = {s.name: 2 + i for i, s in enumerate(conv.spatial)}
        index = {"x": {"N": 0, "G": 1, "C": 1, **rows}, "y": {"N": 0, "G": 1, "F": 1, **rows}}
        dims_w = conv.dims("w")[:2]
        index["w"] = {"G": 0} | {d.name: i for i, d in enumerate(dims_w)}
        self.places = {t: np.array([where.get(k, -1) for k in known])[place[fits]] for t, where in index.items()}
        given = np.array([letter != "" for letter in known])[place[fits]]
        self.partial = {t: given & (places < 0) for t, places in self.places.items()}
        digits = 8 ** np.arange(len(sizes))
        self.wants = {t: ((places + 1) * digits).sum(-1) for t, places in self.places.items()}
        self.totals = {"x": conv.elements("x"), "w": conv.elements("w"), "y": conv.elements("y")}
        storages = np.array(list(product((-1, 0, 1), repeat=len(sizes))), dtype=np.int64).reshape(-1, len(sizes))
        most = tuple(d.extent for d in dims_w)
        counts = np.stack([np.where(storages == d, self.sizes, 1).prod(-1) for d in (0, 1)])
        plain = ((storages < 0) | (self.sizes > 1)).all(-1)
        self.w_storages = storages[plain & (counts[0] <= most[0]) & (counts[1] <= most[1])]
        self.halo_s = {t: np.zeros(len(kept)) for t in "xy"}
        for halo, letter in blocks.halos:
            has = place[fits] == known.index(letter)
            alpha, beta = (np.where(has, line, 0.0).max(-1) for line in (self.alpha, self.beta))
            for t, seconds in self.halo_s.items():
                moved = halo * self.elements[t] * self.element_bytes
                seconds += np.where(halo > 0, 2 * alpha + moved * beta, 0)
        reduced = self._ring(self.partial["w"], 2 * self.elements["w"])
        self.read_w = self.read(self.w_storages, "w")
        self.made_w = self.made(self.w_storages, "w") * (not setting.hide_dw)
        self.reduced_s = np.zeros(len(kept)) if setting.hide_dw else reduced

    def _ring(self, moving: Flags, elements: Floats) -> Floats:
        """Seconds of a ring over the axes that move, the slowest one's alpha and beta."""
        group = np.where(moving, self.sizes, 1).prod(-1)
        alpha, beta = (np.where(moving, line, 0.0).max(-1) for line in (self.alpha, self.beta))
        return (group - 1) * alpha + elements * (1 - 1 / group) * self.element_bytes * beta

    def read(self, stored: Indices, tensor: str) -> Floats:
        """[storage, assignment]: seconds to read a tensor as the roles want it."""
        moving = (stored[:, None] >= 0) & (stored[:, None] != self.places[tensor])
        return self._ring(moving, self.elements[tensor])

    def made(self, stored: Indices, tensor: str) -> Floats:
        """[storage, assignment]: seconds to store a tensor as it comes out of the roles."""
        here, partial = self.places[tensor], self.partial[tensor]
        moving = partial | ((here >= 0) & (here != stored[:, None]))
        block = self.totals[tensor] / np.where(stored >= 0, self.sizes, 1).prod(-1)
        whole = (partial & (stored[:, None] < 0)).any(-1)
        return self._ring(moving, np.maximum(self.elements[tensor], block[:, None])) * (1 + whole)

    def best_alike(self, seconds: Floats, tensor: str) -> Floats:
        """[x, y, assignment]: the least seconds of all assignments that want a tensor as this one does."""
        wants = self.wants[tensor]
        order = np.argsort(wants, kind="stable")
        ordered = wants[order]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        least = np.minimum.reduceat(seconds[..., order], first, axis=-1)
        return least[..., np.searchsorted(ordered[first], wants)]

    def triple(self, forward: int, data: int, filter_: int, *, dx: bool) -> Triple:
        """The best storage of w for three assignments."""
        cost = self.read_w[:, forward] + self.made_w[:, filter_]
        if dx:
            cost = cost + self.read_w[:, data]
        three = self.letters[forward], self.letters[data], self.letters[filter_]
        return Triple(*three, tuple(self.w_storages[int(cost.argmin())].tolist()))


@lru_cache(maxsize=1 << 9)
def _assigned(conv: Conv, sizes: tuple[int, ...], setting: Setting, dtype: str) -> _Assigned:
    return _Assigned(conv, sizes, setting, dtype)
