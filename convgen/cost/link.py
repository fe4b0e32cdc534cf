"""A link that several lanes share, in time: each lane's transfers one after the other, lanes at once.

Where lanes share the link, each of those at work gets an equal part of it, as flows of one connection do; else none
slows another down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Share = Literal["shared", "each"]


@dataclass
class Transfer:
    """Seconds that it takes alone; when it was asked for, began and ended."""

    name: str
    lane: str
    seconds: float
    asked_s: float
    start_s: float = -1.0
    end_s: float = -1.0
    left: float = 0.0


@dataclass
class Link:
    """Transfers by lane, up to a moment."""

    share: Share
    now: float = 0.0
    lanes: dict[str, list[Transfer]] = field(default_factory=dict[str, "list[Transfer]"])

    def add(self, name: str, lane: str, seconds: float, at: float) -> Transfer:
        """Put a transfer into its lane."""
        self.until(at)
        found = Transfer(name, lane, seconds, at, left=seconds)
        self.lanes.setdefault(lane, []).append(found)
        return found

    def until(self, at: float) -> None:
        """Let transfers go on until a moment."""
        while self.now < at and (first := self._next()):
            end, transfer = first
            step = min(end, at)
            self._advance(step)
            if end <= at:
                self._over(transfer)
        self.now = max(self.now, at)

    def finish(self, wanted: Transfer) -> float:
        """Let transfers go on until one is over; when that was."""
        while wanted.end_s < 0:
            first = self._next()
            assert first is not None
            end, transfer = first
            self._advance(end)
            self._over(transfer)
        return wanted.end_s

    def _heads(self) -> list[Transfer]:
        return [queue[0] for queue in self.lanes.values() if queue]

    def _rate(self) -> float:
        return 1 / max(len(self._heads()), 1) if self.share == "shared" else 1.0

    def _next(self) -> tuple[float, Transfer] | None:
        """Which transfer is over first as things are, and when."""
        heads = self._heads()
        for one in heads:
            if one.start_s < 0:
                one.start_s = max(self.now, one.asked_s)
        ends = [(self.now + one.left / self._rate(), i) for i, one in enumerate(heads)]
        return (min(ends)[0], heads[min(ends)[1]]) if ends else None

    def _advance(self, at: float) -> None:
        done = (at - self.now) * self._rate()
        for one in self._heads():
            one.left = max(one.left - done, 0.0)
        self.now = at

    def _over(self, transfer: Transfer) -> None:
        transfer.end_s = self.now
        self.lanes[transfer.lane].pop(0)
