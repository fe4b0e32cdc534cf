"""Python literals as a person would write them: on one line where they fit, else an item a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast

from convgen.errors import InternalError
from convgen.spec.text import one_line

WIDTH = 116


def in_comment(text: str) -> str:
    """A person's text on one line of a comment, changed where Python would take it for a file's encoding (PEP 263)."""
    return one_line(text, 2000).replace("coding:", "coding :").replace("coding=", "coding =")


def literal(value: Any, indent: int = 0, before: int = 0) -> str:
    """Source text of plain data: dicts, lists, tuples, strings, numbers, None, True, False. All of generated Python is
    printed by it.

    Args:
        indent: the columns by which its lines are indented; `before`: the columns already taken on its first line.

    Example:
        >>> literal({"grid": {"N": 2}, "bias": None, "axes": ("N",)})
        '{"grid": {"N": 2}, "bias": None, "axes": ("N",)}'
    """
    line = _inline(value)
    if indent + before + len(line) <= WIDTH or not isinstance(value, (Mapping, list, tuple)) or not value:
        return line
    inner = " " * (indent + 4)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        keys = [(f"{_inline(k)}: ", v) for k, v in pairs]
        items = [key + literal(v, indent + 4, len(key)) for key, v in keys]
        brackets = "{}"
    else:
        sequence = cast("Sequence[Any]", value)
        if all(isinstance(v, int) for v in sequence):
            return _wrapped([_inline(v) for v in sequence], indent)
        items = [literal(v, indent + 4) for v in sequence]
        brackets = "[]" if isinstance(value, list) else "()"
    return brackets[0] + "\n" + "".join(f"{inner}{item},\n" for item in items) + " " * indent + brackets[1]


def filled(value: Mapping[str, Any]) -> str:
    """The text of a long mapping, several items a line."""
    lines = [""]
    for key, one in value.items():
        item = f"{_inline(key)}: {_inline(one)}, "
        if len(lines[-1]) + len(item) + 3 > WIDTH:
            lines.append("")
        lines[-1] += item
    return "{\n" + "".join(f"    {line.rstrip()}\n" for line in lines if line) + "}"


def _wrapped(numbers: list[str], indent: int) -> str:
    """The text of a long list of numbers, filled line by line."""
    lines, inner = [""], " " * (indent + 4)
    for number in numbers:
        if len(inner) + len(lines[-1]) + len(number) + 2 > WIDTH:
            lines.append("")
        lines[-1] += f"{number}, "
    return "[\n" + "".join(f"{inner}{line.rstrip()}\n" for line in lines) + " " * indent + "]"


class Code(str):
    """Source text, which is printed as it is and not as a string."""


def _inline(value: Any) -> str:
    if isinstance(value, Code):
        return value
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{_inline(k)}: {_inline(v)}" for k, v in pairs) + "}"
    if isinstance(value, (list, tuple)):
        items = [_inline(v) for v in cast("Sequence[Any]", value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, float) and not isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise InternalError(f"a {type(value).__name__} can't be printed as a literal: {value!r}")


def yaml_flow(value: Any) -> str:
    """The same data in one line of YAML's flow style (JSON is YAML)."""
    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum() and not value[0].isdigit():
        return value
    return json.dumps(value)
