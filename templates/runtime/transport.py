# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportDeprecated=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""The seam: everything that leaves a rank goes through here."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .meetings import TOLD, Meeting

# What all generated modules of a process share, whatever their runtime: places by the key of their mesh, who defined
# which op, the class of Blocks, and process groups.
shared: dict[str, Any] = sys.modules.setdefault("_convgen_shared", ModuleType("_convgen_shared")).__dict__

Splits = Sequence[int]
Message = tuple[int, int, Callable[..., Any], Tensor]  # from, to, this rank's end of it, the tensor that travels
SHORT = 1 << 20  # bytes of a vector: a longer one is summed in place
FEW = 16  # the most ranks of a group that does so: each has a socket to each other, and may open few files
RECENT_S = 10.0  # seconds for which a rank that has failed is known to have done so
TIMED_OUT = re.compile(r"\btim(?:ed?[ -]?out|eout)\b", re.IGNORECASE)


class Group(NamedTuple):
    """Ranks that differ only along some axes, in grid order, and how their sums are added."""

    ranks: tuple[int, ...]
    sums: str  # "ordered": in rank order, in a wide type, rounded once. "native": by the backend
    add: Callable[[Tensor, int], Tensor] | None = None  # a kernel for ordered sums: takes the pieces and their number


class Transport(Protocol):
    """Collectives over flat tensors. `splits` are element counts, one for each member of the group in its order;
    all_to_all and exchange take two such lists, (to each, from each). Results are new flat tensors.

    It may have `meet(mine: bytes, ranks)`, the message that calls begin with (envelope.py): it is posted at once, and
    calling what comes back gives those of all these ranks, in their order. Without it ranks compare their code alone.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor: ...
    def reduce_scatter(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor: ...
    def all_reduce(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor: ...
    def all_to_all(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor: ...
    def exchange(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor: ...


def wide_type(kind: torch.dtype) -> torch.dtype:
    """The type in which ordered sums are added: float32 at least."""
    return torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind


def ordered_sum(pieces: Tensor, count: int, group: Group) -> Tensor:
    """The sum of `count` pieces of equal size that lie one behind the other: added in this order in a wide type, then
    rounded once."""
    add = getattr(group, "add", None)  # a module with an older runtime may have made the group
    if add is not None and pieces.is_floating_point():
        return add(pieces, count)
    first, *rest = pieces.view(count, pieces.numel() // count)
    total = first.to(wide_type(pieces.dtype), copy=True)
    for piece in rest:
        total += piece
    return total.to(pieces.dtype)


def _posted(handle: dist.ProcessGroup, sends: bool, part: Tensor, peer: int) -> dist.Work:
    """A message to, or from, a rank of a group, by its number in it."""
    raw = [torch.view_as_real(part) if part.is_complex() else part]
    return handle.send(raw, peer, 0) if sends else handle.recv(raw, peer, 0)


naming = threading.Lock()


def new_group(
    ranks: tuple[int, ...], timeout: timedelta | None, purpose: str, backend: str | None
) -> dist.ProcessGroup:
    """A process group that only its ranks make, under a name that all of them find.

    torch names such groups by how many groups a rank has, so that ranks disagree once some are in a group that others
    are not in; and where the default group is bound to a device it splits communicators of NCCL, which all ranks of
    the default group would have to call. Ours are named by their purpose, their ranks, and how many there have been.
    """
    c10d: Any = dist.distributed_c10d
    made, world = shared.setdefault("groups made", {}), c10d._get_default_group()
    number = made.get((ranks, purpose), 0)
    name = hashlib.sha256(f"{ranks} {purpose} {number}".encode()).hexdigest()[:20]

    def named_so(*_: Any, **__: Any) -> str:
        return f"convgen {purpose} {name}"

    with naming:
        torchs, bound = c10d._process_group_name, world.bound_device_id
        try:
            c10d._process_group_name = named_so
            world.bound_device_id = None
            group: Any = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        finally:
            c10d._process_group_name = torchs
            if bound is not None:
                world.bound_device_id = bound
    made[ranks, purpose] = number + 1
    return group


def default_timeout(device: str = "cpu", group: dist.ProcessGroup | None = None) -> timedelta | None:
    """How long a group waits, by default the default group's time; torch gives a new group 30 minutes whatever the
    default group has."""
    world = dist.group.WORLD if group is None else group
    options = world._get_backend(torch.device(device)).options if world is not None else None
    return getattr(options, "_timeout", None)


def _is_of_gloo(group: Any) -> bool:
    return group._get_backend(torch.device("cpu")).name() == "gloo"


class TorchTransport:
    """torch.distributed behind the seam. A process group for each set of ranks, made on first use."""

    def __init__(self, timeout: timedelta | None, device: str = "cpu", maker: str = "convgen") -> None:
        """
        Args:
            maker: name of the layer whose mesh is the first on it, for errors.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout, self.device, self.maker = timeout, device, maker
        self.defers = device == "cuda"  # the host goes on while the device works: messages of the host are read later
        self.lane = ""  # the lane whose collectives it carries; a lane other than "" has process groups of its own
        self.owns = False  # whether nobody needs what it is given any more, so that sums may be written over it
        # Torch owns the groups: one that outlived destroy_process_group would take the interpreter down at its end.
        self._groups: dict[tuple[int, ...], weakref.ref[dist.ProcessGroup]] = {}
        self._meetings: dict[tuple[int, ...], Meeting] = {}  # of these groups
        self._coming: list[tuple[Meeting, int, Tensor]] = []  # short messages: who sends them, and where they go

    def process_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """torch's group of these ranks, in the order of their numbers; only they take part in making it."""
        ranks = tuple(sorted(ranks))
        known: Any = self._groups[ranks]() if ranks in self._groups else None
        if known is None or known not in dist.distributed_c10d._world.pg_map:  # destroyed: another one
            seconds = self.timeout and self.timeout.total_seconds()
            known = self._made(ranks, f"{self.device} {self.lane} {seconds}", None)
            if self.device == "cuda":
                # A batch of messages may leave ranks out only where a collective of all came first.
                dist.all_reduce(torch.zeros(1, device=self.device), group=known)
            elif self.device == "cpu" and len(ranks) <= FEW and _is_of_gloo(known):
                self._meetings[ranks] = Meeting(known, ranks, ranks.index(self.rank))
            self._groups[ranks] = weakref.ref(known)
        return known

    def _made(self, ranks: tuple[int, ...], purpose: str, backend: str | None) -> dist.ProcessGroup:
        try:
            return new_group(ranks, self.timeout, purpose, backend)
        except Exception as error:
            kind = TimeoutError if TIMED_OUT.search(str(error)) else RuntimeError
            absent = self.absent(f"group {purpose} {ranks}", ranks)
            who = f"ranks {absent} did not come: " if absent else ""
            text = f"{self.maker}: {who}rank {self.rank} did not meet all of ranks {list(ranks)}: {error}"
            raise kind(text) from error

    def meeting(self, members: tuple[int, ...]) -> Meeting:
        """The Meeting of these ranks, in rising order. All meshes on the same ranks share it, so that ranks which call
        two modules in different orders find out there."""
        meetings: dict[Any, tuple[Any, Meeting]] = shared.setdefault("meetings", {})
        group, meeting = meetings.get((members, self.rank), (None, None))
        known: Any = group() if group is not None else None
        if meeting is None or known not in dist.distributed_c10d._world.pg_map:
            known = self._made(members, "meetings", "gloo")
            meeting = Meeting(known, members, members.index(self.rank))
            meetings[members, self.rank] = weakref.ref(known), meeting
        return meeting

    def meet(self, mine: bytes, ranks: Sequence[int]) -> Callable[[], list[bytes]]:
        """Post a message to all of these ranks; the function returned waits for theirs and gives them in the ranks'
        order."""
        members = tuple(sorted(ranks))
        answers = self.meeting(members).tell(mine, self.timeout)

        def in_order() -> list[bytes]:
            told = answers()
            return [told[members.index(r)] for r in ranks]

        return in_order

    def _send_and_receive(self, sends: list[Tensor], receives: list[Tensor], group: Group) -> None:
        """Point to point, only between ranks that have something for each other."""
        others = self._start_short(sends, receives, group)
        self.receive_short()
        self.send_and_receive_long(others, group)

    def _start_short(self, sends: list[Tensor], receives: list[Tensor], group: Group) -> list[Message]:
        """Send short messages by sockets, between ranks of one machine: that wakes one thread of a rank, where gloo
        wakes three. They are received by `receive_short`, or before others are sent: then a socket holds one more.

        Returns:
            the other messages. NCCL runs those of a pair in the order in which they are posted. Here it is one order
            for all ranks: pair by pair, and of a pair what its lower rank sends first. So the earliest message that is
            not over has both its ranks waiting for it, whatever runs them, and no order can block.
        """
        meeting = self._meeting_of(group)  # made by all ranks of the group, even those without messages
        me = group.ranks.index(self.rank)
        receives[me].copy_(sends[me])
        messages = [(self.rank, peer, dist.isend, part) for peer, part in zip(group.ranks, sends, strict=True)]
        messages += [(peer, self.rank, dist.irecv, part) for peer, part in zip(group.ranks, receives, strict=True)]
        messages = [m for m in messages if m[0] != m[1] and m[3].numel()]
        messages.sort(key=lambda m: (min(m[:2]), max(m[:2]), m[0]))
        if meeting is None or not messages:
            return messages
        self.receive_short()
        for src, dst, _, part in messages:
            if part.nbytes <= TOLD and src == self.rank:
                meeting.send(meeting.members.index(dst), part)
            elif part.nbytes <= TOLD:
                self._coming.append((meeting, meeting.members.index(src), part))
        return [m for m in messages if m[3].nbytes > TOLD]

    def receive_short(self) -> None:
        while self._coming:
            meeting, member, part = self._coming[0]
            meeting.receive(member, part)
            del self._coming[0]  # what could not be received stays, so that nothing behind it is taken for it

    def send_and_receive_long(self, messages: list[Message], group: Group) -> None:
        """Send and receive messages by the backend, in one batch."""
        if not messages:
            return
        peers = [src + dst - self.rank for src, dst, _, _ in messages]
        handle, pairs = self.process_group(group.ranks), zip(messages, peers, strict=True)
        if self.device == "cpu":  # no batch is needed, and torch's takes longer than a short message
            ranks = sorted(group.ranks)
            work = [_posted(handle, how is dist.isend, part, ranks.index(peer)) for (_, _, how, part), peer in pairs]
        else:
            work = dist.batch_isend_irecv([dist.P2POp(how, part, peer, handle) for (_, _, how, part), peer in pairs])
        for i, one in enumerate(work):
            try:
                one.wait()
            except Exception as error:
                with_whom = f"with rank {peers[i]}: " if len(work) == len(peers) else ""  # NCCL's is one for all
                raise RuntimeError(f"{with_whom}{error}") from error

    def _meeting_of(self, group: Group) -> Meeting | None:
        """Sockets between these ranks, where all of them have some."""
        self.process_group(group.ranks)
        meeting = self._meetings.get(tuple(sorted(group.ranks)))
        return meeting if meeting is not None and meeting.peers else None

    def _is_pair(self, group: Group) -> bool:
        """Whether the group is two ranks without a GPU: there a message each way moves as many bytes as gloo's
        collective, in one round, and is quicker."""
        return self.device == "cpu" and len(group.ranks) == 2

    def _is_quick(self, group: Group, nbytes: int) -> bool:
        """Whether a message of at most so many bytes from each rank to each other is quicker than a collective."""
        is_short = self.device == "cpu" and nbytes <= TOLD
        return self._is_pair(group) or (is_short and self._meeting_of(group) is not None)

    def absent(self, what: str, ranks: Sequence[int]) -> list[int]:
        """The ranks that don't report a failure within a second, among ranks where something has failed: they are late
        or gone."""
        missing: list[int] = []
        # The store may have died with the rank that kept it.
        with suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(f"convgen {what} {self.rank}", "failed")
            store.set(f"convgen failed {self.rank}", str(time.time()))

            def has_said(rank: int) -> bool:
                if store.check([f"convgen {what} {rank}"]):
                    return True
                elsewhere = f"convgen failed {rank}"  # in another step, which this one's failure may have caused
                return store.check([elsewhere]) and abs(time.time() - float(store.get(elsewhere))) < RECENT_S

            for _ in range(10):
                missing = [r for r in ranks if not has_said(r)]
                if not missing:
                    break
                time.sleep(0.1)
        return missing

    def all_gather(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        out = tensor.new_empty(sum(splits))
        even = len(set(splits)) == 1 and list(group.ranks) == sorted(group.ranks)
        if even and not self._is_quick(group, tensor.nbytes):
            # torch 2.13 has a new name for it and deprecates the old one.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(out, tensor, group=self.process_group(group.ranks))
        else:
            self._send_and_receive([tensor] * len(splits), list(out.split(list(splits))), group)
        return out

    def reduce_scatter(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        me = group.ranks.index(self.rank)
        if group.sums == "ordered":
            mine = (splits[me],) * len(splits)
            move = self.exchange if self._is_quick(group, tensor.nbytes) else self.all_to_all
            return ordered_sum(move(tensor, (splits, mine), group), len(splits), group)
        order = sorted(range(len(splits)), key=group.ranks.__getitem__)
        parts, out = tensor.split(list(splits)), tensor.new_empty(splits[me])
        dist.reduce_scatter(out, [parts[i] for i in order], group=self.process_group(group.ranks))
        return out

    def all_reduce(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        # Of two addends no order can be wrong: in their own type the backend's sum is the ordered one, bit for bit.
        in_order = group.sums == "ordered" and (len(group.ranks) > 2 or tensor.dtype != wide_type(tensor.dtype))
        if in_order and len(group.ranks) == 2:  # the same bytes, in one message instead of two
            return ordered_sum(self.all_gather(tensor, (tensor.numel(),) * 2, group), 2, group)
        if in_order:
            return self.all_gather(self.reduce_scatter(tensor, splits, group), splits, group)
        if self._is_pair(group) and tensor.nbytes <= SHORT:
            theirs = torch.empty_like(tensor)
            found = [tensor if rank == self.rank else theirs for rank in group.ranks]
            self._send_and_receive([tensor] * 2, found, group)
            return theirs.add_(tensor)
        out = tensor if self.owns else tensor.clone()
        if not out.numel():
            return out
        dist.all_reduce(out, group=self.process_group(group.ranks))
        return out

    def all_to_all(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        to, fro = splits
        out = tensor.new_empty(sum(fro))
        if list(group.ranks) == sorted(group.ranks) and not self._is_pair(group):
            dist.all_to_all_single(out, tensor, list(fro), list(to), group=self.process_group(group.ranks))
        else:
            self._send_and_receive(list(tensor.split(list(to))), list(out.split(list(fro))), group)
        return out

    def exchange(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        out = tensor.new_empty(sum(splits[1]))
        self._send_and_receive(list(tensor.split(list(splits[0]))), list(out.split(list(splits[1]))), group)
        return out

    def start_exchange(
        self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group
    ) -> tuple[Tensor, list[Message]]:
        """The result, which short messages fill in `receive_short`, and the other messages that fill it."""
        out = tensor.new_empty(sum(splits[1]))
        others = self._start_short(list(tensor.split(list(splits[0]))), list(out.split(list(splits[1]))), group)
        return out, others
