"""Commands that a launcher runs on every rank: a refusal that all ranks share is printed once a node."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from convgen.errors import InputError


@contextmanager
def refused_once() -> Generator[None]:
    """A context in which a refusal ends every rank but a node's first without a word; each rank says itself that
    another is lost.

    Raises:
        InputError: on a node's first rank; LostRank: on any.
        SystemExit: on the others.
    """
    from convgen.calibrate.team import LostRank

    try:
        yield
    except LostRank:
        raise
    except InputError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(2) from None
        raise
