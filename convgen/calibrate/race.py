"""Times of calls that all ranks make at once: each size is tried first, then all are timed in turn, lap by lap.

A lap times every call once, after a barrier, over as many repeats as last 10 ms, or over one. The slowest rank's
seconds count, and of the laps the median or another quantile. Rank 0's clock decides when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from convgen.calibrate.team import Call, Team

BLOCK_S = 10e-3  # seconds that repeats of one call last, at least: longer than a scheduler's slice
MOST_REPEATS = 500
TRIES, LONG_S = 3, 10e-3
LEAST_LAPS, MOST_LAPS = 3, 50


@dataclass(frozen=True, slots=True)
class Case:
    """A call to time.

    Attributes:
        size: of what it does: bytes, flops, or a square matrix's rows.
        run: None on a rank that only waits.
        estimate_s: seconds of one call, set when it is tried; the same on all ranks.
        once: whether a lap has a single repeat, which finds caches and memory as others have left them.
    """

    label: str
    size: int
    run: Call | None
    estimate_s: float = 0.0
    once: bool = False

    @property
    def repeats(self) -> int:
        return 1 if self.once else max(1, min(MOST_REPEATS, math.ceil(BLOCK_S / self.estimate_s)))

    @property
    def block_s(self) -> float:
        return self.repeats * self.estimate_s


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call on the slowest rank, the median or another quantile of laps.

    Attributes:
        spread: (p80 - p20) / median of the laps; large where something else runs, or cores are few.
    """

    label: str
    size: int
    seconds: float
    laps: int
    spread: float


def tried(team: Team, case: Case) -> Case:
    """The case with its estimate: the best of three calls, or of fewer where one is long.

    The first call does not count, since it connects, allocates and compiles.
    """
    _block(team, case.run, 1)
    best = math.inf
    for _ in range(TRIES):
        best = min(best, team.most(torch.tensor([_block(team, case.run, 1)], dtype=torch.float64)).item())
        if best > LONG_S:
            break
    return replace(case, estimate_s=max(best, 1e-9))


def climb(team: Team, rungs: Sequence[Sequence[Case]], seconds: float, at_least: int) -> list[Case]:
    """The cases of one rung after the other, each larger than the last, until laps of them would take too long.

    Args:
        rungs: cases of one size each, by size.
        seconds: how long trying them and the fewest laps may take.
        at_least: how many rungs are kept in any case.
    """
    start, kept = time.perf_counter(), list[Case]()
    for i, rung in enumerate(rungs):
        if i:
            growth = rung[0].size / rungs[i - 1][0].size
            ahead = growth * sum(case.estimate_s for case in kept[-len(rung) :])
            lap = sum(case.block_s for case in kept) + ahead
            late = time.perf_counter() - start + (1 + TRIES) * ahead + LEAST_LAPS * lap > seconds
            if team.agree(late) and i >= at_least:
                break
        kept += [tried(team, case) for case in rung]
    return kept


def settle(team: Team, rungs: Sequence[Case], long_s: float) -> Case:
    """The first case that takes `long_s` seconds, of cases that grow in size; the last one where none does."""
    case = tried(team, rungs[0])
    for rung in rungs[1:]:
        if case.estimate_s >= long_s:
            break
        case = tried(team, rung)
    return case


def race(team: Team, cases: Sequence[Case], seconds: float) -> list[Timing]:
    """Time all in turn for so many seconds, 3 to 50 laps; each lap begins with another case.

    Returns:
        Timings in the order of the cases, the same on every rank.
    """
    deadline, laps = time.perf_counter() + seconds, list[list[float]]()
    while len(laps) < LEAST_LAPS or (len(laps) < MOST_LAPS and team.agree(time.perf_counter() < deadline)):
        lap = [0.0] * len(cases)
        for k in range(len(cases)):
            i = (k + len(laps)) % len(cases)
            lap[i] = _block(team, cases[i].run, cases[i].repeats)
        laps.append(lap)
    slowest = team.most(torch.tensor(laps, dtype=torch.float64)).numpy()
    p20, middle, p80, counts = np.quantile(slowest, (0.2, 0.5, 0.8, team.quantile), axis=0)
    return [
        Timing(c.label, c.size, float(counts[i]) / c.repeats, len(laps), float((p80[i] - p20[i]) / middle[i]))
        for i, c in enumerate(cases)
    ]


def _block(team: Team, run: Call | None, repeats: int) -> float:
    """Seconds of these repeats on this rank, all ranks having begun together; 0 where it only waits."""
    team.barrier()
    if run is None:
        return 0.0
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    team.sync()
    return time.perf_counter() - start
