"""The process that measures: it may hang or die without taking the tuner along.

Requests are tuples, replies dictionaries; a request whose reply never comes is the candidate's fault.

    ("open", problem, seed)            operands and ATen, whose time comes back; what follows is about this problem
    ("attempt", label, text, best_us)    check a kernel and time it: {"us", "error"} or {"cause", "said"}
    ("race", ((label, text), ...), rounds, seed, seconds)    other operands; check all again, time them and ATen in turn
    ("ceilings", dtypes)               what the device reaches
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from convgen.kernels.config import Config
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import Target
from convgen.tune.baseline import accuracy, aten_variants
from convgen.tune.bind import bind
from convgen.tune.clock import Clock, CpuClock, CudaClock, Entrant, ceilings, race
from convgen.tune.floor import floor_launch
from convgen.tune.operands import Operands, Wrong

SLOW = 4.0  # times the best: what takes longer is timed once
ROUNDS = 5  # of a candidate on its own
LEAST_ROUNDS = 5
ATEN = "ATen"


def serve(connection: Connection, target: Target, threads: int, log: str) -> None:
    """Answer requests until the tuner goes."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the tuner's
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    bench = Bench(target, CpuClock(threads) if target.is_cpu else CudaClock())
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(bench, name)(*arguments))


def _die_with_parent() -> None:
    """Linux: be killed when the tuner is, even in a kernel that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


class Bench:
    """One problem on one device."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self.target, self.clock = target, clock

    def open(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Operands of a problem, and ATen's time by a few launches."""
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
        if self.target.is_cpu:
            text = kernel_module([Kernel((p,), Config("aten", warps=0, stages=0), self.target)])
            bound = bind(self.work, p, text)
            return [Entrant(ATEN, bound.run, {"error": bound.check()})]
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

    def race(self, kernels: tuple[tuple[str, str], ...], rounds: int, seed: int, seconds: float) -> dict[str, Any]:
        """Check kernels on other operands, and time those that are right and ATen in turn; fewer rounds, but not fewer
        than LEAST_ROUNDS, where they would take longer than `seconds`.

        Returns:
            label -> median, p20, p80, error, `beats`: the share of rounds in which it was faster than the best of ATen;
            or cause and what was said. Under ATen's name the best of its ways; none where ATen has none.
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
            race(racing, self.clock, min(rounds, max(LEAST_ROUNDS, int(seconds / max(lap, 1e-9)))))
            for e in ours:  # what was right before the race has to be right after it
                try:
                    bind(self.work, self.problem, dict(kernels)[e.label]).check()
                except Exception as failure:
                    found[e.label] = self._failed(failure)
        best = min(entrants, key=lambda e: e.record["us"], default=None)
        if best is not None:
            found[ATEN] = best.record | {"label": best.label}
        for e in ours:
            laps = [(a, b) for a, b in zip(e.laps, best.laps, strict=True)] if best is not None else []
            record = e.record | {
                "beats": sum(a < b for a, b in laps) / max(1, len(laps)) if laps else 1.0,
                "against": statistics.median(b / a for a, b in laps) if laps else None,
            }
            found.setdefault(e.label, record)
        return found

    def ceilings(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        """What the device reaches, in all types on a GPU, and the least time of a launch."""
        if self.target.is_cpu:
            empty = torch.zeros(16)
            floor = Entrant("floor", lambda: torch.ops.aten.add(empty, empty))
            found = ceilings(self.clock, dtypes, size=1024, elements=1 << 24)
        else:
            floor = Entrant("floor", floor_launch(self.clock.device, 256))
            found = ceilings(self.clock)
        floor.run()
        floor.probe(self.clock)
        floor.prepare(self.clock)
        race([floor], self.clock)
        return {n: found[n] for n in ("flops_per_s", "bytes_per_s")} | {"floor_us": min(floor.laps)}

    def _failed(self, failure: Exception) -> dict[str, Any]:
        """What a candidate's exception says; where the device is lost with it, the process ends."""
        if not self.clock.alive():
            os._exit(70)
        text = " ".join(str(failure).split())
        return {
            "cause": "wrong" if isinstance(failure, Wrong) else "error",
            "said": f"{type(failure).__name__}: {text}"[:300],
        }
