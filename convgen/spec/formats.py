"""The number of the formats that convgen writes, and what happens to files with another number.

Graph, plan and machine files say `format: 1` where the program writes them; a schedule's text may say it in a comment,
`# format 1`. A file without a number is read as 1, so people who write one need none.
"""

from __future__ import annotations

import re
from typing import Any

from convgen.errors import InputError
from convgen.spec.text import shown

FORMAT = 1
KEY = "format"
_COMMENT = re.compile(r"#\s*format\s+(\S+)\s*")


def without_format(data: dict[str, Any]) -> dict[str, Any]:
    """A file's data without its format's number.

    Raises:
        InputError: the number is no format's, or a newer convgen's.
    """
    check_format(data.get(KEY, FORMAT))
    return {key: value for key, value in data.items() if key != KEY}


def check_format(number: object) -> None:
    """Raises InputError: this convgen reads no format of that number."""
    if type(number) is not int or number < 1:
        raise InputError(f"format can't be {shown(number)}", (KEY,), hint=f"format: {FORMAT}, or no such line")
    if number > FORMAT:
        fact = f"this is format {number}, and this convgen reads up to {FORMAT}"
        raise InputError(fact, (KEY,), hint="a newer convgen; or write the file again with this one")


def check_text_format(text: str, file: str) -> None:
    """The same for a schedule's text, where a comment has the number."""
    for line, raw in enumerate(text.splitlines(), 1):
        if (found := _COMMENT.fullmatch(raw.strip())) is not None:
            number = found[1]
            try:
                check_format(int(number) if number.isdecimal() and len(number) < 9 else number)
            except InputError as error:
                error.where = error.where or f"{file}:{line}"
                raise
