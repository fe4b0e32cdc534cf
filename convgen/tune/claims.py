"""Claims on problems, beside a database: tuners that run at the same time share the work instead of doing it twice.

A claim belongs to a process on a machine, and ends with the process.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from convgen.spec.text import open_bytes
from convgen.tune.database import LOCK_S, replace_text

ELSEWHERE_S = 3600.0  # how long a claim of another machine's process holds, as we can't see the process


class Claims:
    """The claims on the problems of one database."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(f".{database.name}.claims")
        self._lock = FileLock(database.with_name(f".{database.name}.lock"), timeout=LOCK_S)
        self._me = [socket.gethostname(), os.getpid()]

    def take(self, key: str) -> bool:
        """Claim a problem; False where another tuner works on it."""
        with self._lock:
            there = self._read()
            if key in there and there[key][:2] != self._me:
                return False
            self._write(there | {key: [*self._me, time.time()]})
            return True

    def drop(self, key: str) -> None:
        """Give a problem back."""
        with self._lock:
            there = self._read()
            there.pop(key, None)
            self._write(there)

    def _read(self) -> dict[str, list[Any]]:
        """The claims that still hold."""
        try:
            found: Any = json.loads(open_bytes(self.path, -1))
            claims = cast("dict[str, list[Any]]", dict(found))
            return {key: claim for key, claim in claims.items() if self._holds(*claim)}
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def _holds(self, host: str, pid: int, since: float) -> bool:
        if host != self._me[0]:
            return time.time() - since < ELSEWHERE_S
        return os.path.exists(f"/proc/{pid}")

    def _write(self, claims: dict[str, list[Any]]) -> None:
        if claims:
            replace_text(self.path, json.dumps(claims))
        else:
            self.path.unlink(missing_ok=True)
