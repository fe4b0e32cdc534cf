"""Memory offered to an operation for its result: to a gradient, its place in the message that will send it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

Offer = Callable[[Sequence[int], Any], Any]


class _AtHand(threading.local):
    """The offer of this thread: each rank of a process may have a thread."""

    offer: Offer | None = None


AT_HAND = _AtHand()


@contextmanager
def offering(offer: Offer) -> Generator[None]:
    """Offer memory to what is computed meanwhile.

    Args:
        offer: takes a shape and a tensor of the wanted type and device, and gives memory for it, or None.
    """
    before, AT_HAND.offer = AT_HAND.offer, offer
    try:
        yield
    finally:
        AT_HAND.offer = before


def offered(shape: Sequence[int], like: Any) -> Any:
    """A tensor of like's type, which the caller writes in full and gives as its result; None where nothing is
    offered."""
    return None if AT_HAND.offer is None else AT_HAND.offer(shape, like)
