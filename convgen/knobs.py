"""Environment variables that change how convgen works, all in one place."""

from __future__ import annotations

import os


def verify_schedules() -> bool:
    """CONVGEN_VERIFY=1: run the schedule verifier between passes."""
    return os.environ.get("CONVGEN_VERIFY") == "1"
