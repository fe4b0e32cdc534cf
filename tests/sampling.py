"""Which cases a run takes.

`make check` (CASES=all) takes every case. A plain run of all files takes a share of the tests, and of a settled test's
cases one and a share of the others, by a number, SAMPLE, that moves with the commit: over many commits all come up, and
one commit's are always the same. Without git it is 0. Of files that are named, or of a tier, every test is taken.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from random import Random
from zlib import crc32

ALL = os.environ.get("CASES") == "all"
DRAWS = float(os.environ.get("DRAWS", "1"))  # so many times as many draws of each random property
SETTLED = 0.3  # of the cases that a property was first shown with, what a plain run draws
TESTS = 0.3  # of the tests, what a plain run of all files takes
SHARE = 0.03  # of the cases that a test in a settled file is given, what a plain run takes beside one of each test


def _of_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "0"


# Processes that this one starts take the same.
SAMPLE = os.environ.setdefault("SAMPLE", _of_commit())


def draws(count: int) -> int:
    """So many draws inside of a test: all that there are, or the first of them."""
    return max(1, round(count * (1 if ALL else SETTLED) * DRAWS))


def cases_of(count: int, name: str) -> list[int]:
    """The numbers of a test's cases, which `name` tells from other tests': all, or a share that moves."""
    numbers = range(max(1, round(count * DRAWS)))
    if ALL:
        return [*numbers]
    return sorted(Random(f"{SAMPLE} {name}").sample(numbers, max(1, round(len(numbers) * SETTLED))))


def is_taken(test: str) -> bool:
    """Whether a plain run of all files takes a test."""
    return crc32(f"{SAMPLE} {test}".encode()) < TESTS * 2**32


def chosen(cases: Iterable[str]) -> set[str]:
    """Of the cases of one test: one, and a share of the others."""
    ranks = {case: crc32(f"{SAMPLE} {case}".encode()) for case in cases}
    first = min(ranks, key=lambda case: (ranks[case], case))
    return {case for case, rank in ranks.items() if rank < SHARE * 2**32 or case == first}


def said() -> str:
    if ALL:
        return "every case"
    return f"SAMPLE={SAMPLE} took a share of tests and cases, and takes the same again; `make check` takes every case"
