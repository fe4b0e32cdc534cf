"""Names in a network's package: those of the constants for blocks and for rows."""

from __future__ import annotations

import re
from collections.abc import Collection
from keyword import iskeyword

CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*_\d+")


def identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def a_name(wanted: str, taken: Collection[str]) -> str:
    """The wanted name, with underscores behind it where it is taken or Python's.

    Example:
        >>> a_name("stem", ()), a_name("stem", ["stem"]), a_name("in", ()), a_name("0_conv", ())
        ('stem', 'stem_', 'in_', '_0_conv')
    """
    found = identifier(f"_{wanted}" if wanted[:1].isdigit() else wanted)
    while found in taken or iskeyword(found) or CONSTANT.fullmatch(found):
        found += "_"
    return found


def constant(name: str, taken: Collection[str]) -> str:
    """A name for a row's constant: its operation's name, numbered."""
    base = re.sub(r"\W", "_", name).strip("_").upper()
    found, n = f"{base}_1", 1
    while found in taken:
        n += 1
        found = f"{base}_{n}"
    return found
