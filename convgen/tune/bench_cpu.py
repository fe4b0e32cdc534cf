# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (parts of torch have no types)
"""The bench of a CPU: it measures kernels as their modules call them, checks every call, and measures modules, tuned
and not.

With one thread, time is the process's CPU time, so that others' work does not count. Every call has operands of its own
(rotation.py) and is timed alone; its result, the operands, the memory around them, and the process (settings.py) are
checked before the next call.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.tune.baseline import accuracy
from convgen.tune.clock import CpuClock, Entrant, ceilings, race
from convgen.tune.operands import TOLERANCE, Wrong, result_of
from convgen.tune.rotation import Rotation, Set
from convgen.tune.rounds import Length, Racer, run
from convgen.tune.settings import Settings

ATEN = "ATen"
SLOW = 4.0  # a call that takes longer than so many times the best is timed once
TRIES = 6  # how often a candidate is called on its own
RAN_S = 6.0  # the most seconds, about, that a race runs
RETAKES = 2  # how often a call that was interrupted is made again
LAP_S = 1e-3  # the least seconds of a lap, unless that takes more than MOST_CALLS
MOST_CALLS = 8
AS_ATEN, MUCH = 2.0, 20.0  # a kernel's error may be so many times ATen's; ATen's so many times the usual one
FLOOR = 0.8  # a call that takes less than this share of a launch's least time computes nothing
Call = Callable[[Set, Any], object]


class Alone:
    """The transport of a rank without others: modules want one, and never use it."""

    rank, size = 0, 1


class Entered:
    """A call that is timed, and the largest error of its results.

    Attributes:
        before: runs untimed before each call; `run` gets what it returns.
    """

    def __init__(self, label: str, run: Call, before: Callable[[Set], object] | None = None) -> None:
        self.label, self.run, self.before, self.error = label, run, before, 0.0


class CpuBench:
    """One problem at a time, on this CPU.

    Args:
        threads: how many torch computes with.
    """

    def __init__(self, threads: int) -> None:
        self.clock = CpuClock(threads)
        self.floor_us: float = min(self._least() for _ in range(3))

    def open(self, problem: Problem, text: str, seed: int) -> dict[str, Any]:
        """Make operands of a problem, and time ATen in its module.

        Args:
            text: that of the untuned module of one rank.
        """
        self.problem, self.text = problem, text
        usual = TOLERANCE[problem.dtype]
        self.rotation = Rotation(problem, seed, MUCH * usual)
        self.settings = Settings()
        with accuracy(problem.dtype):
            aten = self._entered(ATEN, "")
            least = min(self._timed(aten) for _ in range(TRIES))
        self.most = self.rotation.most = max(usual, AS_ATEN * aten.error)  # long sums have larger errors than usual
        return {"aten_us": {ATEN: least * 1e6}, "error": aten.error}

    def attempt(self, label: str, text: str, best_us: float) -> dict[str, Any]:
        """Check a kernel, and time it."""
        self.settings.begin()
        try:
            with accuracy(self.problem.dtype):
                one = self._entered(label, text)
                times = [self._timed(one), self._timed(one)]  # the first call makes what later ones reuse
                while len(times) < TRIES and min(times) * 1e6 <= SLOW * best_us:
                    times.append(self._timed(one))
                self._refuse_too_fast(min(times) * 1e6)
        except Exception as failure:
            return said_of(failure)
        return {"us": min(times) * 1e6, "error": one.error}

    def race(
        self,
        kernels: Sequence[tuple[str, str]],
        rounds: int,
        seed: int,
        seconds: float,
        calls: int = 0,
        gains: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Race kernels and ATen, in turn, round by round, on other operands; rounds.Length says how long.

        Returns:
            label -> laps (microseconds of a call in each round) and error; or cause and what was said. ATen's too.
        """
        self.settings.begin()
        with accuracy(self.problem.dtype):
            self.rotation = Rotation(self.problem, seed, self.most)
            found: dict[str, Any] = {}
            racing = [self._entered(ATEN, "")]
            for label, text in kernels:
                try:
                    racing.append(self._entered(label, text))
                except Exception as failure:
                    found[label] = said_of(failure)
            return found | self._raced(racing, rounds, seconds, calls, gains)

    def module(self, tuned: str, rounds: int, seed: int, seconds: float, gains: Sequence[float] = ()) -> dict[str, Any]:
        """Race the module with a kernel and the one without: their forward passes, or their whole backward passes.

        Args:
            tuned: the text of the module with the kernel.
        """
        self.settings.begin()
        self.rotation = Rotation(self.problem, seed, self.most)
        with accuracy(self.problem.dtype):
            racing = [_passes("untuned", self.text, self.problem), _passes("tuned", tuned, self.problem)]
            return self._raced(racing, rounds, seconds, 0, gains)

    def ceilings(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        """The device's ceilings in these types, and the least time of a launch."""
        found = ceilings(self.clock, dtypes, size=1024, elements=1 << 24)
        return {n: found[n] for n in ("flops_per_s", "bytes_per_s")} | {"floor_us": self._least()}

    def _least(self) -> float:
        empty = torch.zeros(16)
        floor = Entrant("floor", lambda: torch.ops.aten.add(empty, empty))
        floor.run()
        floor.probe(self.clock)
        floor.prepare(self.clock)
        race([floor], self.clock)
        return min(floor.laps)

    def _entered(self, label: str, text: str) -> Entered:
        """A phase's call as the module makes it, tried once; without a text, ATen's plain call."""
        module, p = load_text(self.text), self.problem
        way = getattr(load_text(text), p.phase) if text else None
        convolve, shape = getattr(module, f"conv_{p.phase}"), self.rotation.base.shapes[result_of(p)[0]]
        padding = [d.below for d in p.dims]

        def run(one: Set, _: object) -> object:
            t = one.tensors
            rest = (padding, shape, way) if way is not None else (padding, shape)
            with torch.no_grad():
                if p.phase == "forward":
                    return convolve(module.LAYER, t["x"], t["w"], t["bias"] if p.bias else None, *rest)
                return convolve(module.LAYER, t["dy"], t["w" if p.phase == "backward_data" else "x"], *rest)

        one = Entered(label, run)
        self._timed(one)
        return one

    def _timed(self, racer: Entered) -> float:
        """Seconds of a call, whose effects are checked. Raises what is wrong with it.

        A call that was interrupted is made again, a few times: a process that comes back to a core finds its caches
        cold.
        """
        found = math.inf
        for _ in range(1 + RETAKES):
            switched = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            found = min(found, self._call(racer))
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switched:
                break
        return found

    def _call(self, racer: Entered) -> float:
        one = self.rotation.next()
        made = racer.before(one) if racer.before is not None else None
        start = self.clock.now()
        result = racer.run(one, made)
        seconds = self.clock.now() - start
        self.settings.check()
        racer.error = max(racer.error, self.rotation.check(one, result))
        self.rotation.check_operands(one)
        return seconds

    def _raced(
        self, entered: Sequence[Entered], rounds: int, seconds: float, calls: int, gains: Sequence[float]
    ) -> dict[str, Any]:
        """Race these calls; records by label. The others are compared with the first."""
        racing = [Racer(one.label, partial(self._timed, one)) for one in entered]
        for r in racing:
            try:
                estimate = min(r.timed() for _ in range(2))
                r.calls = max(1, min(MOST_CALLS, math.ceil(LAP_S / max(estimate, 1e-9))))
            except Exception as failure:
                r.failure = failure
        length = Length(rounds=rounds, seconds=seconds, ran_s=RAN_S, calls=calls, gains=tuple(gains))
        run(racing[0], racing[1:], length, self.clock.now)
        found: dict[str, Any] = {}
        for one, r in zip(entered, racing, strict=True):
            if r.failure is None:
                try:
                    self._refuse_too_fast(min(r.laps))
                except Wrong as failure:
                    r.failure = failure
            found[r.label] = said_of(r.failure) if r.failure else {"laps": r.laps, "error": one.error}
        return found

    def _refuse_too_fast(self, us: float) -> None:
        if us < FLOOR * self.floor_us:
            raise Wrong(f"took {us:.2f} us, a launch of nothing takes {self.floor_us:.2f}")


def said_of(failure: Exception) -> dict[str, str]:
    """The cause of a failure, and what its exception says."""
    text = " ".join(str(failure).split())
    return {
        "cause": "wrong" if isinstance(failure, Wrong) else "error",
        "said": f"{type(failure).__name__}: {text}"[:300],
    }


def _passes(label: str, text: str, p: Problem) -> Entered:
    """A module's whole pass over a set of operands, with what autograd does around it."""
    module = load_text(text)
    mesh = module.init_mesh(transport=Alone())

    def forward(one: Set, _: object = None) -> Tensor:
        t = one.tensors
        return module.conv(t["x"], t["w"], *([t["bias"]] if p.bias else []), mesh=mesh)

    def backward(one: Set, y: Tensor) -> Tensor:
        t = one.tensors
        return torch.autograd.grad(y, (t["x"], t["w"]), t["dy"])[p.phase == "backward_filter"]

    return Entered(label, forward) if p.phase == "forward" else Entered(label, backward, forward)
