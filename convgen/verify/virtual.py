"""Virtual ranks: the ranks of a grid as threads of one process, with a transport of their own.

The transport follows a generated module's `Transport` protocol, by a rendezvous: a collective is complete when every
member of its group has come. It is an error, which says who waits for what, if members call different collectives, or
if every live rank waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from convgen.verify.counting import Sent, count, is_identity

Splits = Sequence[int]
Key = tuple[tuple[int, ...], str, int]  # a collective: its group, its lane, and its number there
Result = TypeVar("Result")


class Group(Protocol):
    """What a generated module passes as the group of a collective."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def sums(self) -> str: ...
    @property
    def add(self) -> Callable[[Tensor, int], Tensor] | None: ...


class Mismatch(RuntimeError):
    """Members of a group called different collectives, or with sizes that don't agree."""


class Deadlock(RuntimeError):
    """Every live rank waits for another."""


class PeerFailed(RuntimeError):
    """Another rank raised; this one can't go on."""


@dataclass(slots=True)
class _Meeting:
    """A collective of a group, under way."""

    calls: dict[int, tuple[str, Tensor, tuple[tuple[int, ...], ...]]] = field(
        default_factory=dict[int, "tuple[str, Tensor, tuple[tuple[int, ...], ...]]"]
    )
    left: int = 0


class World:
    """So many virtual ranks; `run` runs a function on each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._lock = threading.Condition()
        self._meetings: dict[Key, _Meeting] = {}
        self._waiting: dict[int, tuple[str, tuple[int, ...], _Meeting]] = {}
        self._live: set[int] = set()
        self._error: BaseException | None = None

    def run(self, program: Callable[[VirtualTransport], Result]) -> list[Result]:
        """Run `program(transport)` on every rank; gives the results.

        Raises:
            Mismatch, Deadlock: with who called or waits for what.
            Exception: whatever a rank raised first.
        """
        results: dict[int, Result] = {}
        threads_before = torch.get_num_threads()
        self._live, self._error = set(range(self.ranks)), None

        def body(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                results[rank] = program(VirtualTransport(self, rank))
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
            finally:
                with self._lock:
                    self._live.discard(rank)
                    self._look_for_deadlock()
                    self._lock.notify_all()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.ranks)]
        try:
            for thread in threads:
                thread.start()
            self._join(threads)
        except KeyboardInterrupt as interrupt:
            with self._lock:  # waiting ranks stop; the others do at their next message, or end
                self._error = interrupt
                self._lock.notify_all()
            self._join([thread for thread in threads if thread.ident is not None])
        torch.set_num_threads(threads_before)
        if self._error is not None:
            raise self._error
        return [results[r] for r in range(self.ranks)]

    @staticmethod
    def _join(threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive():  # an interrupt just before a wait is heard only after it
                thread.join(1.0)
            wait_for_end(thread)

    def come(self, rank: int, key: Key, kind: str, tensor: Tensor, splits: tuple[Splits, ...]) -> None:
        """Hand in this rank's part of a collective; the rank may go on."""
        group = key[0]
        with self._lock:
            if rank not in self._live:
                raise Deadlock(f"rank {rank} calls {kind} of ranks {group}, but its world is not running")
            meeting = self._meetings.setdefault(key, _Meeting(left=len(group)))
            # A copy: the sender may go on and change its tensor before the last member has read it.
            meeting.calls[rank] = (kind, tensor.clone(), tuple(tuple(s) for s in splits))
            if len(meeting.calls) == len(group):
                for other in group:  # ranks waiting for this meeting go on, though they may not know it yet
                    if other in self._waiting and self._waiting[other][2] is meeting:
                        self._waiting.pop(other)
                self._lock.notify_all()

    def leave(self, rank: int, key: Key, kind: str) -> list[tuple[Tensor, tuple[tuple[int, ...], ...]]]:
        """Wait for a collective; gives all members' parts, in the group's order."""
        group = key[0]
        with self._lock:
            meeting = self._meetings[key]
            while len(meeting.calls) < len(group):
                self._waiting[rank] = (kind, group, meeting)
                self._look_for_deadlock()
                if self._error is None:
                    self._lock.wait()
                if self._error is not None:
                    self._waiting.pop(rank, None)
                    raise PeerFailed(f"rank {rank}, in {kind} of ranks {group}: {self._error}") from self._error
            kinds = {r: meeting.calls[r][0] for r in group}
            if len(set(kinds.values())) > 1:
                raise Mismatch(f"ranks {group} are in different collectives: {kinds}")
            parts = [meeting.calls[r][1:] for r in group]
            meeting.left -= 1
            if not meeting.left:
                del self._meetings[key]
            return parts

    def _look_for_deadlock(self) -> None:
        """Set an error if every live rank waits, and no meeting that they wait for is complete."""
        if self._error is not None or len(self._waiting) < len(self._live):  # cheap: each waiter asks, at each meeting
            return
        if self._live and self._live <= set(self._waiting):
            gone = sorted(set(range(self.ranks)) - self._live)
            text = "; ".join(
                f"rank {rank} waits in {kind} of ranks {group} for {[r for r in group if r not in meeting.calls]}"
                for rank in sorted(self._live)
                for kind, group, meeting in (self._waiting[rank],)
            )
            self._error = Deadlock(f"{text}" + (f"; ranks {gone} have ended" if gone else ""))
            self._lock.notify_all()


def wait_for_end(thread: threading.Thread) -> None:
    """Wait until the system has forgotten a thread that Python has joined.

    It may still be giving back what its kernels' libraries lent it; a process forked meanwhile would inherit their
    locks and hang in its first convolution.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    deadline = time.monotonic() + 600.0  # a starved machine takes its time over it
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)


class Flight:
    """A collective that a rank has started."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


class VirtualTransport:
    """One rank's end of a `World`; follows the protocol of generated modules, and counts what it sends."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size = rank, world.ranks
        self.sent: list[Sent] = []
        self._world, self._inside = world, False
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}

    def start(self, kind: str, tensor: Tensor, splits: Any, group: Group, lane: str) -> Flight:
        """Start a collective, which meets the others' of its lane; this rank goes on meanwhile."""
        both = kind in ("all_to_all", "exchange")
        key = self._hand_in(kind, tensor, splits if both else (splits,), group, lane)
        return Flight(lambda: self._result(kind, splits, group, self._world.leave(self.rank, key, kind)))

    def _hand_in(self, kind: str, tensor: Tensor, splits: tuple[Splits, ...], group: Group, lane: str = "") -> Key:
        if tensor.dim() != 1 or (tensor.numel() != sum(splits[0]) and kind != "all_gather"):
            raise Mismatch(f"rank {self.rank}: {kind} of {tuple(tensor.shape)} with splits {splits[0]}")
        if not is_identity(tensor) and not self._inside:
            both = kind in ("all_to_all", "exchange")
            self.sent.append(count(kind, tensor, splits if both else splits[0], group.ranks, self.rank, lane))
        number = self._numbers.get((group.ranks, lane), 0)
        self._numbers[group.ranks, lane] = number + 1
        key = (group.ranks, lane, number)
        self._world.come(self.rank, key, kind, tensor, splits)
        return key

    @contextmanager
    def as_one(self, kind: str, tensor: Tensor, splits: Splits, group: Group, lane: str) -> Generator[None]:
        """Count the messages inside as one collective."""
        self.sent.append(count(kind, tensor, splits, group.ranks, self.rank, lane))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _now(self, kind: str, tensor: Tensor, splits: Any, group: Group) -> Tensor:
        return self.start(kind, tensor, splits, group, "").wait()

    def meet(self, mine: bytes, ranks: Sequence[int]) -> Callable[[], list[bytes]]:
        """Exchange the message with which calls begin; VOLUME doesn't count it."""
        members, lane = tuple(sorted(ranks)), "meet"
        number = self._numbers.get((members, lane), 0)
        self._numbers[members, lane] = number + 1
        key = (members, lane, number)
        self._world.come(self.rank, key, lane, torch.frombuffer(bytearray(mine), dtype=torch.uint8), ())

        def answers() -> list[bytes]:
            parts = self._world.leave(self.rank, key, lane)
            return [parts[members.index(r)][0].numpy().tobytes() for r in ranks]

        return answers

    def all_gather(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        return self._now("all_gather", tensor, splits, group)

    def reduce_scatter(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        return self._now("reduce_scatter", tensor, splits, group)

    def all_reduce(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        return self._now("all_reduce", tensor, splits, group)

    def all_to_all(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        return self._now("all_to_all", tensor, splits, group)

    def exchange(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        return self._now("exchange", tensor, splits, group)

    def _result(
        self, kind: str, splits: Any, group: Group, parts: list[tuple[Tensor, tuple[tuple[int, ...], ...]]]
    ) -> Tensor:
        """What this rank gets of the parts that all have handed in."""
        me, types = group.ranks.index(self.rank), {p.dtype for p, _ in parts}
        if len(types) > 1:
            raise Mismatch(f"{kind} of ranks {group.ranks}: they send {', '.join(sorted(map(str, types)))}")
        match kind:
            case "all_gather":
                self._agree(kind, [p.numel() for p, _ in parts], list(splits), group)
                return torch.cat([p for p, _ in parts])
            case "reduce_scatter":
                self._agree(kind, [s for _, (s,) in parts], [tuple(splits)] * len(parts), group)
                return self._sum([torch.split(p, list(splits))[me] for p, _ in parts], group)
            case "all_reduce":
                self._agree(kind, [s for _, (s,) in parts], [tuple(splits)] * len(parts), group)
                return self._sum([p for p, _ in parts], group)
            case _:
                self._agree(kind, [to[me] for _, (to, _) in parts], list(splits[1]), group)
                return torch.cat([torch.split(p, list(to))[me] for p, (to, _) in parts])

    def _agree(self, kind: str, got: Sequence[object], expected: Sequence[object], group: Group) -> None:
        if got != expected:
            raise Mismatch(
                f"rank {self.rank}, {kind} of ranks {group.ranks}: expects {expected}, the others send {got}"
            )

    @staticmethod
    def _sum(pieces: list[Tensor], group: Group) -> Tensor:
        """The sum in rank order: `ordered` in a wide type, rounded once, or by a kernel; `native` in their own type."""
        if group.sums == "ordered" and group.add is not None and pieces[0].is_floating_point():
            return group.add(torch.cat(pieces), len(pieces))
        kind = pieces[0].dtype
        wide = torch.promote_types(kind, torch.float32) if group.sums == "ordered" and kind.is_floating_point else kind
        total = pieces[0].to(wide, copy=True)
        for piece in pieces[1:]:
            total += piece
        return total.to(pieces[0].dtype)
