"""Checks of mappings that a file holds: their keys, and texts among their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convgen.errors import InputError
from convgen.spec.names import did_you_mean
from convgen.spec.source import KeyPath
from convgen.spec.text import shown


def check_keys(data: Mapping[str, Any], path: KeyPath, known: Sequence[str], needed: Sequence[str]) -> None:
    """Raises InputError: a key is unknown, or a needed one is missing."""
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known, f"one of {', '.join(known)}")
            raise InputError(f"unknown key {shown(key)}", (*path, key), hint=hint)
    for key in needed:
        if key not in data:
            raise InputError(f"{key} is missing", path, hint=f"{key}: ...")


def text_of(value: object, path: KeyPath) -> str:
    """The value, a text. Raises InputError: it is none."""
    if not isinstance(value, str):
        raise InputError(f"{path[-1]} can't be {shown(value)}", path, hint="text; numbers in quotes")
    return value
