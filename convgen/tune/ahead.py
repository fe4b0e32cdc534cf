# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (triton and parts of torch have no types)
"""Processes that compile candidates before they are launched, and say what they compile to; no GPU is needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing.queues import SimpleQueue
from typing import Any

from convgen.interrupts import unheard
from convgen.kernels.source import Kernel
from convgen.spec.target import Target
from convgen.tune.candidates import Candidate
from convgen.tune.patience import waited

COMPILE_S = 60.0  # a candidate whose compiler runs for longer is left out; see patience.py
BEGIN_S = 1200.0  # seconds for a compiler to start and to finish the candidates before
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Prepared:
    """The outcome of compiling a candidate.

    Attributes:
        cause: empty if it compiles well; else compile (it doesn't), spills, or fit (it needs more shared memory than
            there is).
        facts: registers, spill_bytes, shared_bytes, ... of its largest launch; empty for ATen.
    """

    cause: str = ""
    said: str = ""
    facts: tuple[tuple[str, int], ...] = ()


class Ahead:
    """Compilers, each in a process of its own.

    Args:
        jobs: how many processes.
        fill: whether to fill Triton's cache, so that launches in other processes of this machine find the kernels.
    """

    def __init__(self, jobs: int, *, fill: bool) -> None:
        self.fill = fill
        context = multiprocessing.get_context("spawn")
        self._begun: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
        with unheard():
            self.pool = context.Pool(jobs, _quiet, (self._begun,))
        self.waiting: dict[tuple[str, str], tuple[int, Any]] = {}
        self._numbers, self._pids = count(), dict[int, int]()  # numbers of submissions, and which process compiles each

    def submit(self, found: Sequence[Candidate]) -> None:
        """Begin to compile these."""
        for c in found:
            key = (c.source, c.label)
            if c.config.family != "aten" and key not in self.waiting:
                number = next(self._numbers)
                self.waiting[key] = number, self.pool.apply_async(_prepare, (number, c.kernel, self.fill))

    def result(self, c: Candidate) -> Prepared:
        """Wait for a candidate that was submitted."""
        number, pending = self.waiting.get((c.source, c.label), (0, None))
        if pending is None:
            return Prepared()
        pid = self._compiler(number, pending)

        def over(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not pending.ready() and _alive(pid) and time.monotonic() < end:
                pending.wait(LOOK_S)
            return pending.ready() or not _alive(pid)

        if pid and not waited(over, pid, COMPILE_S):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the pool starts another process
            return Prepared("compile", f"took more than {COMPILE_S:.0f} s")
        pending.wait(1.0)  # the process may have answered and ended
        return pending.get() if pending.ready() else Prepared("compile", "killed the compiler")

    def _compiler(self, number: int, pending: Any) -> int:
        """The number of the process that has begun to compile a submission; 0 if none ever does."""
        end = time.monotonic() + BEGIN_S
        while not pending.ready() and number not in self._pids and time.monotonic() < end:
            pending.wait(LOOK_S)
            while not self._begun.empty():
                self._pids.update([self._begun.get()])
        return self._pids.get(number, 0)

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _prepare(number: int, kernel: Kernel, fill: bool) -> Prepared:
    _begun[0].put((number, os.getpid()))
    return prepare(kernel, fill)


def prepare(kernel: Kernel, fill: bool) -> Prepared:
    """Compile all that a kernel launches; runs in a compiling process."""
    try:
        from convgen.kernels.facts import facts, launches

        found = [facts(launch, kernel.target) for launch in launches(kernel, kernel.problem)]
        worst = max(found, key=lambda f: (f.spill_bytes, f.shared_bytes, f.registers))
        pairs = tuple(worst.as_dict().items())
        if worst.spill_bytes:
            return Prepared("spills", f"{worst.spill_bytes} bytes a thread", pairs)
        if worst.shared_bytes > kernel.target.shared_bytes:
            said = f"{worst.shared_bytes} bytes of shared memory, {kernel.target.shared_bytes} there are"
            return Prepared("fit", said, pairs)
        if fill:
            _fill(kernel)
        return Prepared(facts=pairs)
    except Exception as error:
        text = " ".join(str(error).split())
        return Prepared("compile", f"{type(error).__name__}: {text}"[:300])


def _fill(kernel: Kernel) -> None:
    from convgen.kernels.facts import launches

    _driven(kernel.target)
    for launch in launches(kernel, kernel.problem):
        launch.function.warmup(*launch.args, grid=launch.grid, enable_fp_fusion=True, **launch.constants)


class _NoDevice:
    """Stands in the place of Triton's driver, for a target that this process does not use."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(target.kind, target.arch, target.warp)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@cache
def _driven(target: Target) -> None:
    import triton

    runtime: Any = getattr(triton, "runtime")  # noqa: B009
    runtime.driver.set_active(_NoDevice(target))


_begun: list[SimpleQueue[tuple[int, int]]] = []  # in a compiling process, the queue to which it says what it begins


def _quiet(begun: SimpleQueue[tuple[int, int]]) -> None:
    """Set up a compiling process: it prints nothing, as failures are returned, and leaves interrupts to its parent."""
    _begun.append(begun)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
