"""Planning without the collector of circular garbage; the next collection doesn't go through what planning leaves."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Generator[None]:
    """Millions of small tuples are made and few thrown away: looking for circles takes a seventh of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()  # all is of the oldest generation then: else the next object begins a pass through it
                gc.unfreeze()
            gc.enable()
