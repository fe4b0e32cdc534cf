"""A network's memory, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from convgen.cost.network_memory import NetworkMemory

MIB = 1 << 20


def memory_json(found: NetworkMemory) -> dict[str, Any]:
    """Bytes of the fullest rank in a step of training, by their use, and the most at a time."""
    return asdict(found) | {"peak": found.peak}


def memory_line(m: Mapping[str, int], states: int = 1) -> str:
    """The same in a line of text.

    Args:
        states: how many values the optimizer keeps for each parameter; SGD with momentum keeps one.
    """
    parts = f"saved for backward {_mib(m['saved'])}, on its way {_mib(m['passing'])}"
    kept = "momentum" if states == 1 else "optimizer"
    state = f"parameters {_mib(m['parameters'])}, {kept} {_mib(m['optimizer'])}"
    return f"memory of the fullest rank: {_mib(m['peak'])} MiB, {state}, {parts}"


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"
