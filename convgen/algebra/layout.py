"""How a tensor is laid out over the grid while it travels through a schedule: its type.

For each dimension, the axes that block-distribute it, outermost first; axes that no dimension uses hold
copies. A window on a spatial dimension holds the rows that a block of the *other* activation needs. A
partial value holds one addend a rank.

Source: [CF] 2.3.2 (o_A and *), 2.3.5 (reductions); docs/design.md, One idea.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from convgen.algebra.notation import entry_text

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows wanted below and above the rank's own block, the most over all ranks; a negative number trims the block."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"+({self.lo},{self.hi})"


@dataclass(frozen=True, init=False, eq=False)
class Layout:
    """The type of a value: which part of x, w, y or bias each rank holds.

    dx is typed as x, dw as w, dy as y, db as bias.
    """

    tensor: str
    axes: tuple[Axes, ...]
    windows: tuple[Window | None, ...] = ()
    partial: Axes = ()
    _hash: int = field(init=False, repr=False)

    def __init__(
        self, tensor: str, axes: tuple[Axes, ...], windows: tuple[Window | None, ...] = (), partial: Axes = ()
    ) -> None:
        own = self.__dict__  # as a frozen class's own __init__ would, in a third of the time: millions are made
        own["tensor"], own["axes"], own["partial"] = tensor, axes, partial
        own["windows"] = windows = windows or (None,) * len(axes)
        own["_hash"] = hash((tensor, axes, windows, partial))  # layouts are keys of every cache: hash once

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (
            self.axes == other.axes
            and self.partial == other.partial
            and self.windows == other.windows
            and self.tensor == other.tensor
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def used(self) -> frozenset[str]:
        """Axes over which ranks hold different parts."""
        return frozenset(a for axes in self.axes for a in axes)

    @cached_property
    def has_window(self) -> bool:
        return any(w is not None for w in self.windows)

    @cached_property
    def summed(self) -> Layout:
        """The same layout once addends are summed: partial over no axis."""
        return replace(self, partial=()) if self.partial else self

    def with_axes(self, axes: tuple[Axes, ...]) -> Layout:
        return replace(self, axes=axes)

    def without(self, dropped: frozenset[str]) -> Layout:
        """The same type where the dropped axes have one rank each."""
        return replace(
            self,
            axes=tuple(tuple(a for a in axes if a not in dropped) for axes in self.axes),
            partial=tuple(a for a in self.partial if a not in dropped),
        )

    def __str__(self) -> str:
        entries = [entry_text(a) + str(w or "") for a, w in zip(self.axes, self.windows, strict=True)]
        text = f"{self.tensor}[{', '.join(entries)}]"
        return text + (f" partial({','.join(self.partial)})" if self.partial else "")


@lru_cache(maxsize=1 << 14)
def one_of(layout: Layout) -> Layout:
    """The one object that stands for all layouts equal to this one: caches compare keys field by field only where these
    are different objects."""
    return layout
