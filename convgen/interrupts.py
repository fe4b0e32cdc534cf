"""Ctrl-C is the parent's: processes that it starts don't hear it, and it ends them."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def unheard() -> Generator[None]:
    """Processes that are started here never hear an interrupt; this one hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
