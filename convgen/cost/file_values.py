"""Values of a machine's file, each checked; a wrong value is refused with its place."""

from __future__ import annotations

from typing import Any, cast

from convgen.errors import InputError
from convgen.spec.names import did_you_mean
from convgen.spec.text import shown

# Numbers that may be 0.
ZERO = (
    "latency_s",
    "launch_s",
    "network_launch_s",
    "message_processor_s",
    "processor_s_per_byte",
    "spread",
)  # may be 0
Place = tuple[str | int, ...]


def numbers(value: object, path: Place) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{dotted(path)} is no list of numbers", path, hint="numbers above 0")
    return tuple(positive(one, path) for one in cast("list[object]", value))


def mapping(value: object, path: Place, hint: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{dotted(path)} is no mapping", path, hint=hint)
    return cast("dict[str, Any]", value)


def check_keys(data: dict[str, Any], needed: tuple[str, ...], path: Place, optional: tuple[str, ...] = ()) -> None:
    place = f" in {dotted(path)}" if path else " of a machine"
    known = (*needed, *optional)
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known, f"keys{place} are {', '.join(known)}")
            raise InputError(f"unknown key {shown(key)}{place}", (*path, key), hint=hint)
    if missing := [key for key in needed if key not in data]:
        raise InputError(f"{', '.join(missing)}{place} is missing", path, hint=f"keys{place} are {', '.join(known)}")


def text(value: object, path: Place) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InputError(f"{dotted(path)} can't be {shown(value)}", path, hint=f"{path[-1]}: a text in one line")
    return value


def whole(value: object, path: Place) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{dotted(path)} can't be {shown(value)}", path, hint="a whole number, 1 or more")
    return value


def positive(value: object, path: Place) -> float:
    zero = path[-1] in ZERO
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (1e-30 <= value <= 1e30 or (zero and value == 0))
    ):
        return float(value)
    hint = "a number from 1e-30 to 1e30" + (", or 0" if zero else "")
    raise InputError(f"{dotted(path)} can't be {shown(value)}", path, hint=hint)


def dotted(path: Place) -> str:
    return ".".join(str(p) for p in path)
