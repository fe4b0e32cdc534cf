"""torch, imported when local code first asks for something of it: what only lays out and prices needs none."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Late:
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch"), name)


torch: Any = _Late()
