"""Planning without Python's collector of cyclic garbage; the next collection skips what planning leaves."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Generator[None]:
    """Planning makes millions of small tuples and throws few away: looking for cycles takes a seventh of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()  # moves all objects to the oldest generation, or the next new one starts a pass over them
                gc.unfreeze()
            gc.enable()
