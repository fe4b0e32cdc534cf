"""Waiting for another process by what it runs: a busy machine gets time, a process that hangs does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from convgen.tune.patience import waited


@contextmanager
def process(*command: str) -> Iterator[int]:
    running = subprocess.Popen(command)
    try:
        yield running.pid
    finally:
        running.kill()
        running.wait()


def never(seconds: float) -> bool:
    time.sleep(min(seconds, 0.05))
    return False


def test_one_that_runs_and_says_nothing_is_given_up() -> None:
    with process(sys.executable, "-c", "while True: pass") as pid:
        assert not waited(never, pid, 0.3)


def test_one_that_sleeps_is_given_up() -> None:
    with process("sleep", "100000") as pid:
        assert not waited(never, pid, 0.3)


def test_one_that_is_kept_from_running_is_not_given_up() -> None:
    """Stopped, it neither runs nor sleeps: what a process looks like that others keep from the processors."""
    waits: list[float] = []

    def seventh(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 7

    with process("sleep", "100000") as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert waited(seventh, pid, 30.0)
    assert len(waits) == 7 and min(waits) > 29


def test_an_answer_is_an_answer_however_late() -> None:
    with process("sleep", "100000") as pid:
        assert waited(lambda seconds: True, pid, 0.0)
