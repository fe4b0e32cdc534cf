"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from convgen.spec.text import aligned


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    return "\n".join(aligned((head, *rows), range(1, len(head))))
