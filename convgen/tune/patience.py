"""How long another process is waited for: by what it ran, not by the clock, so that a busy machine is no verdict on it.

Wall time counts only where all its threads are asleep: then it waits for something that nobody is late with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOKS, LOOK_S = 10, 0.1  # seen asleep so often, it is
LONGEST = 20.0  # times the limit, by the clock: a process that hangs in the system is neither running nor asleep
TICK_S = 0.01  # of the system's accounts; os.sysconf("SC_CLK_TCK") is 100 on every Linux


def waited(arrived: Callable[[float], bool], pid: int, limit_s: float) -> bool:
    """Whether an answer came before a process had `limit_s` seconds for it.

    Args:
        arrived: waits for so many seconds, and says whether there is an answer, or will be none.
        pid: of the process, which is ours: its number is not given to another before we have joined it.
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
        except OSError:  # it has ended meanwhile
            continue
        found[path.parent.name] = state, (int(fields[10]) + int(fields[11])) * TICK_S
    return found
