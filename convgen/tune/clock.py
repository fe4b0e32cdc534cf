"""Timing: laps on a device, races of several calls in turn, and the device's ceilings."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, Protocol

import torch

from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.tune.baseline import accuracy

ROUNDS = 15
Call = Callable[[], object]


class Clock(Protocol):
    """A clock that times calls on a device."""

    @property
    def device(self) -> str: ...
    def tidy(self) -> None: ...
    def sync(self) -> None: ...
    def alive(self) -> bool: ...
    def lap(self, replays: Sequence[Call]) -> list[float]: ...
    def capture(self, run: Call, launches: int) -> tuple[Call, bool]: ...


class CpuClock:
    """Time of calls on the CPU, with a given number of threads.

    With one thread it is the time that the process ran, its own helpers included, so others' work does not count.
    Several threads keep running while they wait for each other, so only wall time says how long they took.
    """

    device = "cpu"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        torch.set_num_threads(threads)

    def tidy(self) -> None: ...

    def sync(self) -> None: ...

    def alive(self) -> bool:
        return True

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.process_time() if self.threads == 1 else time.perf_counter()

    def lap(self, replays: Sequence[Call]) -> list[float]:
        """Run each once in turn; seconds of each."""
        found: list[float] = []
        for run in replays:
            start = self.now()
            run()
            found.append(self.now() - start)
        return found

    def capture(self, run: Call, launches: int) -> tuple[Call, bool]:
        """So many calls as one, in a loop: a CPU has nothing to capture."""

        def loop() -> None:
            for _ in range(launches):
                run()

        return loop, False


class CudaClock:
    """Times on the current CUDA device, of graphs where launches can be captured."""

    device = "cuda"

    @cached_property
    def stream(self) -> Any:
        """The stream on which launches are captured; it is always the same one, as torch keeps memory for each
        stream."""
        return torch.cuda.Stream()

    def tidy(self) -> None:
        torch.cuda.empty_cache()

    def sync(self) -> None:
        torch.cuda.synchronize()

    def alive(self) -> bool:
        try:
            self.sync()
        except RuntimeError:
            return False
        return True

    def lap(self, replays: Sequence[Call]) -> list[float]:
        """Run each once in turn; seconds of each."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in replays]
        for replay, (start, end) in zip(replays, pairs, strict=True):
            start.record()
            replay()
            end.record()
        self.sync()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def capture(self, run: Call, launches: int) -> tuple[Call, bool]:
        """So many launches as one CUDA graph; as a loop, and False, where they can't be captured."""

        def loop() -> None:
            for _ in range(launches):
                run()

        try:
            graph = torch.cuda.CUDAGraph()
            self.sync()
            with torch.cuda.stream(self.stream):
                run()  # what is done once a stream, as making a workspace, must not be captured
                self.stream.synchronize()
                graph.capture_begin()
                try:
                    with own_counters():
                        loop()
                finally:
                    graph.capture_end()
            self.sync()
        except Exception:
            if not self.alive():
                raise
            return loop, False
        return graph.replay, True


@contextmanager
def own_counters() -> Generator[None]:
    """A context: launches captured in it clear the counters of programs that share a tile once, as a module's graph
    does."""
    shared: dict[str, Any] = sys.modules.setdefault("_convgen_shared", ModuleType("_convgen_shared")).__dict__
    counters = shared.setdefault("counters", {})
    counters["graph"] = {}
    try:
        yield
    finally:
        counters.pop("graph", None)


@dataclass
class Entrant:
    """An entrant of a race: its call, its records, and its launches once they are captured.

    Attributes:
        laps: for each round of a race, microseconds of a launch.
    """

    label: str
    run: Call
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    launches: int = 1
    replay: Call | None = None
    estimate: float = math.inf
    laps: list[float] = field(default_factory=list[float])

    def probe(self, clock: Clock) -> None:
        """Estimate a launch's seconds by a few launches, as one graph where they are short."""
        launches = 10 if clock.lap([self.run])[0] < 1e-3 else 1
        replay, graphed = clock.capture(self.run, launches)
        clock.lap([replay])
        self.estimate = max(min(clock.lap([replay, replay])) / launches, 1e-7)
        self.record |= {"us": self.estimate * 1e6, "graph": graphed, "raced": False}

    def prepare(self, clock: Clock) -> None:
        """Capture launches for 1 ms, at least 10 of them unless they take more than 10 ms, at least one."""
        seconds = max(1e-3, min(10 * self.estimate, 10e-3))
        self.launches = max(1, min(1000, math.ceil(seconds / self.estimate)))
        self.replay, self.record["graph"] = clock.capture(self.run, self.launches)


def race(entrants: Sequence[Entrant], clock: Clock, rounds: int = ROUNDS) -> None:
    """Replay all entrants in turn, round by round, beginning with another each time; record a launch's median, p20 and
    p80.

    Two rounds at least: percentiles want them.
    """
    rounds = max(rounds, 2)
    for _ in range(2):
        clock.lap([e.replay for e in entrants if e.replay])
    for e in entrants:
        e.laps = [math.nan] * rounds
    for i in range(rounds):
        order = [*entrants[i % len(entrants) :], *entrants[: i % len(entrants)]]
        for e, seconds in zip(order, clock.lap([e.replay for e in order if e.replay]), strict=True):
            e.laps[i] = seconds / e.launches * 1e6
    for e in entrants:
        p20, *_, p80 = statistics.quantiles(e.laps, n=5)
        e.record |= {
            "us": statistics.median(e.laps), "p20": p20, "p80": p80, "launches": e.launches, "raced": True,
        }  # fmt: skip


def ceilings(
    clock: Clock, dtypes: Sequence[str] = tuple(TORCH_DTYPES), *, size: int = 8192, elements: int = 1 << 28
) -> dict[str, Any]:
    """The device's ceilings: flop/s of a matrix product in each type, and bytes/s, read and written, of a copy.

    On a GPU float32 has the better of IEEE products and a third of TF32's: three of those give its accuracy.
    """
    found: dict[str, float] = {}

    def seconds(run: Call) -> float:
        entrant = Entrant("ceiling", run)
        run()
        entrant.probe(clock)
        if entrant.estimate > 0.1:
            return entrant.estimate
        entrant.prepare(clock)
        race([entrant], clock, 9)
        return min(entrant.laps) / 1e6  # the fastest lap: other laps have what else the machine did

    for dtype in dtypes:
        # Some CPUs have no products of float16: a small one is slow enough.
        rows = min(size, 256) if clock.device == "cpu" and dtype == "float16" else size
        a, b = (torch.randn((rows, rows), device=clock.device).to(TORCH_DTYPES[dtype]) for _ in range(2))
        out = torch.empty_like(a)
        with accuracy(dtype):
            found[dtype] = 2 * rows**3 / seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
    source = torch.zeros(elements, device=clock.device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source))
    ieee = {"float32_ieee_flops_per_s": found["float32"]} if "float32" in found else {}
    if {"float32", "tfloat32"} <= found.keys():
        found["float32"] = max(found["float32"], found["tfloat32"] / 3)
    return {"flops_per_s": found, **ieee, "bytes_per_s": copied}
