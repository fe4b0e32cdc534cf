"""Steps of packages as they were measured where the model was off: a price takes these seconds for the same work.

Local work is the same where it is of one operation, one type and, for gradients, the same operands, with blocks as
large and as many flops and elements on the busiest rank. Travel is the same where it is of one kind of collective, over
a group of as many ranks that reaches the same links, with as many bytes. All else is modelled: these are not
interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Work(NamedTuple):
    """What a rank computes of a row.

    Attributes:
        row: the operation, in one word.
        gradients: operands whose gradients are made; none: forward.
        extents: by index the largest block.
        flops, elements: what the busiest rank computes and touches, over all launches.
        dtype: in which it is computed; "": without floats.
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
        ranks: how many the group has.
        links: the outermost level that the group reaches.
        sent_bytes: the most that a rank sends.
    """

    collective: str
    ranks: int
    links: str
    sent_bytes: int


class Seconds(NamedTuple):
    """The median of the measured seconds, and their spread: (p80 - p20) / median."""

    seconds: float
    spread: float


Step = Work | Travel


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured seconds by step. Immutable, and part of the key by which caches know a machine."""

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
        """Measured seconds of a step; None where the model is all that is known."""
        found = self.known.get(step)
        return None if found is None else found.seconds

    @property
    def computing(self) -> MeasuredSteps:
        """The measured steps that move nothing."""
        return MeasuredSteps(tuple([pair for pair in self.steps if not isinstance(pair[0], Travel)]))

    def updated(self, newer: MeasuredSteps) -> MeasuredSteps:
        """These steps and newer ones; where both have a step, the newer one counts."""
        return MeasuredSteps(tuple({**self.known, **newer.known}.items()))

    def faster(self, times: float) -> MeasuredSteps:
        """These steps on links so many times as fast."""
        return MeasuredSteps(
            tuple(
                (step, taken._replace(seconds=taken.seconds / times) if isinstance(step, Travel) else taken)
                for step, taken in self.steps
            )
        )


NONE = MeasuredSteps()
