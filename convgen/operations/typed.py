"""Arguments that a source takes from a value's type, which torch.autocast changes: a type, or a number such as eps."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ByAutocast:
    """The values of an argument without autocast, and under autocast of each type.

    Example:
        >>> asked = ByAutocast("float32", "bfloat16", "float16")
        >>> under(("_to_copy", asked), "bfloat16"), under(asked, None)
        (('_to_copy', 'bfloat16'), 'float32')
    """

    plain: Any
    bfloat16: Any
    float16: Any


def under(value: Any, low: Any) -> Any:
    """An operation, or arguments, as they are under autocast; the same object where autocast changes nothing.

    Args:
        low: autocast's type, torch's or its name; None without autocast.
    """
    if isinstance(value, ByAutocast):
        return value.plain if low is None else getattr(value, str(low).removeprefix("torch."))
    if isinstance(value, tuple):
        items: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]
        made = tuple([under(one, low) for one in items])
        return value if all(a is b for a, b in zip(made, items, strict=True)) else made  # pyright: ignore[reportUnknownVariableType]
    if is_dataclass(value) and not isinstance(value, type):
        pairs = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = {name: new for name, old in pairs.items() if (new := under(old, low)) is not old}
        return replace(value, **changed) if changed else value
    return value
