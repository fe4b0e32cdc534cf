"""How an activation may be stored: for each dimension the grid axes that split it, outermost first.

Which splits a tensor may have is decided for all tensors of one shape together: those that some convolution
reading or making such a tensor would like, by the roles kept for it. Convolutions convert by themselves from what is
stored to what they want, so storing what nobody wants can't pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.notation import entry_text

Split = tuple[Axes, ...]
Shape = tuple[int, ...]


def natural(letters: Mapping[str, str], dims: tuple[str, ...], tensor: str, *, copies: bool) -> Split:
    """How the roles of a convolution would have x or y stored.

    Args:
        letters: the role of each axis.
        dims: names of the tensor's dimensions: N, C or F, spatial.
        copies: over axes whose role the tensor lacks (F for x, C for y) hold copies ([INT]); else they split its
            channels too ([CF]), inside of those that do so by role.
    """
    own, other = ("C", "F") if tensor == "x" else ("F", "C")

    def axes(role: str) -> Axes:
        return tuple(a for a, letter in letters.items() if letter == role)

    channels = axes("G") + axes(own) + (() if copies else axes(other))
    return tuple(axes("N") if d == "N" else channels if i == 1 else axes(d) for i, d in enumerate(dims))


def fits(split: Split, shape: Shape, grid: Grid) -> bool:
    """Whether every rank has some of each dimension."""
    return all(prod(grid.sizes[a] for a in axes) <= extent for axes, extent in zip(split, shape, strict=True))


def any_splits(shape: Shape, grid: Grid) -> Iterable[Split]:
    """Every split in grid order that uses as many axes as can be; for tensors that no convolution touches."""
    most: list[Split] = []
    used = -1
    names = [name for name, size in grid.axes if size > 1]
    for places in product((*range(len(shape)), None), repeat=len(names)):
        placed = list(zip(names, places, strict=True))
        split = tuple(tuple(a for a, p in placed if p == d) for d in range(len(shape)))
        count = prod(grid.sizes[a] for axes in split for a in axes)
        if count >= used and fits(split, shape, grid):
            if count > used:
                most, used = [], count
            most.append(split)
    return most


def text(split: Split) -> str:
    """As layouts are printed, without the tensor: `data, (a,b), *, *`.

    Example:
        >>> text((("data",), ("a", "b"), (), ()))
        'data, (a,b), *, *'
    """
    return ", ".join(map(entry_text, split))
