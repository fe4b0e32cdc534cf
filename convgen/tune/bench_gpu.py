"""The bench of a GPU: it measures kernels on operands with NaN around them, as graphs if launches can be captured, and
ATen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from convgen.kernels.problem import Problem
from convgen.tune.baseline import accuracy, aten_variants
from convgen.tune.bench_cpu import ATEN, SLOW, said_of
from convgen.tune.bind import bind
from convgen.tune.clock import Clock, Entrant, ceilings, race
from convgen.tune.floor import floor_launch
from convgen.tune.intervals import LEAST
from convgen.tune.operands import Operands

ROUNDS = 5  # how many rounds a candidate has on its own


class GpuBench:
    """One problem at a time, on the current GPU."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def open(self, problem: Problem, text: str, seed: int) -> dict[str, Any]:
        """Make operands of a problem, and time ATen by a few launches; a GPU's module (`text`) is not run."""
        self.clock.tidy()
        self.problem, self.work = problem, Operands(problem, self.clock.device, seed)
        with accuracy(problem.dtype):
            entrants = self.aten()
            for e in entrants:
                e.run()
                e.probe(self.clock)
        return {"aten_us": {e.label: e.record["us"] for e in entrants}}

    def aten(self) -> list[Entrant]:
        """ATen's ways that need no conversion of the problem's format; none where ATen has none."""
        p = self.problem
        found: list[Entrant] = []
        for label, (last, run) in aten_variants(self.work).items():
            if last == p.channels_last:
                try:
                    error = self.work.error(run())
                    self.clock.sync()
                except RuntimeError:
                    if not self.clock.alive():
                        raise
                    continue
                found.append(Entrant(f"{ATEN} {label}", run, {"error": error}))
        return found

    def attempt(self, label: str, text: str, best_us: float) -> dict[str, Any]:
        """Check a kernel, and time it."""
        try:
            with accuracy(self.problem.dtype):
                bound = bind(self.work, self.problem, text)
                error = bound.check()
                entrant = Entrant(label, bound.run)
                entrant.probe(self.clock)
                if entrant.estimate * 1e6 <= SLOW * best_us:
                    entrant.prepare(self.clock)
                    race([entrant], self.clock, ROUNDS)
        except Exception as failure:
            return self._failed(failure)
        return {"us": entrant.record["us"], "error": error}

    def race(
        self,
        kernels: Sequence[tuple[str, str]],
        rounds: int,
        seed: int,
        seconds: float,
        calls: int = 0,
        gains: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Check kernels on other operands, and race those that are right and ATen. There are as many rounds as asked
        for, whatever they leave open, as a GPU's times don't depend on others' work; fewer, but at least LEAST, if they
        would take longer than `seconds`.

        Returns:
            label -> laps (microseconds of a launch in each round) and error; or cause and what was said. Under ATen's
            name is the best of its ways; ATen is left out if it has none.
        """
        found: dict[str, Any] = {}
        self.work = Operands(self.problem, self.clock.device, seed)
        with accuracy(self.problem.dtype):
            entrants = self.aten()
            ours: list[Entrant] = []
            for label, text in kernels:
                try:
                    bound = bind(self.work, self.problem, text)
                    ours.append(Entrant(label, bound.run, {"error": bound.check()}))
                except Exception as failure:
                    found[label] = self._failed(failure)
            racing = [*entrants, *ours]
            for e in racing:
                e.probe(self.clock)
                e.prepare(self.clock)
            lap = sum(e.launches * e.estimate for e in racing)
            race(racing, self.clock, max(LEAST, min(rounds, int(seconds / max(lap, 1e-9)))))
            for e in ours:  # a kernel that was right before the race must be right after it
                try:
                    bind(self.work, self.problem, dict(kernels)[e.label]).check()
                except Exception as failure:
                    found[e.label] = self._failed(failure)
        best = min(entrants, key=lambda e: e.record["us"], default=None)
        if best is not None:
            found[ATEN] = {"laps": best.laps, "error": best.record["error"]}
        for e in ours:
            found.setdefault(e.label, {"laps": e.laps, "error": e.record["error"]})
        return found

    def ceilings(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        """The device's ceilings, in all types on a GPU, and the least time of a launch."""
        floor = Entrant("floor", floor_launch(self.clock.device, 256))
        found = ceilings(self.clock)
        floor.run()
        floor.probe(self.clock)
        floor.prepare(self.clock)
        race([floor], self.clock)
        return {n: found[n] for n in ("flops_per_s", "bytes_per_s")} | {"floor_us": min(floor.laps)}

    def _failed(self, failure: Exception) -> dict[str, Any]:
        """The record of a candidate's exception; if the device is lost with it, the process ends."""
        if not self.clock.alive():
            os._exit(70)
        return said_of(failure)
