"""Names in a network's package: of values in its functions, of the functions, of rows' constants.

A function's operands are x, y, z, as far as letters go, so that blocks that are alike have the same text. Every name is
of one value: a module called `x` is no operand's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from keyword import iskeyword

LETTERS = "xyzuvw"
USED = frozenset({"run", "self", "torch", "Any", "Tensor"})  # by the text of functions
CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*_\d+")


def identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def a_name(wanted: str, taken: Collection[str]) -> str:
    """The name, or with underscores behind it where it is another's or Python's.

    Example:
        >>> a_name("stem", ()), a_name("stem", ["stem"]), a_name("in", ()), a_name("0_conv", ())
        ('stem', 'stem_', 'in_', '_0_conv')
    """
    found = identifier(f"_{wanted}" if wanted[:1].isdigit() else wanted)
    while found in taken or found in USED or iskeyword(found) or CONSTANT.fullmatch(found):
        found += "_"
    return found


def names_of(values: Iterable[str]) -> dict[str, str]:
    """Of values in one function, the network's own."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for value in values:
        found[value] = a_name(value, taken)
        taken.add(found[value])
    return found


def names_within(start: str, takes: Sequence[str], made: Sequence[str]) -> dict[str, str]:
    """Of values in a block's function.

    Args:
        start: what the names of its values begin with.
        takes: operands, in order.
    Example:
        >>> names_within("stem_", ["image"], ["stem_conv", "stem_relu"])
        {'stem_conv': 'conv', 'stem_relu': 'relu', 'image': 'x'}
        >>> names_within("stem_", ["x"], ["stem_x"])
        {'stem_x': 'x', 'x': 'y'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for value in made:
        own = value.removeprefix(start) if value != start else value
        found[value] = a_name(own, taken)
        taken.add(found[value])
    letters = iter([i for i in LETTERS if i not in taken] if len(takes) <= len(LETTERS) else ())
    for value in takes:
        found[value] = a_name(next(letters, value.removeprefix(start)), taken)
        taken.add(found[value])
    return found


def within(value: str, start: str) -> str:
    """A value's name as a row of its block's function has it: Run.step says which one it is."""
    if not start or value.startswith(start):
        return value.removeprefix(start)
    return "" if f"{value}_" == start else f"/{value}"


def constant(name: str, taken: Collection[str]) -> str:
    """A name for a row: its operation's, numbered."""
    base = re.sub(r"\W", "_", name).strip("_").upper()
    found, n = f"{base}_1", 1
    while found in taken:
        n += 1
        found = f"{base}_{n}"
    return found
