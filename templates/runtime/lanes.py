# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Collectives in flight: started on a lane, and waited for later."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .transport import Group, Transport, shared

SETTLED_S = 2.0  # the longest that the interpreter's end waits for what is in flight


def noted(what: str, name: str) -> AbstractContextManager[Any]:
    """A context that torch.profiler, where it is at work, shows as `convgen WHAT NAME`."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"convgen {what} {name}")


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> Tensor: ...


class Flight:
    """A collective on another thread; once it is over, it has its result or the error."""

    def __init__(self, collective: Callable[[], Tensor]) -> None:
        self._collective: Callable[[], Tensor] | None = collective
        self.over = threading.Event()
        self._result: Tensor | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        collective, self._collective = self._collective, None
        assert collective is not None
        try:
            self._result = collective()
        except Exception as error:  # raised by whoever waits
            self._error = error
        del collective  # before the starter goes on: it may be the last thing that the process does
        self.over.set()

    def wait(self) -> Tensor:
        self.over.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Landed:
    """A collective that was over when its start returned."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class Arriving:
    """An exchange whose short messages are received when somebody waits for it."""

    def __init__(self, end: Any, others: Pending) -> None:
        self._end, self._others = end, others

    def wait(self) -> Tensor:
        self._end.receive_short()
        return self._others.wait()


class Streamed:
    """A collective on another stream of a GPU: the host doesn't wait for it, the stream that reads its result does."""

    def __init__(self, result: Tensor, over: Any) -> None:
        self._result, self._over = result, over

    def wait(self) -> Tensor:
        reads = torch.cuda.current_stream()
        reads.wait_event(self._over)
        self._result.record_stream(reads)
        return self._result


def apart(end: Any, name: str, owns: bool) -> Any:
    """A transport like `end`, with process groups of its own."""
    made = type(end)(end.timeout, end.device, end.maker)
    made.lane, made.owns = name, owns
    return made


class StreamLane:
    """A lane on a GPU: a stream, with process groups of its own. Its collectives run in the order in which they are
    started: no rank's collectives of another lane can stand between them."""

    def __init__(self, end: Any, name: str, owns: bool) -> None:
        self.end, self.stream = apart(end, name, owns), torch.cuda.Stream()

    def start(self, kind: str, tensor: Tensor, splits: Any, group: Group) -> Streamed:
        self.end.process_group(group.ranks)  # made here, as a thread's are
        self.stream.wait_stream(torch.cuda.current_stream())  # on which the tensor is made
        with torch.cuda.stream(self.stream):
            result = getattr(self.end, kind)(tensor, splits, group)
            over = self.stream.record_event()
        tensor.record_stream(self.stream)  # its memory is not given to others while it travels
        return Streamed(result, over)


class Lane:
    """A lane on a CPU: a thread that runs collectives one after the other while the rank computes, in process groups of
    its own.

    So they run in the order in which they are started, the same on all ranks, whatever other lanes do.
    """

    def __init__(self, end: Any, name: str, owns: bool) -> None:
        self.end = apart(end, name, owns)
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        threading.Thread(target=fly, args=(self._flights,), name=f"convgen {name}", daemon=True).start()
        settled = partial(settle, self._flights)
        atexit.register(settled)
        weakref.finalize(self, end_lane, self._flights, settled).atexit = False

    def start(self, kind: str, tensor: Tensor, splits: Any, group: Group) -> Flight:
        return self._fly(lambda: getattr(self.end, kind)(tensor, splits, group), group)

    def start_exchange(self, end: Any, tensor: Tensor, splits: Any, group: Group) -> Pending:
        """Start an exchange. Short messages need no thread: they are sent at once, and received by whoever waits."""
        self.end.process_group(group.ranks)  # of all its ranks, even if few of them have long messages
        out, others = end.start_exchange(tensor, splits, group)

        def rest() -> Tensor:
            self.end.send_and_receive_long(others, group)
            return out

        return Arriving(end, self._fly(rest, group) if others else Landed(out))

    def _fly(self, collective: Callable[[], Tensor], group: Group) -> Flight:
        self.end.process_group(group.ranks)  # made here: groups of the same ranks are told apart by their order
        flight = Flight(collective)
        self._flights.put(flight)
        return flight


def settle(flights: queue.SimpleQueue[Flight | None]) -> None:
    """Before the interpreter ends, let what is in flight end: a thread that comes back from it then aborts the process.
    Not for long: whoever is waited for may be gone."""
    last = Flight(lambda: torch.empty(0))
    flights.put(last)
    last.over.wait(SETTLED_S)


def end_lane(flights: queue.SimpleQueue[Flight | None], settled: Callable[[], None]) -> None:
    """End a lane, on which nothing will be started any more."""
    atexit.unregister(settled)
    flights.put(None)


def fly(flights: queue.SimpleQueue[Flight | None]) -> None:
    """What a lane's thread does: it runs flights one after the other until the lane ends."""
    while (flight := flights.get()) is not None:
        flight.run()
        del flight  # and with it what it has moved, which its starter has, or nobody


def begin(
    transport: Transport, kind: str, tensor: Tensor, splits: Any, group: Group, lane: str, *, owns: bool = False
) -> Pending:
    """Start a collective of a transport; all ranks of the group start those of a lane in one order.

    Args:
        owns: whether nobody needs the tensors that this lane moves any more, so that they may be written over.

    A transport of the user's own may have `start(kind, tensor, splits, group, lane)`, which returns what has a `wait`;
    without it collectives are over when they are started.
    """
    tensor = tensor.detach()  # a lane's thread has gradients enabled, and backends write versions of what they send
    own: Any = getattr(transport, "start", None)
    if own is not None:
        return own(kind, tensor, splits, group, lane)
    if not hasattr(transport, "process_group"):
        return Landed(getattr(transport, kind)(tensor, splits, group))
    lanes = shared.setdefault("lanes", weakref.WeakKeyDictionary()).setdefault(transport, {})
    if lane not in lanes:
        lanes[lane] = (StreamLane if tensor.is_cuda else Lane)(transport, lane, owns)
    made = lanes[lane]
    if kind == "exchange" and isinstance(made, Lane):
        return made.start_exchange(transport, tensor, splits, group)
    return made.start(kind, tensor, splits, group)
