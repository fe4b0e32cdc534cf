"""Chunks of a file and regions of ranks: which chunks a rank reads, which straddle, and what chunking serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

Where = tuple[slice, ...]
Chunk = tuple[int, ...]  # a number, or an extent, along each dimension


def numbers_of(region: Where, extents: Sequence[int]) -> Iterator[Chunk]:
    """Chunks of these extents of which a region, not empty, has elements."""
    return product(*(range(*one) for one in _ranges(region, extents)))


def _ranges(region: Where, extents: Sequence[int]) -> list[tuple[int, int]]:
    """First and behind the last number along each dimension; of an empty region none."""
    if any(s.stop <= s.start for s in region):
        return [(0, 0) for _ in region]
    return [(s.start // n, (s.stop - 1) // n + 1) for s, n in zip(region, extents, strict=True)]


def shares(chunks: Any, regions: Sequence[Where]) -> bool:
    """Whether a chunk lies in several regions.

    Args:
        chunks: extents of one; None where there are none, or they are of several extents.
    """
    known = chunks and all(isinstance(n, int) for n in chunks)
    if not known or any(len(r) != len(chunks) for r in regions):  # such a target is refused when it is written
        return False
    ranges = [_ranges(r, chunks) for r in regions]
    return any(
        all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))
        for k, one in enumerate(ranges)
        for other in ranges[:k]
    )


def borders(regions: Sequence[Where], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Along each dimension, where regions begin or end inside of the array."""
    full = [r for r in regions if all(s.stop > s.start for s in r)]
    return [tuple(sorted({k for r in full for k in (r[d].start, r[d].stop)} - {0, n})) for d, n in enumerate(shape)]


def serving(regions: Sequence[Where], shape: Sequence[int]) -> Chunk:
    """The largest extents of chunks of which none has elements of two regions that differ; so do their divisors."""
    return tuple(gcd(*inside) or n for inside, n in zip(borders(regions, shape), shape, strict=True))


@dataclass(frozen=True)
class Share:
    """What one rank reads of a file.

    Attributes:
        region: its slices.
        chunks: how many chunks it has elements of; without chunks none.
        region_bytes: of its elements.
        chunk_bytes: of these chunks, whole, as they are before they are compressed; a file without chunks is read by
            element.
    """

    region: Where
    chunks: int
    region_bytes: int
    chunk_bytes: int


@dataclass(frozen=True)
class Straddling:
    """How chunks of an array lie to the ranks' blocks.

    Attributes:
        shares: by rank.
        total: how many chunks the array has.
        numbers: along each dimension, numbers of the chunks inside of which a block ends.
        serving: extents of chunks that would end where blocks do.
    """

    shape: tuple[int, ...]
    chunks: Chunk | None
    shares: tuple[Share, ...]
    total: int
    numbers: tuple[tuple[int, ...], ...]
    serving: Chunk

    @property
    def count(self) -> int:
        """How many chunks lie in several blocks that differ."""
        if self.chunks is None:
            return 0
        along = [-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True)]
        return prod(along) - prod(n - len(k) for n, k in zip(along, self.numbers, strict=True))


def straddling(
    shape: Sequence[int], chunks: Chunk | None, element_bytes: int, reads: Sequence[Where], blocks: Sequence[Where]
) -> Straddling:
    """How chunks lie to blocks.

    Args:
        shape: of the array.
        reads: by rank, the region that it reads; blocks: the same without halos, which tile the array.
    """
    shared: list[Share] = []
    for region in reads:
        elements = prod(s.stop - s.start for s in region)
        touched = prod(b - a for a, b in _ranges(region, chunks)) if chunks else 0
        bytes_read = element_bytes * (touched * prod(chunks) if chunks else elements)
        shared.append(Share(region, touched, element_bytes * elements, bytes_read))
    inside = borders(blocks, shape)
    numbers = [tuple(sorted({k // n for k in ks if k % n})) for ks, n in zip(inside, chunks or shape, strict=True)]
    total = prod(-(-n // c) for n, c in zip(shape, chunks, strict=True)) if chunks else 0
    return Straddling(tuple(shape), chunks, tuple(shared), total, tuple(numbers), serving(blocks, shape))
