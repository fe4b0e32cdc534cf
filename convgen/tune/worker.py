"""The process that measures; it may hang or die without taking the tuner along.

A request is (number, name, arguments), a reply (number, dictionary); a request whose reply never comes is the
candidate's fault. Names are methods of CpuBench and GpuBench:

    open       operands of a problem and ATen, whose time comes back; what follows is about this problem
    attempt    check a kernel and time it
    race       other operands; check kernels, time them and ATen in turn
    module     a module with a kernel and the one without, in turn (CPUs)
    ceilings   what the device reaches

On a CPU with one thread this process runs nothing but ATen itself. For each kernel, and for each race, it forks a
process, which begins in the state before any kernel, sends its number first, and is ended afterwards with all that it
started. So whatever a kernel does to its process, the next kernel isn't affected.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from convgen.spec.target import Target
from convgen.tune.bench_cpu import CpuBench
from convgen.tune.bench_gpu import GpuBench
from convgen.tune.clock import CudaClock

FORKED = ("attempt", "race", "module", "ceilings")
LOOK_S = 0.05
STRAY = 71  # the exit code of a process that a kernel forked, and that came back from it


def forks(target: Target, threads: int) -> bool:
    """Whether each kernel has a process of its own; threads would not survive the fork."""
    return target.is_cpu and threads == 1


def serve(connection: Connection, target: Target, threads: int, log: str) -> None:
    """Answer requests until the tuner ends the connection."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the tuner's
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    bench = CpuBench(threads) if target.is_cpu else GpuBench(CudaClock())
    me = os.getpid()
    while True:
        try:
            number, name, *arguments = connection.recv()
        except EOFError:
            return
        if forks(target, threads) and name in FORKED:
            _forked(connection, bench, number, name, arguments)
            continue
        found = getattr(bench, name)(*arguments)
        if os.getpid() != me:
            os._exit(STRAY)
        connection.send((number, found))


def _forked(connection: Connection, bench: Any, number: int, name: str, arguments: list[Any]) -> None:
    """Have a forked process answer a request; pass on its reply, or how it ended."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        connection.close()  # only the parent answers the tuner
        ours.close()
        _answer(theirs, bench, number, name, arguments)
    theirs.close()
    with suppress(OSError):
        os.setpgid(pid, pid)  # the parent sets it, too: the child may be killed before it has
    connection.send((number, {"process": pid}))
    reply, status = None, None
    while reply is None and status is None:
        reply = _reply(ours, number, LOOK_S)
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = code if ended else None
    reply = reply or _reply(ours, number, 0.0)
    ours.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # the child and what it started
    if status is None:
        _, status = os.waitpid(pid, 0)
    connection.send((number, reply if reply is not None else {"lost": os.waitstatus_to_exitcode(status)}))


def _reply(ours: Connection, number: int, seconds: float) -> dict[str, Any] | None:
    """The reply to this request, if there is one; anything else that comes through the pipe is no reply."""
    with suppress(Exception):
        if ours.poll(seconds):
            got = ours.recv()
            if isinstance(got, tuple) and len(got) == 2 and got[0] == number:  # pyright: ignore[reportUnknownArgumentType]
                return got[1]  # pyright: ignore[reportUnknownVariableType]
    return None


def _answer(theirs: Connection, bench: Any, number: int, name: str, arguments: list[Any]) -> None:
    """Answer a request in the forked process, which ends here."""
    me = os.getpid()
    os.setpgid(0, 0)
    _die_with_parent()
    try:
        found = getattr(bench, name)(*arguments)
        if os.getpid() == me:
            theirs.send((number, found))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(STRAY + 1)
    os._exit(0 if os.getpid() == me else STRAY)


def _die_with_parent() -> None:
    """Linux: be killed when the parent is, even in a kernel that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
