"""How a tensor is laid out over the grid while it travels through a schedule: its type.

For each dimension, the axes that block-distribute it, outermost first; axes that no dimension uses hold
copies. A window on a spatial dimension holds the rows that a block of the *other* activation needs. A
partial value holds one addend a rank.

Source: [CF] 2.3.2 (o_A and *), 2.3.5 (reductions); docs/design.md, One idea.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from convgen.algebra.notation import entry_text

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows wanted below and above the rank's own block, the most over all ranks; negative trims."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"+({self.lo},{self.hi})"


@dataclass(frozen=True)
class Layout:
    """The type of a value: which part of x, w, y or bias each rank holds.

    dx is typed as x, dw as w, dy as y, db as bias.
    """

    tensor: str
    axes: tuple[Axes, ...]
    windows: tuple[Window | None, ...] = ()
    partial: Axes = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * len(self.axes))
        # Layouts are keys of every cache: hash once.
        object.__setattr__(self, "_hash", hash((self.tensor, self.axes, self.windows, self.partial)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def used(self) -> frozenset[str]:
        """Axes over which ranks hold different parts."""
        return frozenset(a for axes in self.axes for a in axes)

    @cached_property
    def has_window(self) -> bool:
        return any(w is not None for w in self.windows)

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
