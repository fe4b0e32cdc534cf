"""Modules that are imported when something is first asked of them.

What only lays out and prices needs no torch. Code that is pasted into generated packages names numpy for arrays, which
are the compiler's: there it is never asked for anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Late:
    """A module that is imported late."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._module), name)
        setattr(self, name, found)  # asked of the module once
        return found


np: Any = Late("numpy")
torch: Any = Late("torch")
