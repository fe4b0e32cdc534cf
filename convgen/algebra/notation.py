"""Axes as files and programs write them: `*` for none, `a`, `(a,b)` outermost first; roles `N=a H=(b,c)`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_AXES = r"\w+|\(\w+(?:, ?\w+)*\)"
_ENTRY = re.compile(rf"\*|{_AXES}")
_ROLE = re.compile(rf"(\w+)=({_AXES})")
_BETWEEN = re.compile(r",? +|,")


def axes_text(axes: tuple[str, ...]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def entry_text(axes: tuple[str, ...]) -> str:
    """A dimension's entry: the axes that split it, or `*`."""
    return axes_text(axes) if axes else "*"


def roles_text(roles: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    return " ".join(f"{index}={axes_text(axes)}" for index, axes in roles)


def axes_of(text: str) -> tuple[str, ...]:
    """The axes that a text names, with or without brackets around them."""
    return tuple(axis for axis in re.split(r", ?", text.strip("()")) if axis)


def entries_of(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Each dimension's axes, from entries with spaces or commas between; None where the text has anything else.

    Example:
        >>> entries_of("a, *, (b,c)")
        (('a',), (), ('b', 'c'))
    """
    words = _words(text, _ENTRY)
    return None if words is None else tuple(() if w == "*" else axes_of(w) for w in words)


def roles_of(text: str) -> tuple[tuple[str, tuple[str, ...]], ...] | None:
    """The roles in a text, each index once; None where the text has anything else.

    Example:
        >>> roles_of("N=a H=(b,c)")
        (('N', ('a',)), ('H', ('b', 'c')))
    """
    words = _words(text, _ROLE)
    if words is None:
        return None
    pairs = [word.split("=") for word in words]
    if len({index for index, _ in pairs}) < len(pairs):
        return None
    return tuple((index, axes_of(axes)) for index, axes in pairs)


def _words(text: str, word: re.Pattern[str]) -> list[str] | None:
    """All words of a text; None where it has anything else."""
    found: list[str] = []
    text, at = text.strip(), 0
    while at < len(text):
        match = word.match(text, at)
        if match is None:
            return None
        found.append(match[0])
        at = match.end()
        if at < len(text):
            between = _BETWEEN.match(text, at)
            if between is None:
                return None
            at = between.end()
    return found


def is_one_each(axes: Sequence[tuple[str, ...]], names: Iterable[str]) -> bool:
    """Whether every axis in `axes` is one of `names` and occurs once."""
    used = [a for one in axes for a in one]
    return len(set(used)) == len(used) and set(used) <= set(names)
