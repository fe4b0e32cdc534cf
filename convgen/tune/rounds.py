"""The rounds of a race: calls run in turn, a round's laps a moment apart, until the question is answered.

A busy machine costs more rounds: a race goes on while it is open which kernel is the best, or whether it is faster than
ATen, and ends early once that is known. The race is looked at only a few times, each time after half as many rounds
more, since each look is another chance to be wrong; the level of an interval (intervals.py) allows for these looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from convgen.tune.intervals import LEAST, Interval, of_ratios

MORE = 40  # at most so many times the rounds, while the question is open
NEXT_LOOK = 1.5  # the next look is after so many times the rounds of the last one
TIED = 1.03  # kernels whose times differ by no more than this factor tie
FINE = 1.03  # an interval whose ends differ by no more than this factor is not worth more rounds


@dataclass
class Racer:
    """A call in a race.

    Attributes:
        timed: makes a call and gives its seconds; raises what is wrong with it.
        calls: how many a lap has.
        laps: for each round, microseconds of a call; a racer that is out has the rounds up to then.
        out: whether it is known to be slower than another by more than a tie.
    """

    label: str
    timed: Callable[[], float]
    calls: int = 1
    laps: list[float] = field(default_factory=list[float])
    failure: Exception | None = None
    out: bool = False

    @property
    def runs(self) -> bool:
        return self.failure is None and not self.out

    def lap(self) -> None:
        try:
            self.laps.append(sum(self.timed() for _ in range(self.calls)) / self.calls * 1e6)
        except Exception as failure:
            self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a race.

    Attributes:
        rounds: how many there are, fewer if they take too long, but as many as an interval needs.
        calls: the least number of calls of each racer; more rounds are made for them.
        seconds: how long it may take.
        ran_s: seconds that it may run, not counting what else the machine does.
        gains: while it is open whether each kernel's gain is above or below one of these, there are more rounds, up to
            MORE times as many. None: while it is open which of several kernels is the best.
    """

    rounds: int
    seconds: float
    ran_s: float
    calls: int = 0
    gains: tuple[float, ...] = ()


def run(first: Racer, others: Sequence[Racer], length: Length, ran: Callable[[], float]) -> None:
    """Run the race: laps of all racers that make no mistake, each round beginning with another.

    Args:
        first: the racer with which the others are compared; it is never out.
        ran: gives the seconds that this process ran.
    """
    everyone, i, look = (first, *others), 0, max(length.rounds, LEAST)
    end, ran_end = time.monotonic() + length.seconds, ran() + length.ran_s
    while alive := [r for r in everyone if r.runs]:
        for k in range(len(alive)):
            alive[(i + k) % len(alive)].lap()
        i += 1
        if i >= LEAST and (time.monotonic() >= end or ran() >= ran_end):
            return
        if i >= look and min(r.calls for r in alive) * i >= length.calls:
            if i >= MORE * length.rounds or _known(first, others, length):
                return
            look = min(int(NEXT_LOOK * i), MORE * length.rounds)


def _known(first: Racer, others: Sequence[Racer], length: Length) -> bool:
    """Whether the laps answer the question; it marks as out the racers that they rule out."""
    alive = [r for r in others if r.runs]
    if not alive:
        return True
    if not length.gains:
        return _best_known(first, alive)
    return first.failure is not None or all(decided(of_ratios(first.laps, r.laps), length.gains) for r in alive)


def _best_known(first: Racer, alive: Sequence[Racer]) -> bool:
    """Whether each other kernel is known to tie with the best or to be behind it, or no kernel to be worth storing."""
    if first.failure is None:
        for r in alive:
            r.out = of_ratios(first.laps, r.laps).high < TIED
        alive = [r for r in alive if not r.out]
    known, best = True, min(alive, key=lambda r: median(r.laps), default=None)
    for r in alive:
        if best is not None and r is not best:
            behind = of_ratios(r.laps, best.laps)
            r.out = behind.low > TIED
            known &= r.out or decided(behind, (TIED,))
    return known


def decided(found: Interval, gains: Sequence[float]) -> bool:
    """Whether each of these numbers lies outside of an interval, or it is so narrow that this says nothing."""
    return found.high <= FINE * found.low or all(not found.low <= gain <= found.high for gain in gains)
