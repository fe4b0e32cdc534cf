"""What role assignments cost by themselves, in closed form for all of them at once: to prune by, not to plan with.

With n, c, f and the spatial degrees of an assignment, per phase the slowest rank's roofline, and ring forms for what
the roles bring with them ([CF] 3.2-3.4; docs/plan.md): x is gathered and dx reduce-scattered over f, y
reduce-scattered and dy gathered over c, halos of x and dy along split rows, dw all-reduced over samples and rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.cost.links import collective_seconds
from convgen.cost.machine import Machine
from convgen.plan.network.setting import Setting
from convgen.spec.layer import DTYPE_BYTES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimates:
    """Assignments of a letter to each axis of a grid ("" for none), cheapest first, and their estimated seconds."""

    letters: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]


@lru_cache(maxsize=1 << 14)
def estimates(conv: Conv, sizes: tuple[int, ...], setting: Setting, dtype: str) -> Estimates:
    """Every assignment that leaves no rank empty.

    A spatial dimension takes an axis only if the one before it has an axis already, or has one row: H before W.
    """
    known = ("N", *(("G",) if conv.groups > 1 else ("C", "F")), *conv.letters, "")
    assigned, place, degrees = assignments(known, sizes)
    degree = dict(zip(known, degrees.T, strict=True))
    fits = fitting(conv, degree)
    lines = axis_lines(sizes, setting.machine)
    slowest: dict[str, tuple[Floats, Floats]] = {}
    for letter in known:
        has = place[fits] == known.index(letter)
        alpha, beta = (np.where(has, [line[k] for line in lines], 0.0).max(axis=1) for k in (0, 1))
        slowest[letter] = alpha, beta
    total = _seconds(conv, {k: v[fits] for k, v in degree.items()}, slowest, setting, dtype)
    order = np.argsort(total, kind="stable")
    kept: list[int] = np.flatnonzero(fits)[order].tolist()
    seconds: list[float] = total[order].tolist()
    return Estimates(tuple(assigned[i] for i in kept), tuple(seconds))


@lru_cache(maxsize=1 << 10)
def assignments(
    known: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[tuple[tuple[str, ...], ...], NDArray[np.int64], NDArray[np.int64]]:
    """Letters for axes, the same by number, and for each assignment the product of sizes that each letter has."""
    found = tuple(product(*(known if size > 1 else ("",) for size in sizes)))
    degrees = np.ones((len(found), len(known)), dtype=np.int64)
    place = np.array([[known.index(letter) for letter in one] for one in found]).reshape(len(found), len(sizes))
    for i, size in enumerate(sizes):
        degrees[np.arange(len(found)), place[:, i]] *= size
    return found, place, degrees


def axis_lines(sizes: tuple[int, ...], machine: Machine) -> list[tuple[float, float]]:
    """alpha and beta of a ring over each axis of a grid of these sizes."""
    return [_line(sizes, i, machine) for i in range(len(sizes))]


@lru_cache(maxsize=1 << 10)
def _line(sizes: tuple[int, ...], axis: int, machine: Machine) -> tuple[float, float]:
    """alpha and beta of a ring over one axis of a grid of these sizes."""
    grid = Grid(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    if sizes[axis] == 1:
        return 0.0, 0.0
    over, levels = (f"a{axis}",), machine.levels
    start, full = (collective_seconds(grid, levels, "all_gather", over, n, 0.0, "ring")[0] for n in (0.0, 1e9))
    return start / (sizes[axis] - 1), (full - start) / 1e9


def fitting(conv: Conv, degree: dict[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Which assignments leave no rank empty, rows split before columns."""
    most = {"N": conv.batch, "C": conv.channels, "F": conv.filters, "G": conv.groups}
    most |= {s.name: min(s.extent, s.out) for s in conv.spatial}
    fits = np.ones(len(degree["N"]), dtype=np.bool_)
    for letter, limit in most.items():
        if letter in degree:
            fits &= degree[letter] <= limit
    for before, after in zip(conv.spatial, conv.spatial[1:], strict=False):
        if min(before.extent, before.out) > 1:
            fits &= (degree[after.name] == 1) | (degree[before.name] > 1)
    return fits


@dataclass(frozen=True, eq=False)
class Blocks:
    """The largest blocks of an assignment's operands, in elements.

    Attributes:
        halos: for each split spatial dimension, what share of a block its halo is.
        copies: ranks with addends of the same dw.
    """

    x: Floats
    w: Floats
    y: Floats
    flops: Floats
    halos: tuple[tuple[Floats, str], ...]
    copies: Floats

    def busy_s(self, machine: Machine, dtype: str) -> Floats:
        """Seconds of one phase by the roofline."""
        moved = (self.x + self.y + self.w) * DTYPE_BYTES[dtype]
        return np.maximum(self.flops / machine.flops_per_s(dtype), moved / machine.memory_bytes_per_s)


def blocks_of(conv: Conv, degree: dict[str, NDArray[np.int64]]) -> Blocks:
    """Blocks by how many ranks share each index."""
    one = np.ones(len(degree["N"]))
    n, c, f, g = (degree.get(letter, one).astype(np.float64) for letter in "NCFG")

    def share(extent: int, parts: Floats) -> Floats:
        return np.ceil(extent / parts)

    samples, groups = share(conv.batch, n), share(conv.groups, g)
    channels = share(conv.channels // conv.groups, c)
    filters = share(conv.filters // conv.groups, f)
    fine, coarse, split = one.copy(), one.copy(), one.copy()  # rows
    halos: list[tuple[Floats, str]] = []
    for s in conv.spatial:
        parts = degree[s.name].astype(np.float64)
        inside, outside = share(s.extent, parts), share(s.out, parts)
        halos.append((np.where(parts > 1, max(s.reach + 1 - s.stride, 0), 0) / inside, s.name))
        fine, coarse, split = fine * inside, coarse * outside, split * parts
    rows_in, rows_out = (coarse, fine) if conv.transposed else (fine, coarse)
    x, y = samples * groups * channels * rows_in, samples * groups * filters * rows_out
    w = groups * channels * filters * conv.taps
    flops = 2 * samples * groups * channels * filters * coarse * conv.taps
    return Blocks(x, w, y, flops, tuple(halos), n * split)


def _seconds(
    conv: Conv,
    degree: dict[str, NDArray[np.int64]],
    slowest: dict[str, tuple[Floats, Floats]],
    setting: Setting,
    dtype: str,
) -> Floats:
    """Estimated seconds of each assignment; `slowest` are alpha and beta of the slowest axis of each letter."""
    size, machine = DTYPE_BYTES[dtype], setting.machine
    one = np.ones(len(degree["N"]))
    c, f = (degree.get(letter, one).astype(np.float64) for letter in "CF")
    blocks = blocks_of(conv, degree)
    x, w, y, busy = blocks.x, blocks.w, blocks.y, blocks.busy_s(machine, dtype)
    total = 3 * (busy + machine.launch_s)
    none = np.zeros(len(one)), np.zeros(len(one))
    for parts, gathered, letter in ((f, x, "F"), (c, y, "C")):
        alpha, beta = slowest.get(letter, none)
        total += 2 * np.where(parts > 1, (parts - 1) * alpha + gathered * (parts - 1) / parts * size * beta, 0)
    for halo, letter in blocks.halos:
        alpha, beta = slowest[letter]
        total += np.where(halo > 0, 4 * alpha + halo * (x + y) * size * beta, 0)
    alpha, beta = (np.max([slowest[n][k] for n in ("N", *conv.letters)], axis=0) for k in (0, 1))
    if setting.hide_dw:
        return total
    copies = blocks.copies
    total += np.where(copies > 1, 2 * (copies - 1) * (alpha + w / copies * size * beta), 0)
    return total
