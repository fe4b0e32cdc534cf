"""What a package does in a step, a mark for each step of its list, as a profiler sees it (templates/runtime/lanes.py).

A mark's own seconds leave out those of marks inside it, such as a wait inside of a boundary.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from convgen.packages import runtime_of

MOVES = ("move", "wait")  # kinds of marks in which a rank stands still for others; in the rest it computes, or starts


class Clock:
    """Instants of a device. A GPU's are events, which can be read after a later `settle`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two settled instants."""
        return end - start if self.device.type != "cuda" else float(start.elapsed_time(end)) * 1e-3


@dataclass
class Mark:
    """
    Attributes:
        kind: move, wait, local, or another kind of a list's line.
        start_s: seconds since the step began.
        own_s: seconds without those of marks inside.
    """

    kind: str
    name: str
    phase: str
    start_s: float
    end_s: float
    own_s: float


@dataclass
class _Open:
    kind: str
    name: str
    phase: str
    start: Any
    end: Any = None
    inside: list[_Open] = field(default_factory=list["_Open"])


class Recorder:
    """Marks of a package while `at_work`, in the order in which they end."""

    def __init__(self, package: Any, clock: Clock) -> None:
        self._names: dict[str, Any] = vars(runtime_of(package))
        self._clock, self.phase = clock, "forward"
        self._open: list[_Open] = []
        self._done: list[_Open] = []

    @property
    def current(self) -> str:
        """Name of the innermost open mark; empty where none is open."""
        return self._open[-1].name if self._open else ""

    @contextmanager
    def noted(self, kind: str, name: str) -> Generator[None]:
        one = _Open(kind, name, self.phase, self._clock.now())
        if self._open:
            self._open[-1].inside.append(one)
        self._open.append(one)
        try:
            yield
        finally:
            self._open.pop()
            one.end = self._clock.now()
            self._done.append(one)

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Run the package's steps as for a profiler, and record its regions as marks."""
        before = {name: self._names[name] for name in ("noted", "execute")}
        self._names.update(noted=self.noted, execute=self._names["execute_noted"])
        try:
            yield
        finally:
            self._names.update(before)

    def taken(self, start: Any) -> list[Mark]:
        """The marks since the last call, for a step that began at `start`."""
        self._clock.settle()
        done, self._done = self._done, []
        between = self._clock.between

        def own(one: _Open) -> float:
            return between(one.start, one.end) - sum(between(i.start, i.end) for i in one.inside)

        return [Mark(m.kind, m.name, m.phase, between(start, m.start), between(start, m.end), own(m)) for m in done]


def key_of(kind: str, name: str, phase: str) -> tuple[str, str, str]:
    """The row or collective of a mark, or of a timeline's span: (phase, "row" or "collective", name).

    A row's parts and its gradients have one key: local code makes several at once that a program's steps name apart.
    """
    bare = name.partition(" (")[0]
    if kind in MOVES:
        return phase, "collective", bare
    row, dot, what = bare.rpartition(".")
    return phase, "row", row if dot and (what.startswith("d") or what == "grad") else bare


def sums(marks: Sequence[Mark]) -> dict[tuple[str, str, str], float]:
    """Marks' own seconds by `key_of`."""
    found: dict[tuple[str, str, str], float] = {}
    for m in marks:
        key = key_of(m.kind, m.name, m.phase)
        found[key] = found.get(key, 0.0) + m.own_s
    return found
