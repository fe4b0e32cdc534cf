"""Environment variables that change how convgen works, all in one place."""

from __future__ import annotations

import os
from pathlib import Path


def verify_schedules() -> bool:
    """CONVGEN_VERIFY=1: run the schedule verifier between passes."""
    return os.environ.get("CONVGEN_VERIFY") == "1"


def cache_folder() -> Path:
    """CONVGEN_CACHE=DIR: where the tuner keeps what it measured; by default convgen in the user's cache folder."""
    if given := os.environ.get("CONVGEN_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "convgen"


def keep_exports() -> bool:
    """CONVGEN_EXPORTS=0: every rank exports modules at every start, and no export is kept."""
    return os.environ.get("CONVGEN_EXPORTS") != "0"


def cpu_threads() -> int:
    """OMP_NUM_THREADS=N: a CPU's threads, as torch reads and torchrun sets them; by default all of this process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))
