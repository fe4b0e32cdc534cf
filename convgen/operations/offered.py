"""Memory that is offered for what an operation makes: of a gradient, where it lies in the message that takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

Offer = Callable[[Sequence[int], Any], Any]


class _AtHand(threading.local):
    """Of this thread, as each rank of a process may have one."""

    offer: Offer | None = None


AT_HAND = _AtHand()


@contextmanager
def offering(offer: Offer) -> Generator[None]:
    """Offer memory to what is computed meanwhile.

    Args:
        offer: of a shape, and a tensor of the type and device, memory for it; or None.
    """
    before, AT_HAND.offer = AT_HAND.offer, offer
    try:
        yield
    finally:
        AT_HAND.offer = before


def offered(shape: Sequence[int], like: Any) -> Any:
    """A tensor of like's type to write all of, and to give as the result; None where there is no offer."""
    return None if AT_HAND.offer is None else AT_HAND.offer(shape, like)
