"""Kernels whose speed is known: the tuner with a runner that draws times instead of measuring them.

A time is the kernel's, times what the machine does to all calls of that moment (a state that lasts), times what it does
to this call, times what a sitting has to itself; some calls are interrupted, and take up to three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from convgen.kernels.config import parse_config
from convgen.kernels.problem import LocalDim, Problem
from convgen.spec.target import CPU, Target
from convgen.tune import tuner as tuners
from convgen.tune.bench_cpu import ATEN, RAN_S
from convgen.tune.candidates import Candidate
from convgen.tune.database import Ceilings, Entry, update
from convgen.tune.device import Device
from convgen.tune.rounds import Length, Racer, run
from convgen.tune.wanted import Use, Wanted

DIM = LocalDim("H", 8, 8, 1, 1, 1, 0)
PROBLEM = Problem(
    phase="forward", batch=2, channels=5, filters=6, dims=(DIM, replace(DIM, name="W")), dtype="float32",
    memory_format="contiguous",
)  # fmt: skip
DEVICE = Device("planted", "cpu", 1)
ATEN_S, AROUND = 2e-3, 0.3  # of a call of ATen's; of it, what a module does around
TEXT = "def forward(*given):\n    raise RuntimeError({0})\n"  # never run


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of logarithms; the share of calls that are interrupted."""

    call: float
    state: float = 0.0
    sitting: float = 0.0
    interrupted: float = 0.0


QUIET = Noise(0.02, 0.01, 0.005, 0.005)
BUSY = Noise(0.10, 0.15, 0.01, 0.10)
WILD = Noise(0.20, 0.30, 0.01, 0.30)


class Drawn:
    """A runner, as convgen.tune.runner has it."""

    def __init__(self, gains: Mapping[str, float], noise: Noise, seed: int) -> None:
        self.gains, self.noise, self.rng, self.state, self.ran = gains, noise, Random(seed), 0.0, 0.0

    def _call(self, seconds: float) -> float:
        rng, noise = self.rng, self.noise
        self.state = 0.9 * self.state + math.sqrt(1 - 0.81) * rng.gauss(0, noise.state)
        took = seconds * math.exp(self.state + abs(rng.gauss(0, noise.call)))
        took *= rng.uniform(1, 3) if rng.random() < noise.interrupted else 1
        self.ran += took
        return took

    def _sit(self, seconds: Mapping[str, float], length: Length) -> dict[str, Any]:
        own = {label: s * math.exp(self.rng.gauss(0, self.noise.sitting)) for label, s in seconds.items()}
        racing = [Racer(label, lambda s=s: self._call(s)) for label, s in own.items()]
        run(racing[0], racing[1:], length, lambda: self.ran)
        return {r.label: {"laps": r.laps, "error": 0.0} for r in racing}

    def open(self, problem: Problem) -> dict[str, float]:
        return {ATEN: min(self._call(ATEN_S) for _ in range(6)) * 1e6}

    def attempt(self, candidate: Candidate, best_us: float) -> dict[str, Any]:
        return {"us": min(self._call(self._s(candidate)) for _ in range(6)) * 1e6, "error": 0.0}

    def race(
        self, found: Sequence[Candidate], rounds: int, seed: int, seconds: float, calls: int = 0,
        gains: tuple[float, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        length = Length(rounds=rounds, seconds=seconds, ran_s=RAN_S, calls=calls, gains=gains)
        return self._sit({ATEN: ATEN_S} | {c.label: self._s(c) for c in found}, length)

    def module(
        self, candidate: Candidate, rounds: int, seed: int, seconds: float, gains: tuple[float, ...] = ()
    ) -> dict[str, Any]:
        length = Length(rounds=rounds, seconds=seconds, ran_s=RAN_S, gains=gains)
        around = AROUND * ATEN_S
        return self._sit({"untuned": ATEN_S + around, "tuned": self._s(candidate) + around}, length)

    def ceilings(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        return {"flops_per_s": dict.fromkeys(dtypes, 1e13), "bytes_per_s": 1e13, "floor_us": 0.1}

    def close(self) -> None: ...

    def _s(self, candidate: Candidate) -> float:
        return ATEN_S / self.gains[candidate.label]


class Silent:
    """A view of nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


def tuned(folder: Path, gains: Mapping[str, float], noise: Noise, seed: int) -> Entry:
    """What a fresh run stores of kernels that are so many times as fast as ATen's call."""

    def legal(problem: Problem, target: Target) -> list[Candidate]:
        return [Candidate(problem, parse_config(label), target, given=TEXT.format(label)) for label in gains]

    update(folder / "d.json", DEVICE, {}, Ceilings(flops_per_s={"float32": 1e13}, bytes_per_s=1e13, floor_us=0.1))
    made = tuners.Tuner(
        DEVICE, CPU, folder / "d.json", folder / "t.jsonl", Silent(), effort="quick", legal=legal, again=True
    )
    drawn, before = Drawn(gains, noise, seed), tuners.Runner
    tuners.Runner = lambda *given: drawn  # type: ignore[assignment,misc]
    try:
        (outcome,) = made.run([Wanted(PROBLEM, [Use("layer", "forward")])])
    finally:
        tuners.Runner = before  # type: ignore[misc]
    assert outcome.entry is not None, outcome.said
    return outcome.entry


def drawn_gains(rng: Random) -> dict[str, float]:
    """Five kernels beside ATen's call: most are slower, some are as fast, some gain little, some much."""
    gains = {"aten": 1.0}
    for i in range(5):
        gains[f"product whole={i}"] = math.exp(rng.choice((-0.3, 0.0, 0.03, 0.08, 0.3)) + rng.gauss(0, 0.02))
    return gains


@dataclass
class Counts:
    """Of draws of gains with three fresh runs each: entries that are sure, wrong, or surely miss 5 %; pairs of sure
    ones, and those that differ; runs that may find a gain of 5 %, and that do; the best gain over the stored one's."""

    sure: int = 0
    wrong: int = 0
    missed: int = 0
    pairs: int = 0
    flips: int = 0
    of: int = 0
    found: int = 0
    regrets: list[float] = field(default_factory=list)


def counted(folder: Path, noise: Noise, draws: int) -> Counts:
    c = Counts()
    for k in range(draws):
        gains = drawn_gains(Random(k))
        best, entries = max(gains.values()), [tuned(folder, gains, noise, 1000 * k + r) for r in range(3)]
        for e in entries:
            assert e.kernel == "aten" or gains[e.kernel] > 0.98, "slower, and stored"
            c.regrets.append(best / gains[e.kernel])
            c.sure += not e.doubt
            c.wrong += not e.doubt and gains[e.kernel] < 1
            c.missed += not e.doubt and e.kernel == "aten" and best > 1.05
            c.of += best > 1.05
            c.found += best > 1.05 and e.kernel != "aten"
        for a, b in combinations([e for e in entries if not e.doubt], 2):
            c.pairs, c.flips = c.pairs + 1, c.flips + (a.kernel != b.kernel)
    return c
