"""A network whose layout is open: what all that lay one out are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convgen.operations.bound import Bound


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that has no layout yet. `kind` as a program's values have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    letters: tuple[str, ...] = ()  # of an input's dimensions; "" for none


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a plan may take.

    Attributes:
        memory_bytes: of a rank; None: no bound.
        states: values a parameter that the optimizer keeps: SGD 0, with momentum 1, Adam 2.
    """

    memory_bytes: int | None = None
    states: int = 1

    @property
    def copies(self) -> int:
        """Of a parameter: itself, its gradient, the optimizer's."""
        return 2 + self.states


class Parts(NamedTuple):
    """A network without a layout.

    Attributes:
        tensors: all that rows read and make.
        updates: (buffer, value that it becomes after a step of training).
        outputs: (name, value).
    """

    name: str
    tensors: Sequence[Tensor]
    rows: Sequence[Bound]
    updates: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
