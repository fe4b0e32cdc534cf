"""Where ranks meet when a call begins: sockets between ranks of one machine, gloo for others, and what fails."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    """How many sockets there are, and whether answers are right, at once, read calls later, or never asked for."""
    told, right = {}, True
    for number in range(8):
        told[number] = meeting.tell(words(rank, number), None)
        for n in {2: [2], 4: [3], 6: [1, 5]}.get(number, []):  # others are read by who tells next
            right = right and told.pop(n)() == [words(r, n) for r in range(3)]
    right = right and all(answers() == [words(r, n) for r in range(3)] for n, answers in told.items())
    return len(meeting.peers), right


def test_sockets_tell_in_order() -> None:
    assert everyone(exchanged) == [(2, True)] * 3


@pytest.mark.parametrize("how", ["no sockets", "no folder", "too long", "out of reach"])
def test_one_without_sockets_has_all_tell_by_gloo(how: str, tmp_path: Path) -> None:
    made = runtime()
    transport, by_gloo = made.TorchTransport, made.Meeting._by_gloo
    long = tmp_path / ("a" * 120)
    long.mkdir()

    def elsewhere(meeting: Any, mine: bytes, timeout: timedelta) -> Any:
        """Says of a socket that it is where nobody finds it, as where ranks see other files."""
        return by_gloo(meeting, b"/nowhere/s".ljust(len(mine)) if mine.startswith(b"/") else mine, timeout)

    def program(rank: int) -> tuple[int, bool]:
        if rank == 1:  # a process of its own
            match how:
                case "no sockets":
                    made.socket = SimpleNamespace()
                case "out of reach":
                    made.Meeting._by_gloo = elsewhere
                case _:
                    tempfile.tempdir = str(long if how == "too long" else tmp_path / "none")
        return exchanged(rank, transport(WAIT, "cpu").meeting((0, 1, 2)))

    assert spawn(program, 3, GUARD_S) == [(0, True)] * 3


def talk(meeting: Any, seconds: float = GUARD_S) -> list[bytes]:
    return meeting.tell(b"here", timedelta(seconds=seconds))()


def test_who_has_gone_is_named() -> None:
    def program(rank: int, meeting: Any) -> list[str]:
        if rank == 1:
            for peer in meeting.peers.values():
                peer.close()
        heard = [told(lambda: talk(meeting)) for _ in range(2)] if rank != 1 else []
        dist.barrier()  # who ends before the others have heard is gone, too
        return heard

    first, _, last = everyone(program)
    for said in (first, last):
        assert said[0].startswith("ConnectionError: rank 1: ")
        assert said[1].startswith("ConnectionError: rank 1 was lost before: ")


def test_an_interrupt_while_telling_ends_it() -> None:
    """Perhaps a part was sent: what is told next can't be told from the rest of it."""

    class Interrupted:
        def __init__(self, peer: Any) -> None:
            self.settimeout = peer.settimeout

        def sendall(self, _: bytes) -> None:
            raise KeyboardInterrupt

    def program(rank: int, meeting: Any) -> list[str]:
        heard: list[str] = []
        if rank == 0:
            meeting.peers[2] = Interrupted(meeting.peers[2])
            with pytest.raises(KeyboardInterrupt):
                talk(meeting)
            heard = [told(lambda: talk(meeting))]
        dist.barrier()
        return heard

    assert everyone(program)[0] == ["ConnectionError: rank 2 was lost before: KeyboardInterrupt"]


def test_who_does_not_come_is_named_in_time() -> None:
    def program(rank: int, meeting: Any) -> list[str]:
        if rank == 0:  # whom all wait for first
            return []
        return [told(lambda: talk(meeting, 0.2)) for _ in range(2)]

    for said in everyone(program)[1:]:
        assert said == ["TimeoutError: rank 0: timed out", "ConnectionError: rank 0 was lost before: timed out"]


def test_tensors_of_any_length_arrive() -> None:
    """Short ones by sockets, others by gloo, some of both in one exchange; at once, or while others are under way."""
    made = runtime()

    def program(rank: int) -> None:
        end, draw = made.TorchTransport(WAIT, "cpu"), Random(0)
        begun: list[Callable[[], None]] = []

        def begin(ranks: tuple[int, ...], lengths: dict[tuple[int, int], int], number: int) -> Callable[[], None]:
            sent = [torch.full((lengths[rank, r],), 100.0 * rank + number, dtype=torch.float64) for r in ranks]
            splits, group = ([lengths[s] for s in ((rank, r), (r, rank))] for r in ranks), made.Group(ranks, "ordered")
            to, fro = zip(*splits, strict=True)
            got, others = end.start_exchange(torch.cat(sent), (to, fro), group)

            def end_it() -> None:
                end.receive_short()
                end.send_and_receive_long(others, group)
                for r, part in zip(ranks, got.split(fro), strict=True):
                    assert torch.equal(part, torch.full_like(part, 100.0 * r + number)), (number, rank, r)

            return end_it

        for number in range(90):
            ranks = draw.choice([(0, 1, 2), (2, 0, 1), (0, 2)])
            lengths = {(a, b): draw.choice([0, 1, 100, 8192, 8193, 30000]) * (a != b) for a in ranks for b in ranks}
            begun.append(begin(ranks, lengths, number) if rank in ranks else lambda: None)
            gathered = end.all_gather(torch.tensor([rank + number]), (1, 1, 1), made.Group((0, 1, 2), "ordered"))
            assert gathered.tolist() == [number, 1 + number, 2 + number]
            while len(begun) > draw.choice([0, 0, 2, 4]):
                begun.pop(0)()

    spawn(program, 3, GUARD_S)


def test_what_could_not_be_received_is_not_passed_over() -> None:
    """Else the next tensor's bytes would be taken for another's."""
    made, taken = runtime(), list[int]()

    def lost(member: int, part: Any) -> None:
        raise ConnectionError("rank 0 was lost")

    end = object.__new__(made.TorchTransport)
    ends = SimpleNamespace(receive=lost), SimpleNamespace(receive=lambda member, part: taken.append(member))
    end._coming = [(ends[1], 1, None), (ends[0], 0, None), (ends[1], 2, None)]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 0 was lost"):
            end.receive_short()
    assert taken == [1] and len(end._coming) == 2
