"""Where ranks meet when a call begins: sockets between ranks of one machine, gloo for others, and what fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_cases import GUARD_S, fault_layer, told

from convgen.verify.processes import spawn

LAYER = fault_layer("meetings", "stationary-x", {"C": 2})
WAIT = timedelta(seconds=GUARD_S)


def runtime() -> Any:
    return sys.modules[LAYER.module.TorchTransport.__module__]


def everyone(program: Callable[[int, Any], Any], ranks: int = 3) -> list[Any]:
    """Results of a program of ranks that meet; their meeting is its argument."""
    made = runtime().TorchTransport  # before ranks are forked

    def run(rank: int) -> Any:
        return program(rank, made(WAIT, "cpu").meeting(tuple(range(ranks))))

    return spawn(run, ranks, GUARD_S)


def words(rank: int, number: int) -> bytes:
    return f"{rank} {number}".encode().ljust(40 if number % 2 else 5000)


def exchanged(rank: int, meeting: Any) -> tuple[int, bool]:
    """How many sockets there are, and whether answers are right, at once or read two calls later."""
    late, right = [], True
    for number in range(8):
        answers = meeting.tell(words(rank, number), None)
        if number % 3:
            right = right and answers() == [words(r, number) for r in range(3)]
        else:
            late.append((number, answers))
    right = right and all(answers() == [words(r, n) for r in range(3)] for n, answers in late)
    return len(meeting.peers), right


def test_sockets_tell_in_order() -> None:
    assert everyone(exchanged) == [(2, True)] * 3


@pytest.mark.parametrize("how", ["no sockets", "too long", "out of reach"])
def test_one_without_sockets_has_all_tell_by_gloo(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = runtime()
    if how == "no sockets":
        monkeypatch.setattr(made, "socket", SimpleNamespace())
    if how == "too long":
        (tmp_path / ("a" * 120)).mkdir()
        monkeypatch.setattr(made.tempfile, "tempdir", str(tmp_path / ("a" * 120)))
    transport = made.TorchTransport

    def program(rank: int) -> tuple[int, bool]:
        if rank != 1:
            monkeypatch.undo()
        elif how == "out of reach":  # as where ranks see other files
            made.Meeting._by_gloo, by_gloo = elsewhere, made.Meeting._by_gloo
            elsewhere.inner = by_gloo  # type: ignore[attr-defined]
        return exchanged(rank, transport(WAIT, "cpu").meeting((0, 1, 2)))

    assert spawn(program, 3, GUARD_S) == [(0, True)] * 3


def elsewhere(meeting: Any, mine: bytes, timeout: timedelta) -> Any:
    """Says of a socket that it is where nobody finds it."""
    mine = b"/nowhere/s".ljust(len(mine)) if mine.startswith(b"/") else mine
    return elsewhere.inner(meeting, mine, timeout)  # type: ignore[attr-defined]


def talk(meeting: Any, seconds: float = GUARD_S) -> list[bytes]:
    return meeting.tell(b"here", timedelta(seconds=seconds))()


def test_who_has_gone_is_named() -> None:
    def program(rank: int, meeting: Any) -> list[str]:
        if rank == 1:
            for peer in meeting.peers.values():
                peer.close()
            return []
        return [told(lambda: talk(meeting)) for _ in range(2)]

    first, _, last = everyone(program)
    for said in (first, last):
        assert said[0].startswith("ConnectionError: rank 1: ")
        assert said[1].startswith("ConnectionError: rank 1 was lost before: ")


def test_who_does_not_come_is_named_in_time() -> None:
    def program(rank: int, meeting: Any) -> list[str]:
        if rank == 0:  # whom all wait for first
            return []
        return [told(lambda: talk(meeting, 0.2)) for _ in range(2)]

    for said in everyone(program)[1:]:
        assert said == ["TimeoutError: rank 0: timed out", "ConnectionError: rank 0 was lost before: timed out"]
