"""A link that several lanes share, in time: a lane's transfers go one after the other, different lanes at once.

A transfer begins with its latency, which slows no other transfer down; then its bytes move. Where lanes share the link,
each lane whose bytes move gets an equal part of it, as flows of one connection do; else no lane slows another down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Share = Literal["shared", "each"]


@dataclass
class Transfer:
    """Seconds that a transfer takes alone, its latency first; and when it was asked for, began and ended."""

    name: str
    lane: str
    seconds: float
    latency_s: float
    asked_s: float
    start_s: float = -1.0
    end_s: float = -1.0

    def __post_init__(self) -> None:
        self.waits_s = self.latency_s
        self.left_s = self.seconds - self.latency_s


class Event(NamedTuple):
    """The moment when a transfer's latency, or its bytes, are over."""

    when_s: float
    of: Transfer
    is_latency: bool


@dataclass
class Link:
    """Transfers by lane, up to a moment."""

    share: Share
    now: float = 0.0
    lanes: dict[str, list[Transfer]] = field(default_factory=dict[str, "list[Transfer]"])

    def add(self, name: str, lane: str, seconds: float, at: float, latency_s: float = 0.0) -> Transfer:
        """Put a transfer into its lane.

        Args:
            latency_s: at most `seconds`.
        """
        self.until(at)
        found = Transfer(name, lane, seconds, min(latency_s, seconds), at)
        self.lanes.setdefault(lane, []).append(found)
        return found

    def until(self, at: float) -> None:
        """Let transfers go on until a moment."""
        while self.now < at and (first := self._next()):
            self._advance(min(first.when_s, at))
            if first.when_s <= at:
                self._reached(first)
        self.now = max(self.now, at)

    def finish(self, wanted: Transfer) -> float:
        """Let transfers go on until one is over; when that was."""
        while wanted.end_s < 0:
            first = self._next()
            assert first is not None
            self._advance(first.when_s)
            self._reached(first)
        return wanted.end_s

    def _heads(self) -> list[Transfer]:
        return [queue[0] for queue in self.lanes.values() if queue]

    def _rate(self) -> float:
        moving = sum(one.waits_s <= 0 for one in self._heads())
        return 1 / max(moving, 1) if self.share == "shared" else 1.0

    def _next(self) -> Event | None:
        """The event that comes first, if nothing else is added."""
        heads, rate = self._heads(), self._rate()
        for one in heads:
            if one.start_s < 0:
                one.start_s = max(self.now, one.asked_s)
        events = [
            Event(self.now + (one.waits_s if one.waits_s > 0 else one.left_s / rate), one, one.waits_s > 0)
            for one in heads
        ]
        return min(events, key=lambda event: event.when_s, default=None)

    def _advance(self, at: float) -> None:
        passed, rate = at - self.now, self._rate()
        for one in self._heads():
            if one.waits_s > 0:
                one.waits_s -= passed
            else:
                one.left_s = max(one.left_s - passed * rate, 0.0)
        self.now = at

    def _reached(self, event: Event) -> None:
        transfer = event.of
        if event.is_latency:
            transfer.waits_s = 0.0  # exactly 0: rounding may have left a little
            return
        transfer.end_s = self.now
        self.lanes[transfer.lane].pop(0)
