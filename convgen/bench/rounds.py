"""Steps run in turn, round by round: seconds of each on every rank, of which the slowest counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from convgen.bench.marks import Clock, Mark
from convgen.bench.ways import Way
from convgen.calibrate.team import Call, Team

PARTS = ("forward", "backward", "step")
Seconds = NDArray[np.float64]  # [ranks, rounds, 2]: forward, backward


@dataclass(frozen=True)
class Took:
    """Seconds of a part of a step.

    Attributes:
        median: over rounds, of the slowest rank's seconds; p20 and p80 likewise.
        by_rank: each rank's own median over rounds.
    """

    median: float
    p20: float
    p80: float
    by_rank: tuple[float, ...]

    @property
    def spread(self) -> float:
        """(p80 - p20) / median."""
        return (self.p80 - self.p20) / self.median if self.median else 0.0


def took(seconds: NDArray[np.float64]) -> Took:
    """
    Args:
        seconds: [ranks, rounds].
    """
    p20, median, p80 = np.quantile(seconds.max(axis=0), (0.2, 0.5, 0.8))
    return Took(float(median), float(p20), float(p80), tuple(np.median(seconds, axis=1).tolist()))


def parts(seconds: Seconds) -> dict[str, Took]:
    """What forward, backward and both took."""
    each = {"forward": seconds[..., 0], "backward": seconds[..., 1], "step": seconds.sum(axis=-1)}
    return {part: took(one) for part, one in each.items()}


def run_once(team: Team, clock: Clock, way: Way) -> tuple[float, float]:
    """Seconds of forward and of backward on this rank, which all ranks begin together; 0 where it has no part."""
    team.sync()
    team.barrier()
    if not way.is_here:
        return 0.0, 0.0
    start = clock.now()
    made = way.forward()
    middle = clock.now()
    way.backward(made)
    end = clock.now()
    clock.settle()
    return clock.between(start, middle), clock.between(middle, end)


def interleaved(team: Team, clock: Clock, ways: Mapping[str, Way], rounds: int, warm: int) -> dict[str, Seconds]:
    """Seconds of every way, run once a round in an order that is drawn for the round, the same on all ranks.

    Args:
        warm: how many rounds come before those that count.
    """
    order, draw = [*ways], Random(0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(warm + rounds):
        draw.shuffle(order)
        for name in order:
            one = run_once(team, clock, ways[name])
            if number >= warm:
                found[name].append(one)
    gathered = team.gather(found)
    return {name: np.array([one[name] for one in gathered], dtype=np.float64) for name in ways}


def marked(team: Team, clock: Clock, way: Way, rounds: int) -> list[list[Mark]]:
    """Marks of this rank, a list for each round."""
    found: list[list[Mark]] = []
    for _ in range(rounds):
        team.sync()
        team.barrier()
        recorder = way.recorder
        if not way.is_here or recorder is None:
            continue
        with recorder.at_work():
            recorder.phase, start = "forward", clock.now()
            made = way.forward()
            recorder.phase = "backward"
            way.backward(made)
        found.append(recorder.taken(start))
    return found


def calls_in_turn(team: Team, clock: Clock, calls: Sequence[Call], rounds: int, warm: int) -> NDArray[np.float64]:
    """Seconds of calls, [ranks, rounds, calls], each after a barrier; all ranks give equally many."""
    found: list[list[float]] = []
    for number in range(warm + rounds):
        lap: list[float] = []
        for call in calls:
            team.sync()
            team.barrier()
            start = clock.now()
            call()
            end = clock.now()
            clock.settle()
            lap.append(clock.between(start, end))
        if number >= warm:
            found.append(lap)
    return np.array(team.gather(found), dtype=np.float64)
