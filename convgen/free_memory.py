"""Free memory of this machine, for commands that rather refuse than be killed."""

from __future__ import annotations

import os
from pathlib import Path

from convgen.errors import InputError

GIB = 2**30
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
     "/sys/fs/cgroup/memory/memory.stat"),
)  # fmt: skip


def check_memory(needed: int, what: str, hint: str) -> None:
    """Refuse to begin something that takes more memory than is free.

    Raises:
        InputError: with both numbers.
    """
    there = available_bytes()
    if there is not None and needed > there:
        raise InputError(f"{what} takes about {gib(needed)} GiB, {gib(there)} GiB of memory are free", hint=hint)


def available_bytes() -> int | None:
    """Bytes that a new process may take: the system's, or what its control group leaves; None where both are
    unknown."""
    found = [size for size in (_system_bytes(), *(_group_bytes(*files) for files in _CGROUPS)) if size is not None]
    return min(found, default=None)


def _system_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _group_bytes(limit: str, used: str, stat: str) -> int | None:
    """Bytes that a control group leaves; pages of files that were read count as free, as they go when asked for."""
    try:
        files = 0
        for line in Path(stat).read_text(encoding="ascii").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                files = int(line.split()[1])
        return int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")) + files
    except (OSError, ValueError):  # no such group, or "max"
        return None


def gib(size: int) -> str:
    """Bytes in GiB, without the word."""
    return f"{size / GIB:.1f}"
