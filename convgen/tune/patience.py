"""How long another process is waited for: by the time that it ran, not by the clock, so that a busy machine doesn't
fail it.

Wall time counts only while all its threads are asleep: then the process waits for something that a busy machine doesn't
delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOKS, LOOK_S = 10, 0.1  # a process seen asleep so often, so many seconds apart, counts as asleep
LONGEST = 20.0  # times the limit in wall time: a process that hangs in the system neither runs nor sleeps
TICK_S = 0.01  # seconds of a tick in the system's accounts; os.sysconf("SC_CLK_TCK") is 100 on every Linux


def waited(arrived: Callable[[float], bool], pid: int, limit_s: float) -> bool:
    """Whether an answer came before a process had `limit_s` seconds for it.

    Args:
        arrived: waits for so many seconds, and says whether there is an answer, or will be none.
        pid: the process's number. It is our child, so its number is not reused before we have joined it.
    """
    before, end = _threads(pid), time.monotonic() + LONGEST * limit_s
    left = limit_s
    while not arrived(left):
        now = _threads(pid)
        ran = max((s - before.get(thread, ("", 0.0))[1] for thread, (_, s) in now.items()), default=limit_s)
        left = min(limit_s - ran, end - time.monotonic())
        if left <= 0:
            return False
        if _asleep(now) and _stays_asleep(arrived, pid):
            return arrived(0.0)
        left = max(left, LOOK_S)
    return True


def _stays_asleep(arrived: Callable[[float], bool], pid: int) -> bool:
    return all(not arrived(LOOK_S) and _asleep(_threads(pid)) for _ in range(LOOKS))


def _asleep(threads: dict[str, tuple[str, float]]) -> bool:
    return all(state == "S" for state, _ in threads.values())


def _threads(pid: int) -> dict[str, tuple[str, float]]:
    """A process's threads: what each does (R runs or wants to, S sleeps, ...), and the seconds that it ran."""
    found: dict[str, tuple[str, float]] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state, *fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the thread has ended meanwhile
            continue
        found[path.parent.name] = state, (int(fields[10]) + int(fields[11])) * TICK_S
    return found
