"""Steps of packages as they were measured where the model was off: a price takes these seconds for the same work.

The same local work is of one function, of blocks as large, with as many flops and elements on the busiest rank, in one
type; of a gradient, of the same operands. The same travel is of one kind of collective, over a group of as many ranks
that reaches the same links, and sends as many bytes. All else keeps its model: nothing is interpolated from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Work(NamedTuple):
    """What a rank computes of a row.

    Attributes:
        row: its operation, in one word.
        gradients: of which operands; none: forward.
        extents: by index the largest block.
        flops, elements: of the busiest rank, of all launches.
        dtype: in which it computes; "": of no floats.
    """

    row: str
    gradients: tuple[str, ...]
    extents: tuple[tuple[str, int], ...]
    flops: int
    elements: int
    dtype: str


class Travel(NamedTuple):
    """A collective.

    Attributes:
        ranks: of its group.
        links: the outermost level that groups reach.
        sent_bytes: the most that a rank sends.
    """

    collective: str
    ranks: int
    links: str
    sent_bytes: int


class Seconds(NamedTuple):
    """The median of what was measured, and how far it is apart: (p80 - p20) / median."""

    seconds: float
    spread: float


Step = Work | Travel


@dataclass(frozen=True)
class MeasuredSteps:
    """By what is done. Immutable, and a part of what caches know a machine by."""

    steps: tuple[tuple[Step, Seconds], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash(self.steps)

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return bool(self.steps)

    @cached_property
    def known(self) -> Mapping[Step, Seconds]:
        return dict(self.steps)

    def seconds(self, step: Step) -> float | None:
        """None: it was not measured, and the model is all that is known."""
        found = self.known.get(step)
        return None if found is None else found.seconds

    @property
    def computing(self) -> MeasuredSteps:
        """Those that move nothing."""
        return MeasuredSteps(tuple([pair for pair in self.steps if not isinstance(pair[0], Travel)]))

    def updated(self, newer: MeasuredSteps) -> MeasuredSteps:
        """With others, which count where both were measured."""
        return MeasuredSteps(tuple({**self.known, **newer.known}.items()))

    def faster(self, times: float) -> MeasuredSteps:
        """On links so many times as fast."""
        return MeasuredSteps(
            tuple(
                (step, taken._replace(seconds=taken.seconds / times) if isinstance(step, Travel) else taken)
                for step, taken in self.steps
            )
        )


NONE = MeasuredSteps()
