# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Where ranks meet when a call begins: each tells all others the same few bytes, and that has to be quick."""

from __future__ import annotations

import ctypes
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PLACE = 108  # the most bytes of a socket's address
TOLD = 1 << 16  # the most bytes of a tensor that goes from rank to rank by sockets
LEAST = 2 * TOLD  # bytes of room that a socket must have for what is under way
ROOM = 2 * LEAST  # bytes that are asked of the system, which counts its own, too
PATIENCE = timedelta(minutes=30)  # torch's own, where a group has no time-out


class Meeting:
    """Ranks that tell one another messages: all messages are of one size, and all ranks tell theirs in the same order.

    Ranks of one machine and one user speak through sockets of theirs. By gloo a message wakes threads of both ranks
    three times, which takes longer than a small step (bench/envelope.py); ranks that don't all reach one another's
    sockets use gloo. Short tensors travel by the same sockets (transport.py), to the ranks whose sockets are in
    `peers`.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], me: int) -> None:
        """Make a meeting; all members do so at the same time.

        Args:
            group: a group of gloo; the meeting ends when it is destroyed.
            members: the members' ranks, rising.
            me: this rank's place among the members.
        """
        self.end: Any = group._get_backend(torch.device("cpu"))
        self.members, self.me = members, me
        self.patience: timedelta = getattr(self.end.options, "_timeout", None) or PATIENCE
        self.unread: Callable[[], list[bytes]] | None = None
        self.ended = ""  # why nothing can be told any more
        self.peers = self._connected()
        for peer in self.peers.values():
            peer.settimeout(self.patience.total_seconds())
        weakref.finalize(self, _close, [*self.peers.values()])

    def _connected(self) -> dict[int, socket.socket]:
        """A socket to each other member, or none at all. Nobody waits for a connection that doesn't come: members say
        that theirs are made before any is accepted."""
        found: dict[int, socket.socket] = {}
        with ExitStack() as stack:
            own, place = None, b""
            with suppress(OSError, AttributeError):  # no folder, too long a path, a system without such sockets
                folder = stack.enter_context(TemporaryDirectory(prefix="convgen-", ignore_cleanup_errors=True))
                own = _with_room(stack.enter_context(socket.socket(socket.AF_UNIX)))
                own.bind(there := str(Path(folder) / "s").encode())  # in a folder that its owner alone may enter
                own.listen(len(self.members))
                place = there
            reached = place != b""
            places = [told.rstrip() for told in self._by_gloo(place.ljust(PLACE), self.patience)()]
            with suppress(OSError, AttributeError):
                for i, there in enumerate(places[: self.me]):
                    reached = False
                    found[i] = _with_room(socket.socket(socket.AF_UNIX))
                    found[i].connect(there)
                    found[i].sendall(self.me.to_bytes(4, "big"))
                    reached = place != b""
            all_reached = all(told == b"1" for told in self._by_gloo(b"1" if reached else b"0", self.patience)())
            if own is None or not all_reached:
                _close(found.values())
                return {}
            for _ in self.members[self.me + 1 :]:
                peer = _with_room(own.accept()[0])
                found[int.from_bytes(_received(peer, 4), "big")] = peer
        if set(found) != {*range(len(self.members))} - {self.me}:
            raise ConnectionError("a process that is no rank of this mesh has connected to one of its sockets")
        return found

    def tell(self, mine: bytes, timeout: timedelta | None) -> Callable[[], list[bytes]]:
        """Post a message; the function returned waits for all members' messages and gives them in the members' order.

        Raises:
            ConnectionError: a member has gone, or had gone before.
            TimeoutError: a member did not come; where gloo carries the message it is a RuntimeError.
        """
        patience = timeout or self.patience
        if len(self.peers) + 1 < len(self.members):
            return self._by_gloo(mine, patience)
        if self.unread is not None:  # messages have no number: each is read before the next
            self.unread()
        got: list[bytes] = []

        def answers() -> list[bytes]:
            if self.unread is answers:
                self.unread = None
            while len(got) < len(self.members):
                with _Ending(self, len(got)):
                    got.append(mine if len(got) == self.me else _received(self.peers[len(got)], len(mine)))
            return got

        self._tell_all(mine, patience)
        self.unread = answers
        return answers

    def _tell_all(self, mine: bytes, patience: timedelta) -> None:
        """Also where one has gone: the others wait for this rank's words before they come to the one that is lost."""
        lost: dict[int, OSError] = {}
        for i, peer in self.peers.items() if not self.ended else ():
            try:
                peer.settimeout(patience.total_seconds())
                peer.sendall(mine)
            except OSError as error:
                lost[i] = error
                if isinstance(error, TimeoutError):  # the next one is not waited for, too
                    break
            except BaseException:  # an interrupt: perhaps a part has been sent
                with _Ending(self, i):
                    raise
        first = next(iter(lost), self.me)
        with _Ending(self, first):
            if lost:
                raise lost[first]

    def send(self, member: int, part: Tensor) -> None:
        """Send a tensor for which the socket has room, as it holds no other: so no sender waits here for a receiver
        that waits for it."""
        with _Ending(self, member):
            self.peers[member].sendall(_raw(part))

    def receive(self, member: int, part: Tensor) -> None:
        with _Ending(self, member):
            _fill(self.peers[member], _raw(part))

    def _by_gloo(self, mine: bytes, timeout: timedelta) -> Callable[[], list[bytes]]:
        out = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = [torch.empty_like(out) for _ in self.members]
        c10d: Any = dist.distributed_c10d
        options = c10d.AllgatherOptions()
        options.timeout = timeout
        work = self.end.allgather([got], [out], options)

        def answers() -> list[bytes]:
            work.wait()
            return [part.numpy().tobytes() for part in got]

        return answers


class _Ending:
    """A context around telling a member something or hearing from it. If that fails, the meeting is over for this rank:
    a part of a message can't be told from the next one. Its sockets stay open, so that others find out who was lost."""

    def __init__(self, meeting: Meeting, member: int) -> None:
        self.meeting, self.member = meeting, member

    def __enter__(self) -> None:
        if self.meeting.ended:
            raise ConnectionError(self.meeting.ended)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        rank = self.meeting.members[self.member]
        self.meeting.ended = self.meeting.ended or f"rank {rank} was lost before: {str(error) or type(error).__name__}"
        if isinstance(error, OSError):
            kinds = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
            raise kinds(f"rank {rank}: {error}") from error


def _close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _with_room(one: socket.socket) -> socket.socket:
    """A socket with ROOM bytes of room; raises OSError where the system gives less than LEAST."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < LEAST:
        raise OSError(f"a socket has less than {LEAST} bytes of room")
    return one


def _raw(part: Tensor) -> memoryview:
    """A contiguous tensor's bytes, without numpy: a storage that numpy has seen can't be resized."""
    if not part.is_contiguous():
        raise ValueError(f"a tensor of strides {part.stride()} is sent: its elements have to lie side by side")
    return memoryview((ctypes.c_ubyte * part.nbytes).from_address(part.data_ptr())).cast("B")


def _received(peer: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _fill(peer, memoryview(found))
    return bytes(found)


def _fill(peer: socket.socket, space: memoryview) -> None:
    while space:
        count = peer.recv_into(space)
        if not count:
            raise ConnectionError("it has closed its connection")
        space = space[count:]
