"""A file on disk arrays: which bytes lie where, and how many arrays a read touches.

Stripe s of the file, `stripe_bytes` long, lies on array s mod `arrays`. One array is the file system's default, that
[SW] 5.2 calls single-split.
Source: [SW] 5.2: 32 arrays, stripes of 256 MB, reads of 192 MB that start anywhere and so touch at most two arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError

MIB = 2**20
IMAGE_BYTES = 256 * 256 * 3 * 4  # 0.75 MiB: 256 of them are the paper's 192 MB
IMAGENET_IMAGES = 1_281_167


@dataclass(frozen=True, slots=True)
class Striping:
    """A file dealt out to `arrays` disk arrays, `stripe_bytes` at a time.

    Raises:
        InputError: no array, or stripes of nothing.
    """

    arrays: int
    stripe_bytes: int

    def __post_init__(self) -> None:
        if min(self.arrays, self.stripe_bytes) < 1:
            raise InputError(f"{self.arrays} arrays with stripes of {self.stripe_bytes} B hold no file")

    def stripes(self, start: int, size: int) -> int:
        """Stripes that the bytes [start, start + size) lie in."""
        return (start + size - 1) // self.stripe_bytes - start // self.stripe_bytes + 1 if size else 0

    def touched(self, start: int, size: int) -> int:
        """Arrays that the bytes [start, start + size) lie on."""
        return min(self.arrays, self.stripes(start, size))

    def most_touched(self, size: int) -> int:
        """Arrays that a read of this size touches at most, wherever it starts: ceil((size - 1) / stripe) + 1."""
        return min(self.arrays, -(-(size - 1) // self.stripe_bytes) + 1) if size else 0

    def mean_stripes(self, size: int) -> float:
        """Stripes that a read touches on average over all starts: 1 + (size - 1) / stripe."""
        return 1 + (size - 1) / self.stripe_bytes if size else 0.0

    def pieces(self, start: int, size: int) -> list[tuple[int, int]]:
        """(array, bytes) of a read, in the order of the file; neighbours on one array are one piece."""
        found: list[tuple[int, int]] = []
        end = start + size
        while start < end:
            stripe = start // self.stripe_bytes
            stop = min(end, (stripe + 1) * self.stripe_bytes)
            array = stripe % self.arrays
            if found and found[-1][0] == array:
                found[-1] = (array, found[-1][1] + stop - start)
            else:
                found.append((array, stop - start))
            start = stop
        return found

    def array_bytes(self, start: int, size: int) -> NDArray[np.int64]:
        """Bytes of [start, start + size) on each array, [arrays], by closed form."""
        at = np.arange(self.arrays)
        return self._before(start + size, at) - self._before(start, at)

    def _before(self, end: int, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of [0, end) on arrays `at`: whole rounds, whole stripes of the last round, and what is left."""
        rounds, rest = divmod(end, self.arrays * self.stripe_bytes)
        return rounds * self.stripe_bytes + np.clip(rest - at * self.stripe_bytes, 0, self.stripe_bytes)
