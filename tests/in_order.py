"""torch.distributed as TorchTransport sees it, on threads that run what is posted strictly in order, as NCCL does.

NCCL puts the point-to-point operations of a pair on one stream: an operation begins when the one posted before it is
over, and is over when the peer has come to its other half. gloo and virtual ranks match messages in any order, so an
order that hangs on GPUs passes on them. Here a state in which every live rank waits is an error that says for what.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.verify.virtual import Deadlock, PeerFailed, wait_for_end


@dataclass(eq=False)
class Ranks:
    """A process group."""

    ranks: tuple[int, ...]


@dataclass(eq=False)
class Part:
    """One rank's part of a message or a collective: over when all parts of it have been reached."""

    what: tuple[Any, ...]  # equal on all its ranks, and on no other operation's
    among: tuple[int, ...]
    rank: int
    run: Callable[[dict[int, Part]], None]  # by the last to come, with the parts of all
    tensor: Tensor
    over: bool = False
    handed: Sequence[Tensor] = ()  # of a collective: what all its ranks handed in

    def __str__(self) -> str:
        kind, *rest = self.what
        return f"{kind} {rest[0]} -> {rest[1]}" if kind == "message" else f"{kind} of ranks {self.among}"


class Post(NamedTuple):
    """What stands in a stream as one: a single operation, or a batch whose operations run together."""

    parts: tuple[Part, ...]


@dataclass
class Message:
    """dist.P2POp."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Ranks


@dataclass
class Work:
    """What a post returns."""

    world: InOrder
    parts: Sequence[Part]

    def wait(self) -> None:
        self.world.wait(self.parts)


@dataclass(eq=False)
class Meeting:
    """A group on the CPU, beside the streams: what is posted there runs in an order of its own."""

    ranks: tuple[int, ...]
    world: InOrder
    options: None = None

    def _get_backend(self, device: torch.device) -> Meeting:
        assert device.type == "cpu"
        return self

    def allgather(self, out: list[list[Tensor]], given: list[Tensor], options: Any) -> MeetingWork:
        return MeetingWork(self.world, self.world.gathered(given[0], self.ranks), out[0])


@dataclass
class MeetingWork:
    """What a post of a Meeting returns."""

    world: InOrder
    part: Part
    out: Sequence[Tensor]

    def wait(self, timeout: Any = None) -> None:
        self.world.wait([self.part])
        for to, found in zip(self.out, self.part.handed, strict=True):
            to.copy_(found)


@dataclass
class InOrder:
    """A world of ranks on threads, each with its streams.

    Args:
        module: a generated module; its `dist` is this world's while `run` runs, and it has no sockets.
        streams: "pairs": one for each pair of ranks, and one for each group's collectives; "one": one a rank, for all.
        batched: the messages of batch_isend_irecv run together, as in NCCL; else one after the other, as listed.
    """

    module: ModuleType
    ranks: int
    streams: str = "pairs"
    batched: bool = True
    transport: type[Any] | None = None  # the module's TorchTransport by default
    posts: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._where = threading.local()
        self._queues: dict[tuple[int, Any], deque[Post]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._groups: dict[tuple[int, ...], Ranks] = {}
        self._waiting: dict[int, Sequence[Part]] = {}
        self._store: dict[str, str] = {}
        self._alive: list[Any] = []  # process groups

    # ---- Running ----

    def run(self, program: Callable[[Any], Any]) -> list[Any]:
        """Results of `program(transport)` on every rank; of several errors, the first."""
        self._live, self._error = set(range(self.ranks)), None
        results: dict[int, Any] = {}
        before, threads_before = (self.module.dist, self.module.socket), torch.get_num_threads()
        kind = self.transport or self.module.TorchTransport

        def body(rank: int) -> None:
            torch.set_num_threads(1)
            self._where.rank = rank
            try:
                results[rank] = program(kind(timedelta(seconds=1), "nccl-like"))
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
            finally:
                with self._lock:
                    self._live.discard(rank)
                    self._look_for_deadlock()
                    self._lock.notify_all()

        self.module.dist, self.module.socket = self.layer(), SimpleNamespace()  # type: ignore[attr-defined]
        try:
            threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
                wait_for_end(thread)
        finally:
            self.module.dist, self.module.socket = before  # type: ignore[attr-defined]
            torch.set_num_threads(threads_before)
        if self._error is not None:
            raise self._error
        left = [str(p) for queue in self._queues.values() for post in queue for p in post.parts]
        assert not left, f"posted, and nobody waited for it: {left}"
        return [results[r] for r in range(self.ranks)]

    @property
    def me(self) -> int:
        return self._where.rank

    # ---- Streams ----

    def _post(self, parts: Sequence[Part], stream: Any, *, together: bool) -> None:
        with self._lock:
            for post in [Post(tuple(parts))] if together else [Post((p,)) for p in parts]:
                key = (self.me, "all" if self.streams == "one" and stream != "cpu" else stream or _pair(post.parts[0]))
                self._queues.setdefault(key, deque()).append(post)
            self._advance()

    def _advance(self) -> None:
        """Run all that every one of its ranks has come to, until nothing is left that can run."""
        moved = True
        while moved:
            moved = False
            reached: dict[tuple[Any, ...], dict[int, Part]] = {}
            for queue in self._queues.values():
                for part in queue[0].parts if queue else ():
                    if not part.over:
                        reached.setdefault(part.what, {})[part.rank] = part
            for parts in reached.values():
                first = next(iter(parts.values()))
                if set(parts) == set(first.among):
                    first.run(parts)
                    for part in parts.values():
                        part.over = True
                    moved = True
            for queue in self._queues.values():
                while queue and all(part.over for part in queue[0].parts):
                    queue.popleft()
                    moved = True
        self._lock.notify_all()

    def wait(self, parts: Sequence[Part]) -> None:
        with self._lock:
            while not all(part.over for part in parts):
                self._waiting[self.me] = parts
                self._look_for_deadlock()
                if self._error is not None:
                    self._waiting.pop(self.me)
                    raise PeerFailed(f"rank {self.me}: {self._error}") from self._error
                self._lock.wait()
            self._waiting.pop(self.me, None)

    def _look_for_deadlock(self) -> None:
        """Every live rank waits for what is not over: nobody will ever post more."""
        stuck = {r: [p for p in parts if not p.over] for r, parts in self._waiting.items()}
        if self._error is None and self._live and all(stuck.get(rank) for rank in self._live):
            heads = sorted(
                f"rank {rank} is at {', '.join(str(p) for p in queue[0].parts if not p.over)}"
                for (rank, _), queue in self._queues.items()
                if queue
            )
            self._error = Deadlock("every rank waits: " + "; ".join(heads))
            self._lock.notify_all()

    def _numbered(self, *what: Any) -> tuple[Any, ...]:
        """The n-th operation of a kind is the n-th on all its ranks."""
        with self._lock:
            number = self._counts[self.me, *what] = self._counts.get((self.me, *what), -1) + 1
            self.posts[what[0]] = self.posts.get(what[0], 0) + 1
        return *what, number

    # ---- What TorchTransport calls ----

    def layer(self) -> SimpleNamespace:
        """Its torch.distributed."""
        return SimpleNamespace(
            get_rank=lambda: self.me,
            get_world_size=lambda: self.ranks,
            is_initialized=lambda: True,
            new_group=self._new_group,
            isend=self._isend,
            irecv=self._irecv,
            P2POp=Message,
            batch_isend_irecv=self._batch,
            all_gather_single=self._all_gather,
            all_to_all_single=self._all_to_all,
            all_reduce=self._all_reduce,
            reduce_scatter=self._reduce_scatter,
            group=SimpleNamespace(WORLD=None),
            distributed_c10d=SimpleNamespace(
                _get_default_store=lambda: SimpleNamespace(
                    set=self._store.__setitem__, check=lambda keys: all(k in self._store for k in keys)
                ),
                _get_default_group=lambda: SimpleNamespace(bound_device_id=None),
                _process_group_name=None,
                _world=SimpleNamespace(pg_map=self._alive),
                AllgatherOptions=SimpleNamespace,
            ),
        )

    def _new_group(
        self, ranks: list[int], *, timeout: timedelta, backend: str | None = None, use_local_synchronization: bool
    ) -> Ranks | Meeting:
        assert use_local_synchronization
        assert self.me in ranks
        if backend == "gloo":
            made: Ranks | Meeting = Meeting(tuple(ranks), self)
        else:
            with self._lock:
                made = self._groups.setdefault(tuple(ranks), Ranks(tuple(ranks)))
        self._alive.append(made)
        return made

    def _message(self, src: int, dst: int, tensor: Tensor, group: Ranks) -> Part:
        assert {src, dst} <= set(group.ranks)

        def run(parts: dict[int, Part]) -> None:
            assert parts[dst].tensor.shape == parts[src].tensor.shape
            parts[dst].tensor.copy_(parts[src].tensor)

        return Part(self._numbered("message", src, dst, group.ranks), (src, dst), self.me, run, tensor)

    def _isend(self, tensor: Tensor, dst: int, group: Ranks) -> Work:
        return self._alone(self._message(self.me, dst, tensor, group))

    def _irecv(self, tensor: Tensor, src: int, group: Ranks) -> Work:
        return self._alone(self._message(src, self.me, tensor, group))

    def _alone(self, part: Part) -> Work:
        self._post([part], None, together=False)
        return Work(self, [part])

    def _batch(self, messages: list[Message]) -> list[Work]:
        parts = [
            self._message(*((self.me, m.peer) if m.op == self._isend else (m.peer, self.me)), m.tensor, m.group)
            for m in messages
        ]
        # A batch runs on its group's stream; one after the other, as without a batch, on the pairs'.
        self._post(parts, messages[0].group.ranks if self.batched else None, together=self.batched)
        return [Work(self, parts)] if self.batched else [Work(self, [part]) for part in parts]

    def gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Part:
        """Post what a rank says in a Meeting."""

        def run(parts: dict[int, Part]) -> None:
            handed = [parts[r].tensor.clone() for r in ranks]
            for part in parts.values():
                part.handed = handed

        part = Part(self._numbered("meet", ranks), ranks, self.me, run, tensor)
        self._post([part], "cpu", together=True)
        return part

    def _exchanged(self, kind: str, tensor: Tensor, group: Ranks) -> Sequence[Tensor]:
        """What all members hand in, in the group's order."""

        def run(parts: dict[int, Part]) -> None:
            handed = [parts[r].tensor.clone() for r in group.ranks]  # a rank goes on, and may write over its own
            for part in parts.values():
                part.handed = handed

        part = Part(self._numbered(kind, group.ranks), group.ranks, self.me, run, tensor)
        self._post([part], group.ranks, together=True)
        self.wait([part])
        return part.handed

    def _all_gather(self, out: Tensor, tensor: Tensor, *, group: Ranks) -> None:
        out.copy_(torch.cat(self._exchanged("all_gather", tensor, group)))

    def _all_reduce(self, tensor: Tensor, *, group: Ranks) -> None:
        tensor.copy_(torch.stack(self._exchanged("all_reduce", tensor, group)).sum(0))

    def _reduce_scatter(self, out: Tensor, parts: list[Tensor], *, group: Ranks) -> None:
        ends = [p.numel() for p in parts]
        me = group.ranks.index(self.me)
        handed = self._exchanged("reduce_scatter", torch.cat(parts), group)
        out.copy_(torch.stack([whole.split(ends)[me] for whole in handed]).sum(0))

    def _all_to_all(self, out: Tensor, tensor: Tensor, fro: list[int], to: list[int], *, group: Ranks) -> None:
        me, counts = group.ranks.index(self.me), torch.tensor(to)
        all_counts = self._exchanged("all_to_all", counts, group)
        handed = self._exchanged("all_to_all", tensor, group)
        pieces = [whole.split(c.tolist())[me] for whole, c in zip(handed, all_counts, strict=True)]
        assert [p.numel() for p in pieces] == fro
        out.copy_(torch.cat(pieces))


def _pair(part: Part) -> tuple[int, int]:
    return min(part.among), max(part.among)
