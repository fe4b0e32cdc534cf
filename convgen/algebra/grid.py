"""The grid of processors: named axes with sizes; the last axis varies fastest over ranks.

Source: [CF] 2.3.1; segmented collectives ([CF] 2.3.3) are `group`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import enough, plain_size, size_text

Coords = dict[str, int]


@dataclass(frozen=True)
class Grid:
    """Named axes in order, each with its size: so many ranks, or ranks with shares (blocks.Uneven).

    Example:
        >>> Grid((("data", 2), ("chan", 3))).group(4, ("chan",))
        (3, 4, 5)
    """

    axes: tuple[tuple[str, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    def __hash__(self) -> int:  # grids are keys of every cache
        return self._hash

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def plain(self) -> dict[str, int | list[int]]:
        """The grid as files and modules have it: for each axis its number of ranks, or their shares."""
        return {name: plain_size(size) for name, size in self.axes}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def ranks(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def enough(self) -> int:
        """Samples with which every rank but those with a share of 0 gets one, by whatever axes; at most 2**31 - 1."""
        return min(prod(enough(size) for _, size in self.axes), 2**31 - 1)

    @cached_property
    def coordinates(self) -> dict[str, NDArray[np.int64]]:
        """Per axis, the coordinate of every rank (an array of `ranks` integers)."""
        shape = tuple(size for _, size in self.axes)
        planes = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
        return {name: planes[i] for i, name in enumerate(self.names)}

    @cached_property
    def single(self) -> frozenset[str]:
        """Axes of one rank, which split nothing, copy nothing and sum nothing."""
        return frozenset(name for name, size in self.axes if size == 1)

    @cached_property
    def bare(self) -> Grid:
        """The grid without its axes of one rank."""
        return Grid(tuple((name, size) for name, size in self.axes if size > 1))

    def over(self, axes: Iterable[str]) -> int:
        """How many ranks differ only along `axes`."""
        return prod(self.sizes[a] for a in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in grid order, without repeats."""
        wanted = set(axes)
        return tuple(a for a in self.names if a in wanted)

    def at(self, rank: int) -> Coords:
        return {name: int(self.coordinates[name][rank]) for name in self.names}

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axes`, in grid order: a segmented collective's group."""
        moving = set(axes)
        base, strides, stride = 0, dict[str, int](), 1
        for name, size in reversed(self.axes):
            strides[name] = stride
            stride *= size
            if name not in moving:
                base += strides[name] * int(self.coordinates[name][rank])
        members = [base]
        for name, size in self.axes:
            if name in moving:
                members = [m + i * strides[name] for m in members for i in range(size)]
        return tuple(sorted(members))

    def group_ids(self, axes: Iterable[str]) -> NDArray[np.int64]:
        """For every rank a number that two ranks share exactly if they are in one group over `axes`."""
        moving = set(axes)
        number = np.zeros(self.ranks, dtype=np.int64)
        for name, size in self.axes:
            if name not in moving:
                number = number * size + self.coordinates[name]
        return number

    def places(self, axes: Iterable[str]) -> NDArray[np.int64]:
        """For every rank its coordinates along these axes as one number, the last axis fastest. The array is cached."""
        key = tuple(axes)
        if (number := self._known_places.get(key)) is None:
            number = np.zeros(self.ranks, dtype=np.int64)
            for name in key:
                number = number * self.sizes[name] + self.coordinates[name]
            self._known_places[key] = number
        return number

    @cached_property
    def _known_places(self) -> dict[tuple[str, ...], NDArray[np.int64]]:
        return {}

    def firsts(self, axes: Iterable[str]) -> NDArray[np.int64]:
        """The first rank of each place along these axes, in order of the places."""
        strides, stride = dict[str, int](), 1
        for name, size in reversed(self.axes):
            strides[name], stride = stride, stride * size
        ranks = np.zeros(1, dtype=np.int64)
        for name in axes:
            ranks = np.add.outer(ranks, np.arange(self.sizes[name], dtype=np.int64) * strides[name]).ravel()
        return ranks

    def groups(self, axes: Iterable[str]) -> NDArray[np.int64]:
        """All groups over `axes`, each in grid order: [groups, members]."""
        moving = tuple(axes)
        return np.argsort(self.group_ids(moving), kind="stable").reshape(-1, self.over(moving))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __str__(self) -> str:
        return "grid(" + ", ".join(f"{name}={size_text(size)}" for name, size in self.axes) + ")"
