"""Ctrl-C is for the parent process: processes that it starts don't hear it, and it ends them."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def unheard() -> Generator[None]:
    """Processes started within never hear an interrupt; this process hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
