"""The weight of a problem: its share of the network's time, and how much of that tuning may save, by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.tune.candidates import Candidate, ranked
from convgen.tune.database import Ceilings
from convgen.tune.wanted import Wanted

LEAST = 0.02  # the share of its time that any problem may save: the model can't be sure that it is nothing


@dataclass(frozen=True, slots=True)
class Weighed:
    """A problem with its candidates in the model's order.

    Attributes:
        network_us: modelled microseconds of ATen's plain call, over all layers that have the problem.
        saved_us: how many of them the model's best kernel saves.
    """

    wanted: Wanted
    order: tuple[tuple[float, Candidate], ...]
    network_us: float
    saved_us: float


def weighed(wanted: Wanted, legal: Sequence[Candidate], ceilings: Ceilings) -> Weighed:
    """The weight of a problem, by its legal candidates."""
    order = tuple(ranked(legal, ceilings))
    best = min((us for us, _ in order), default=0.0)
    plain = min((us for us, c in order if c.config.family == "aten"), default=best)
    count = len(wanted.uses)
    return Weighed(wanted, order, count * plain, count * max(plain - best, LEAST * plain))


def heaviest_first(found: Sequence[Weighed]) -> list[Weighed]:
    """The problems in falling order of what tuning may save; ties keep their order."""
    return sorted(found, key=lambda w: -w.saved_us)


def share_s(left_s: float, rest: Sequence[Weighed], least_s: float) -> float:
    """Seconds for the first of the rest: its part by weight of what is left, but no less than a problem needs.

    Args:
        left_s: what is left of the whole budget.
        least_s: the least that a problem takes; a problem without as much time is not reached, rather than hardly
            tried.
    """
    total = sum(w.saved_us for w in rest)
    return min(left_s, max(least_s, left_s * (rest[0].saved_us / total if total else 1 / len(rest))))
