"""Input files as text, quotes from input in messages, and tables as text."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Container, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, cast

from convgen.errors import InputError

MAX_FILE_BYTES = 1 << 19  # of a layer's file
LONGEST = 32  # times so many for graphs, with their thousands of calls
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")


def open_bytes(path: str | Path, max_bytes: int) -> bytes:
    """A file's first bytes. A pipe or a device is no file: it may never end, or have no writer.

    Raises:
        OSError: the file can't be opened, or is no file.
        ValueError: its name can't be a file's.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as stream:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, no file")
        return stream.read(max_bytes)


def beginning(path: str | Path) -> str:
    """A file's text, to tell its kind by; "" if it can't be read."""
    try:
        return open_bytes(path, MAX_FILE_BYTES * LONGEST).decode("utf-8-sig", "replace")
    except (OSError, ValueError):
        return ""


def read_text(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        InputError: the file can't be opened, is longer than `max_bytes`, or holds bytes that are no text; names the
            line.
    """
    file = str(path)
    try:
        raw = open_bytes(path, max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"can't read {shown(file)}: {reason}", where=file, hint="check the file's name") from None
    if len(raw) > max_bytes:
        fact = f"the file is larger than {max_bytes} bytes"
        raise InputError(fact, where=file, hint="split it; a layer takes about 20 lines")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (len(raw) - len(error.object))
        fact = f"not UTF-8 text: byte 0x{raw[start]:02x} at offset {start}"
        line = 1 + raw.count(10, 0, start)
        raise InputError(fact, where=f"{file}:{line}", hint="save the file as UTF-8 text") from None
    if found := _NOT_TEXT.search(text):
        line = 1 + text.count("\n", 0, found.start())
        fact = f"not a text file: control character U+{ord(found[0]):04X}"
        raise InputError(fact, where=f"{file}:{line}", hint="remove it; only tabs and line ends are allowed")
    return text


class TwiceError(ValueError):
    """An object has this key twice."""

    def __str__(self) -> str:
        return f"{shown(self.args[0])} stands in it twice"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads(object_pairs_hook=once)`; raises TwiceError: it has a key twice."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise TwiceError(key)
        made[key] = value
    return made


def shown(value: object, limit: int = 60) -> str:
    """A value of the input as messages print it, cut to `limit` characters.

    Example:
        >>> shown("3"), shown(True), shown(None), shown([1, None])
        ("'3'", 'true', 'nothing', '[1, null]')
    """
    if value is None:
        return "nothing"
    text = _flow(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_list(value: object) -> list[object] | None:
    """The value, if it is a list; else None."""
    return cast("list[object]", value) if isinstance(value, list) else None


def one_line(text: str, limit: int = 160) -> str:
    """Text from elsewhere, made fit for a message: printable, cut to `limit` characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:limit])


def _flow(value: object, depth: int = 0) -> str:
    """One line of YAML flow style, no longer or deeper than a message can show."""
    if depth > 4:
        return "..."
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            items = islice(cast("list[object]", value), 32)
            return "[" + ", ".join(_flow(v, depth + 1) for v in items) + "]"
        case dict():
            entries = islice(cast("dict[object, object]", value).items(), 32)
            return "{" + ", ".join(f"{_key(k)}: {_flow(v, depth + 1)}" for k, v in entries) + "}"
        case _:
            return ascii(value)


def _key(value: object) -> str:
    return value if isinstance(value, str) and value.isidentifier() and value.isascii() else ascii(value)


def kind(value: object) -> str:
    """What YAML calls a value, with its article.

    Example:
        >>> kind("3"), kind(3.0), kind([])
        ('text', 'a number with a point', 'a list')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case int():
            return "an integer"
        case float():
            return "a number with a point"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def number_of(count: int, word: str) -> str:
    """A number and a word, in the plural if need be.

    Example:
        >>> number_of(1, "rank"), number_of(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{count} {word}{'s' * (count != 1)}"


def times_as(long: float, other: float) -> float:
    """How many times as long one step is as another: once where neither takes any time, as of a network that computes
    nothing.

    Example:
        >>> times_as(3.0, 2.0), times_as(0.0, 0.0), times_as(1.0, 0.0)
        (1.5, 1.0, inf)
    """
    return long / other if other else inf if long else 1.0


def parse_grid(text: str, example: str = "N=2,C=2", option: str = "--grid") -> dict[str, int]:
    """The axes and ranks of a grid in one text, as --grid has it: `H=2`, or `H=3:5` with a share for each rank.

    Raises:
        InputError: it can't be read.
    """
    grid: dict[str, int] = {}
    for part in text.split(","):
        axis, _, ranks = part.strip().partition("=")
        if axis in grid:
            raise InputError(f"{option} {text} names axis {axis} twice", hint=f"an axis once: {option} {example}")
        size = grid_size(ranks)
        if not size:
            raise InputError(f"{option} {text}: cannot read {part.strip()!r}", hint=f"{option} {example}")
        grid[axis] = size
    return grid


def grid_size(text: str) -> int:
    """The size of an axis as a grid's text has it: a number of ranks, or shares with colons between; 0 if it is
    neither.

    Example:
        >>> int(grid_size("4")), grid_size("3:5").shares, grid_size("0:0"), grid_size("-1")
        (4, (3, 5), 0, 0)
    """
    from convgen.algebra.blocks import axis_size  # has numpy

    parts = text.split(":")
    if not all(p.isascii() and p.isdecimal() and len(p) < 11 for p in parts):
        return 0
    numbers = [int(p) for p in parts]
    return 0 if not 0 < sum(numbers) < 2**31 else axis_size(numbers) if len(numbers) > 1 else numbers[0]


def gib(count: int, digits: int = 3) -> str:
    """Bytes in GiB: with so many digits behind the point, or below 1 GiB with so many significant digits.

    Example:
        >>> gib(5 << 29), gib(5 << 9)
        ('2.500', '2.38e-06')
    """
    return f"{count / (1 << 30):.{digits}f}" if count >= (1 << 30) else f"{count / (1 << 30):.{digits}g}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = (), indent: str = "") -> list[str]:
    """Lines of a table, two spaces between its columns.

    Args:
        right: numbers of columns whose cells are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
