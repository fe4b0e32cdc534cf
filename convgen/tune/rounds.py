"""The rounds of a race: calls in turn, each round's laps a moment apart, until what is asked of them is known.

More rounds are what a busy machine costs: a race goes on while it is open which kernel is the best, or whether it is
faster than ATen, and ends early where it is not. It is looked at a few times only, each half as many rounds after the
last look, since each look is another chance to be wrong; the level of an interval (intervals.py) allows for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from convgen.tune.intervals import LEAST, Interval, of_ratios

MORE = 40  # times the rounds at most, where it is open what they say
NEXT_LOOK = 1.5  # times the rounds of the last look
TIED = 1.03  # kernels no farther apart are one
FINE = 1.03  # an interval whose ends are no farther apart: what it leaves open is not worth a round


@dataclass
class Racer:
    """A call in a race.

    Attributes:
        timed: seconds of one call; raises what is wrong with it.
        calls: of a lap.
        laps: microseconds of a call, a round each; of one that is out, of the rounds up to then.
        out: known to be slower than another, by more than a tie.
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
    """How long a race is.

    Attributes:
        rounds: unless they take too long; as many as an interval takes in any case.
        calls: of each, at least; more rounds are made for them.
        seconds: that it may take.
        ran_s: that it may run, what else the machine does not counted.
        gains: as long as it is open whether each kernel's is more or less than one of these, there are more rounds, up
            to MORE times as many. None: as long as it is open which of several kernels is the best.
    """

    rounds: int
    seconds: float
    ran_s: float
    calls: int = 0
    gains: tuple[float, ...] = ()


def run(first: Racer, others: Sequence[Racer], length: Length, ran: Callable[[], float]) -> None:
    """Laps of all that make no mistake, beginning with another each time.

    Args:
        first: what the others are compared with; it is never out.
        ran: seconds that this process ran.
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
    """Whether the laps say what is asked; racers that they rule out are out."""
    alive = [r for r in others if r.runs]
    if not alive:
        return True
    if not length.gains:
        return _best_known(first, alive)
    return first.failure is not None or all(decided(of_ratios(first.laps, r.laps), length.gains) for r in alive)


def _best_known(first: Racer, alive: Sequence[Racer]) -> bool:
    """Whether each other kernel is known to tie with the best, or to be behind; or none to be worth it."""
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
