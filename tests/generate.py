"""Random layers, grids, layouts and roles, small and seeded, for property tests.

    rng = random.Random(7)
    conv, grid, stored, roles = random_problem(rng)

Extents are small and rarely divide evenly: kernels larger than a block, blocks smaller than a halo and ranks
without an element come up by themselves. Everything is drawn from `rng`, in a fixed order.

How many cases a property is tried on: tests/sampling.py.
"""

from __future__ import annotations

from math import prod
from random import Random
from typing import NamedTuple

from convgen.algebra.algorithms import ALGORITHMS, letters_of, stored_layouts
from convgen.algebra.blocks import axis_size
from convgen.algebra.conv import PHASES, SPATIAL_NAMES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.errors import InputError


class Problem(NamedTuple):
    """A layer, the grid it runs on, how x, w and y are stored, and the settled roles of each phase."""

    conv: Conv
    grid: Grid
    stored: dict[str, Layout]
    roles: dict[str, Roles]


AXIS_NAMES = ("data", "chan", "row", "col")
MOST_ELEMENTS = 400  # of x, w or y of a random layer, so that a slow reference stays quick


def random_grid(rng: Random, max_ranks: int = 8, names: tuple[str, ...] = AXIS_NAMES) -> Grid:
    """One to four axes, some of one rank and some with shares, at most `max_ranks` ranks."""
    count = rng.choice((1, 2, 2, 3, 3, 4))
    sizes: list[int] = []
    for _ in range(min(count, len(names))):
        left = max_ranks // prod(sizes)
        sizes.append(rng.choice([s for s in (1, 2, 2, 2, 3, 3, 4, 5) if s <= left]))
    rng.shuffle(sizes)
    return Grid(tuple(zip(rng.sample(names, len(sizes)), [uneven(rng, n) for n in sizes], strict=True)))


def uneven(rng: Random, ranks: int) -> int:
    """Of four axes one has shares, among them ranks that get nothing."""
    shares = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(ranks)]
    return axis_size(shares) if rng.random() < 0.25 and any(shares) else ranks


def random_spatial(rng: Random, name: str, most: int) -> Spatial:
    """Stride, dilation, even kernels, padding that differs on both sides or is wider than the kernel."""
    while True:
        pad_lo = rng.choice((0, 0, 1, 1, 2, 3))
        s = Spatial(
            name,
            extent=rng.randint(1, most),
            kernel=rng.choice((1, 1, 2, 3, 3, 4, 5)),
            stride=rng.choice((1, 1, 2, 3)),
            pad_lo=pad_lo,
            pad_hi=rng.choice((pad_lo, pad_lo, 0, 1, 2)),
            dilation=rng.choice((1, 1, 1, 2, 3)),
        )
        if s.out >= 1:
            return s


def random_transposed_spatial(rng: Random, name: str, most: int) -> Spatial:
    """Output padding up to torch's bound, crops that differ on both sides or are wider than the kernel."""
    while True:
        kernel, stride, dilation = rng.choice((1, 1, 2, 3, 3, 4)), rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 2, 3))
        pad_lo = rng.choice((0, 0, 1, 1, 2, 3))
        pad_hi = rng.choice((pad_lo, pad_lo, 0, 1, 2))
        more = rng.choice((0, 0, rng.randrange(max(stride, dilation))))
        extent = (rng.randint(1, most) - 1) * stride - pad_lo - pad_hi + dilation * (kernel - 1) + 1 + more
        if extent >= 1:
            return Spatial(name, extent, kernel, stride, pad_lo, pad_hi, dilation, more)


def random_conv(rng: Random, *, transposed: bool = False) -> Conv:
    """A layer of one to three spatial dimensions."""
    spatial = random_transposed_spatial if transposed else random_spatial
    while True:
        spatial_dims = rng.choice((1, 1, 2, 2, 2, 3))
        most = {1: 13, 2: 8, 3: 5}[spatial_dims] // (2 if transposed else 1)
        groups = rng.choice((1, 1, 1, 2, 3, 4))
        conv = Conv(
            batch=rng.randint(1, 4),
            channels=groups * rng.randint(1, 5 if groups == 1 else 3),
            filters=groups * rng.randint(1, 5 if groups == 1 else 3),
            spatial=tuple(spatial(rng, name, most) for name in SPATIAL_NAMES[spatial_dims]),
            groups=groups,
            bias=rng.random() < 0.4,
            transposed=transposed,
        )
        if max(conv.elements("x"), conv.elements("y"), conv.elements("w")) <= MOST_ELEMENTS:
            return conv


def random_axes(rng: Random, grid: Grid, dims: int) -> tuple[Axes, ...]:
    """Each axis on some dimension or on none, in any order."""
    places: list[list[str]] = [[] for _ in range(dims)]
    for axis in rng.sample(grid.names, len(grid.names)):
        d = rng.randint(-1, dims - 1)
        if d >= 0:
            places[d].append(axis)
    return tuple(tuple(p) for p in places)


def random_layout(rng: Random, conv: Conv, grid: Grid, tensor: str) -> Layout:
    """A layout that a tensor can be stored in."""
    return Layout(tensor, random_axes(rng, grid, len(conv.dims(tensor))))


def random_roles(rng: Random, conv: Conv, grid: Grid, phase: str) -> Roles:
    """Settled roles of a phase; drawn again until they are legal for the layer's groups."""
    choices = ("none", "N", "C", "F", "G", *conv.letters, *conv.letters)
    while True:
        pairs = [(a, rng.choice(choices)) for a in rng.sample(grid.names, len(grid.names))]
        rows = rng.choice(("output", "input")) if phase == "backward_filter" else "output"
        try:
            return settle_groups(conv, grid, phase, nest(pairs, rows))
        except InputError:
            continue


def random_problem(rng: Random, max_ranks: int = 8, *, transposed: bool = False) -> Problem:
    """A layer with any storage and any roles, different in each phase; one in four is a named algorithm."""
    if rng.random() < 0.25:
        return named_problem(rng, max_ranks, transposed=transposed)
    conv, grid = random_conv(rng, transposed=transposed), random_grid(rng, max_ranks)
    stored = {t: random_layout(rng, conv, grid, t) for t in ("x", "w", "y")}
    roles = {phase: random_roles(rng, conv, grid, phase) for phase in PHASES}
    if rng.random() < 0.3:
        roles |= {phase: Roles(roles["forward"].nests) for phase in PHASES}
    return Problem(conv, grid, stored, roles)


def named_problem(
    rng: Random, max_ranks: int = 8, algorithm: str | None = None, *, transposed: bool = False
) -> Problem:
    """A named algorithm (a random one by default) on a random layer and a grid of its letters."""
    while True:
        conv = random_conv(rng, transposed=transposed)
        name = algorithm or rng.choice(sorted(ALGORITHMS))
        letters = [a for a in ALGORITHMS[name].letters if a not in "DHW" or a in conv.letters]
        letters += ["G"] if conv.groups > 1 else []
        grid = random_grid(rng, max_ranks, tuple(rng.sample(letters, min(len(letters), 4))))
        try:
            return algorithm_problem(name, conv, grid)
        except InputError:
            continue


def algorithm_problem(name: str, conv: Conv, grid: Grid) -> Problem:
    """A named algorithm on a grid whose axes are named by its letters.

    Raises:
        InputError: the layer's groups do not allow it.
    """
    space, stored = Space(conv, grid), stored_layouts(name, conv, letters_of(grid))
    letters = {a: a for a in grid.names}
    roles = {
        phase: settle_groups(conv, grid, phase, nest(default_nesting(space, phase, letters, stored)))
        for phase in PHASES
    }
    return Problem(conv, grid, stored, roles)
