"""Lanes of a GPU: nothing is read before it has come, whatever order its streams run in; the host never waits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from runtime_parts import ROOT
from sampling import cases_of

from runtime.lanes import StreamLane, begin  # isort: skip
from runtime.transport import Group  # isort: skip

assert (ROOT / "templates").is_dir(), "which runtime_parts has put on the path"

GROUP = Group((0, 1), "ordered")


class Event:
    def __init__(self) -> None:
        self.over = False


class Stream:
    """What a stream was given, in order: work, or an event to wait for."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object] | Event] = []
        DEVICE.streams.append(self)

    def record_event(self) -> Event:
        event = Event()
        self.given.append(lambda: setattr(event, "over", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.given.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    @property
    def is_ready(self) -> bool:
        return bool(self.given) and (not isinstance(self.given[0], Event) or self.given[0].over)

    def step(self) -> None:
        done = self.given.pop(0)
        if not isinstance(done, Event):
            done()


class Device:
    """A GPU whose streams take turns at random."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current: Any = None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, rng: random.Random) -> None:
        while ready := [s for s in self.streams if s.is_ready]:
            rng.choice(ready).step()
        assert not any(s.given for s in self.streams), "a stream waits for what never comes"


class Number:
    """A tensor whose value is there once its stream has come to it."""

    is_cuda = True

    def __init__(self) -> None:
        self.value: int | None = None
        self.used_on: list[Stream] = []

    def detach(self) -> Number:
        return self

    def record_stream(self, stream: Stream) -> None:
        self.used_on.append(stream)

    @property
    def read(self) -> int:
        assert self.value is not None, "read before it was there"
        return self.value


class End:
    """A transport whose collectives double what they are given."""

    def __init__(self, timeout: object = None, device: str = "cuda", maker: str = "net") -> None:
        self.timeout, self.device, self.maker = timeout, device, maker
        self.groups: list[tuple[int, ...]] = []

    def process_group(self, ranks: tuple[int, ...]) -> None:
        self.groups.append(ranks)

    def all_reduce(self, number: Number, splits: object, group: Group) -> Number:
        out = Number()
        DEVICE.current.given.append(lambda: setattr(out, "value", 2 * number.read))
        return out


DEVICE = Device()


@pytest.mark.parametrize("seed", cases_of(40, "test_results_are_read_when_they_have_come"))
def test_results_are_read_when_they_have_come(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs that compute, start and wait, on two lanes."""
    rng = random.Random(seed)
    DEVICE.__init__()
    main = DEVICE.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DEVICE.current)
    end = End()
    values: list[tuple[Number, int]] = []
    flying: list[tuple[Any, Number, int]] = []
    for _ in range(30):
        match rng.choice(("compute", "start", "wait")):
            case "start" if values:
                number, expected = rng.choice(values)
                flying.append((begin(end, "all_reduce", number, (1, 1), GROUP, rng.choice("xy")), number, 2 * expected))  # type: ignore[arg-type]
            case "wait" if flying:
                pending, sent, expected = flying.pop(rng.randrange(len(flying)))
                came = pending.wait()
                assert main in came.used_on and any(s is not main for s in sent.used_on)
                values.append((came, expected))
            case _:
                number, (of, expected) = Number(), rng.choice(values) if values else (None, 0)
                main.given.append(lambda n=number, of=of: setattr(n, "value", (of.read if of else 0) + 1))
                values.append((number, expected + 1))
    assert len(DEVICE.streams) <= 3 and not end.groups, "a stream a lane, and groups of the lane's own"
    DEVICE.run(rng)
    assert [number.read for number, _ in values] == [expected for _, expected in values]


def test_a_lane_has_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    DEVICE.__init__()
    DEVICE.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DEVICE.current)
    lane = StreamLane(End(), "gradients", owns=True)
    lane.start("all_reduce", Number(), (1, 1), GROUP)  # type: ignore[arg-type]
    assert lane.end.groups == [(0, 1)] and lane.end.owns and lane.end.lane == "gradients"
