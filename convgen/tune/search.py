"""The search: which configurations of a problem are measured, and in which order.

First come some that the model ranks best, and one of each family. Then come the best by the model as measurements
correct it: it is taken to be off at a configuration by as much as it was off near by. That is a regression of the
logarithm of measured over modelled times, each measurement weighted by how alike it is.

Source: the estimate is E. A. Nadaraya's and G. S. Watson's (1964), of the model's error instead of the time itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convgen.kernels.config import Config

Effort = Literal["quick", "full"]
FIRST = 0.25  # the share of measurements that follow the ranking alone
NEAR = 0.5  # doublings: a measurement so far away counts half
OTHER_KIND = 8.0  # doublings by which a configuration of another kind is farther away


def limit_of(count: int, effort: Effort) -> int:
    """How many configurations to measure: a tenth of the legal ones, or a thirtieth in a quick search, but some at
    least."""
    share, least, most = (10, 16, 160) if effort == "full" else (30, 6, 24)
    return min(count, max(least, min(most, math.ceil(count / share))))


@dataclass(frozen=True, slots=True)
class Ranked:
    """The legal configurations with modelled times, the least first."""

    configs: tuple[Config, ...]
    modelled_us: tuple[float, ...]


class Search:
    """A search: the tuner asks it for configurations, and tells it their times.

    Args:
        limit: how many configurations it gives at most, those told beforehand included.
        told: microseconds of configurations that were measured before; None for those that failed.
    """

    def __init__(self, ranked: Ranked, limit: int, told: Mapping[Config, float | None] | None = None) -> None:
        self.ranked, self.limit = ranked, min(limit, len(ranked.configs))
        self._place = {c: i for i, c in enumerate(ranked.configs)}
        self.told = {c: us for c, us in (told or {}).items() if c in self._place}
        self.asked = dict.fromkeys(self.told)
        self._first = _first(ranked.configs, max(1, math.ceil(FIRST * self.limit)))
        self._known: dict[int, NDArray[np.float64]] = {}
        self._kinds = np.array([_kind(c) for c in ranked.configs])
        names = sorted({n for c in ranked.configs for n in c.as_dict()})
        values = [[math.log2(c.as_dict().get(n, 0) + 1) for n in names] for c in ranked.configs]
        self._logs = np.array(values, dtype=np.float64).reshape(len(values), len(names))

    def ask(self, count: int = 1) -> list[Config]:
        """At most so many configurations that it hasn't given before; none when the search is over."""
        left = [c for c in self._first if c not in self.asked]
        if len(left) < count:
            order: list[int] = np.argsort(self.corrected_us(), kind="stable").tolist()
            left += [c for c in (self.ranked.configs[i] for i in order) if c not in self.asked and c not in left]
        found = left[: max(0, min(count, self.limit - len(self.asked)))]
        self.asked |= dict.fromkeys(found)
        return found

    def tell(self, config: Config, us: float | None) -> None:
        """Tell it a configuration's time in microseconds; None if it failed."""
        self.asked[config] = None
        self.told[config] = us

    def best(self) -> list[tuple[float, Config]]:
        """The measured times with their configurations, fastest first."""
        return sorted(((us, c) for c, us in self.told.items() if us is not None), key=lambda pair: pair[0])

    def corrected_us(self) -> NDArray[np.float64]:
        """The model's times of all configurations, corrected by as much as the model was off near by."""
        modelled = np.array(self.ranked.modelled_us)
        known = [(self._place[c], us) for c, us in self.told.items() if us is not None]
        if not known:
            return modelled
        rows = [i for i, _ in known]
        off = np.log([us for _, us in known]) - np.log(modelled[rows])
        apart = np.stack([self._apart(i) for i in rows])
        weights = 2.0 ** ((apart.min(axis=0) - apart) / NEAR)
        return modelled * np.exp(off @ weights / weights.sum(axis=0))

    def _apart(self, place: int) -> NDArray[np.float64]:
        """The distance in doublings between one configuration and each; different kinds are far apart."""
        if place not in self._known:
            same = self._kinds == self._kinds[place]
            between = np.abs(self._logs - self._logs[place]).sum(axis=1)
            self._known[place] = np.where(same, between, between + OTHER_KIND)
        return self._known[place]


def _first(configs: Sequence[Config], count: int) -> list[Config]:
    """The first by the ranking, and the first of each family."""
    kinds: dict[str, Config] = {}
    for c in configs:
        kinds.setdefault(_kind(c), c)
    leading = list(kinds.values())[:count]
    chosen = dict.fromkeys(leading)
    for c in configs:
        if len(chosen) >= count:
            break
        chosen[c] = None
    return [c for c in configs if c in chosen]


def _kind(config: Config) -> str:
    """A configuration's kind: its family, and the names of its parameters."""
    return " ".join((config.family, *config.tile))


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """The distance in doublings between values by name; a name that one lacks counts as many."""
    names = a.keys() | b.keys()
    return sum(abs(math.log2((a[n] + 1) / (b[n] + 1))) if n in a and n in b else 8.0 for n in names)
