"""Modes of torch functions while `forward` runs: torch.export removes those around the call."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch


@contextmanager
def inside_forward(module: Any, mode: Any) -> Generator[None]:
    """While this lasts, calls of a module's forward run in a mode.

    The mode is put on the class, as torch.export calls `forward` with another self, by which it knows the path to a
    module.
    """
    home: Any = module if "forward" in vars(module) else module.__class__
    plain, inside = home.forward, list[bool]()

    @wraps(plain)
    def forward(*args: Any, **given: Any) -> Any:
        if inside:
            return plain(*args, **given)
        inside.append(True)
        try:
            with mode:
                return plain(*args, **given)
        finally:
            inside.clear()

    with patch.object(home, "forward", forward):
        yield
