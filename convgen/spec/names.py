"""Names: which are valid, and what a wrong one probably means."""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Iterable

from convgen.errors import InputError
from convgen.spec.source import KeyPath
from convgen.spec.taken import STANDARD, TAKEN
from convgen.spec.text import shown

MAX_NAME = 100
_NO_AXIS = frozenset(("none", "partial"))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most resembles, if any does; letter case counts little.

    Example:
        >>> nearest("strides", ["stride", "padding"])
        'stride'
    """
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word[:MAX_NAME].lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the nearest known word, and what else would work."""
    found = nearest(word, known)
    return f"{found}; {otherwise}" if found else otherwise


def identifier(text: str) -> str:
    """A valid layer name that reads like `text`.

    Example:
        >>> identifier("res2a/branch1"), identifier("3x3"), identifier("class"), identifier("json")
        ('res2a_branch1', '_3x3', 'class_', 'json_layer')
    """
    name = re.sub(r"[^A-Za-z0-9_]", "_", text)[:MAX_NAME]
    if not name or name[0].isdigit():
        name = "_" + name[: MAX_NAME - 1]
    if name in TAKEN:
        return f"{name}_layer"
    return name + "_" if keyword.iskeyword(name) else name


def check_name(name: str, path: KeyPath = ("name",), *, of_file: bool = True) -> str:
    """A layer's name: it names the generated file, its functions and its torch op.

    Args:
        of_file: whether the name becomes a file's; a network's does not.
    Raises:
        InputError: not an ASCII identifier, a keyword, longer than MAX_NAME, or the name of a module of Python's, or of
            a package that generated modules or their users import.
    """
    if identifier(name) == name or (name in TAKEN and not of_file):
        return name
    if name in TAKEN:
        whose = "Python's module" if name in STANDARD else "the package"
        fact = f"a layer named {name} would hide {whose} {name}: both are imported as {name}"
    elif keyword.iskeyword(name):
        fact = f"name {shown(name)} is a Python keyword"
    elif len(name) > MAX_NAME:
        fact = f"name {shown(name)} has {len(name)} characters, more than {MAX_NAME}"
    else:
        fact = f"name {shown(name)} is not a Python identifier of ASCII letters, digits and _"
    raise InputError(fact, path, hint=f"name: {shown(identifier(name)).strip(chr(39))}")


def check_axis(name: str, path: KeyPath) -> str:
    """A grid axis's name.

    Raises:
        InputError: not an ASCII identifier, a keyword, or a word that layouts use (none, partial).
    """
    if name in _NO_AXIS:
        fact = f"'{name}' can't name an axis: layouts use the word"
    elif keyword.iskeyword(name):
        fact = f"'{name}' can't name an axis: it is a Python keyword"
    elif not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME):
        fact = f"{shown(name)} can't name an axis: not a Python identifier of ASCII letters, digits and _"
    else:
        return name
    raise InputError(fact, path, hint="a name such as N, data or chan")
