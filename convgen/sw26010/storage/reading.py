"""Processes that read at once: seconds of each, arrays shared fairly.

A process reads its pieces in order, one array at a time. An array gives those that read from it equal parts of its
bandwidth, and none more than its link takes. Between two ends of pieces all speeds are constant, so the simulation goes
from end to end and is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.storage.striping import Striping

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Disks:
    """Speeds in bytes a second: of an array, and of a process's link.

    The paper gives none of an array. Its AlexNet at 1024 nodes takes 3.89 s a step; 2.5 GB/s is assumed, about the
    least at which 1024 reads of 192 MB hide behind that (docs/studies/sw26010.md). The link is MPI's ([SW] 2.2).

    Raises:
        InputError: a speed that is none.
    """

    array_bytes_per_s: float = 2.5e9
    link_bytes_per_s: float = 12e9

    def __post_init__(self) -> None:
        if not min(self.array_bytes_per_s, self.link_bytes_per_s) > 0:
            raise InputError(f"an array of {self.array_bytes_per_s} B/s and links of {self.link_bytes_per_s} B/s")


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of processes that read at once.

    `seconds` [processes]; `readers` [arrays]: processes that touch each; `moved` [arrays]: bytes from each.
    """

    seconds: Reals
    readers: NDArray[np.int64]
    moved: NDArray[np.int64]

    @property
    def last_s(self) -> float:
        return float(self.seconds.max(initial=0.0))

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of all processes together, until the last is done."""
        return float(self.moved.sum()) / self.last_s if self.last_s else 0.0


def drawn_starts(processes: int, size: int, file_bytes: int, image_bytes: int, seed: int) -> list[int]:
    """Where processes start to read: at images drawn at random ([SW] 5.2), far enough from the end.

    Raises:
        InputError: the file is shorter than a read.
    """
    if size > file_bytes:
        raise InputError(f"reads of {size:,} B from a file of {file_bytes:,} B", hint="a larger file, or smaller reads")
    images = (file_bytes - size) // image_bytes + 1
    return [image_bytes * int(at) for at in np.random.default_rng(seed).integers(images, size=processes)]


def read_together(striping: Striping, disks: Disks, starts: Sequence[int], size: int) -> Reading:
    """All processes start at once, each reads [start, start + size)."""
    pieces = [striping.pieces(start, size) for start in starts]
    readers, moved = np.zeros(striping.arrays, np.int64), np.zeros(striping.arrays, np.int64)
    for one in pieces:
        for array in {array for array, _ in one}:
            readers[array] += 1
        for array, part in one:
            moved[array] += part
    return Reading(_finish(pieces, striping.arrays, disks), readers, moved)


def _finish(pieces: Sequence[Sequence[tuple[int, int]]], arrays: int, disks: Disks) -> Reals:
    """When each process has its last piece."""
    count = len(pieces)
    at = np.zeros(count, np.int64)
    lengths = np.array([len(one) for one in pieces], np.int64)
    on = np.array([one[0][0] if one else 0 for one in pieces], np.int64)
    left = np.array([one[0][1] if one else 0 for one in pieces], np.float64)
    done = np.zeros(count)
    live = lengths > 0
    now = 0.0
    while live.any():
        sharing = np.bincount(on[live], minlength=arrays)
        speed = np.minimum(disks.link_bytes_per_s, disks.array_bytes_per_s / np.maximum(sharing, 1)[on])
        takes = np.where(live, left / speed, np.inf)
        step = float(takes.min())
        # Ends that differ by rounding only are one end.
        ended = live & (takes <= step * (1 + 1e-12))
        now += step
        left = np.where(live, left - speed * step, left)
        for process in np.flatnonzero(ended).tolist():
            at[process] += 1
            if at[process] == lengths[process]:
                live[process], done[process] = False, now
            else:
                array, part = pieces[process][int(at[process])]
                on[process], left[process] = array, part
    return done


def single_split_s(disks: Disks, processes: int, size: int) -> float:
    """All on one array: max(size / link, processes * size / array)."""
    return max(size / disks.link_bytes_per_s, processes * size / disks.array_bytes_per_s)


def at_least_s(striping: Striping, disks: Disks, starts: Sequence[int], size: int) -> float:
    """No schedule is faster: the busiest array gives its bytes, and a link takes a whole read."""
    moved = sum((striping.array_bytes(start, size) for start in starts), np.zeros(striping.arrays, np.int64))
    return max(size / disks.link_bytes_per_s, float(moved.max()) / disks.array_bytes_per_s)
