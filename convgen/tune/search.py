"""Which configurations of a problem are measured, and in which order.

First those that the model ranks best, with some of each family; then Optuna's TPE, which was told these, proposes, and
of several proposals the one that the model ranks best is taken. A proposal that is no legal configuration, or was
measured, gives the nearest one that is.

Source: T. Akiba et al., Optuna, KDD'19; J. Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS'11.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from convgen.kernels.config import Config

Effort = Literal["quick", "full"]
PROPOSALS = 12  # of TPE for each one measured
FIRST = 0.5  # of the measurements, that follow the ranking alone


def limit_of(count: int, effort: Effort) -> int:
    """Configurations to measure: a tenth of the legal ones, a thirtieth in a quick search; some at least."""
    share, least, most = (10, 16, 160) if effort == "full" else (30, 6, 24)
    return min(count, max(least, min(most, math.ceil(count / share))))


@dataclass(frozen=True, slots=True)
class Ranked:
    """Legal configurations with modelled times, least first."""

    configs: tuple[Config, ...]
    modelled_us: tuple[float, ...]


class Search:
    """Ask for configurations, tell their times.

    Args:
        limit: configurations that are asked for at most, those told beforehand included.
        told: microseconds of configurations measured before; None of those that failed.
        seed: of the proposals.
    """

    def __init__(
        self, ranked: Ranked, limit: int, told: Mapping[Config, float | None] | None = None, seed: int = 0
    ) -> None:
        self.ranked, self.limit, self.seed = ranked, min(limit, len(ranked.configs)), seed
        self.rank = {config: i for i, config in enumerate(ranked.configs)}
        self.told = {c: us for c, us in (told or {}).items() if c in self.rank}
        self.asked = dict.fromkeys(self.told)
        self._first = _first(ranked.configs, max(1, math.ceil(FIRST * self.limit)))
        self._study: Any = None
        self._known: dict[Config, None] = {}
        self._spaces: dict[str, dict[str, tuple[int, ...]]] = _spaces(ranked.configs)

    def ask(self, count: int = 1) -> list[Config]:
        """At most so many configurations that were not asked for before; none when the search is over."""
        found: list[Config] = []
        while len(found) < count and len(self.asked) < self.limit:
            chosen = next((c for c in self._first if c not in self.asked), None)
            if chosen is None and any(us is not None for us in self.told.values()):
                chosen = self._propose()
            if chosen is None:  # all that was measured failed: on by the ranking
                chosen = next(c for c in self.ranked.configs if c not in self.asked)
            self.asked[chosen] = None
            found.append(chosen)
        return found

    def tell(self, config: Config, us: float | None) -> None:
        """A configuration's time; None if it failed."""
        self.asked[config] = None
        self.told[config] = us

    def best(self) -> list[tuple[float, Config]]:
        """What was measured, fastest first."""
        return sorted(((us, c) for c, us in self.told.items() if us is not None), key=lambda pair: pair[0])

    def _propose(self) -> Config:
        """The best by the model of what TPE proposes."""
        study = self._tell_study()
        left = [c for c in self.ranked.configs if c not in self.asked]
        near: list[Config] = []
        for _ in range(PROPOSALS):
            trial = study.ask()
            near.append(_nearest(self._suggested(trial), left))
            study.tell(trial, state=_states().FAIL)
        return min(near, key=lambda c: self.rank[c])

    def _tell_study(self) -> Any:
        import optuna

        if self._study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(
                    n_startup_trials=1, multivariate=True, group=True, seed=self.seed, n_ei_candidates=32
                )
            self._study = optuna.create_study(sampler=sampler)
        for config, us in self.told.items():
            if config not in self._known and us is not None:
                self._known[config] = None
                kind, values = _kind(config), config.as_dict()
                space = self._spaces[kind]
                params: dict[str, Any] = {"kind": kind} | {f"{kind}.{n}": values[n] for n in space}
                choices = {"kind": tuple(self._spaces)} | {f"{kind}.{n}": some for n, some in space.items()}
                categorical = optuna.distributions.CategoricalDistribution
                distributions: dict[str, Any] = {n: categorical(some) for n, some in choices.items()}
                self._study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=distributions, value=math.log(us))
                )
        return self._study

    def _suggested(self, trial: Any) -> tuple[str, dict[str, int]]:
        kind = trial.suggest_categorical("kind", tuple(self._spaces))
        space = self._spaces[kind]
        return kind, {n: trial.suggest_categorical(f"{kind}.{n}", choices) for n, choices in space.items()}


def _states() -> Any:
    import optuna

    return optuna.trial.TrialState


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
    """Family and names: configurations that have the same parameters."""
    return " ".join((config.family, *config.tile))


def _spaces(configs: Sequence[Config]) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each kind the values that each name has among its configurations."""
    found: dict[str, dict[str, set[int]]] = {}
    for c in configs:
        space = found.setdefault(_kind(c), {})
        for name, value in c.as_dict().items():
            space.setdefault(name, set()).add(value)
    return {kind: {n: tuple(sorted(v)) for n, v in space.items()} for kind, space in found.items()}


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Between values by name, in doublings; a name that one lacks counts as many."""
    names = a.keys() | b.keys()
    return sum(abs(math.log2((a[n] + 1) / (b[n] + 1))) if n in a and n in b else 8.0 for n in names)


def _nearest(suggested: tuple[str, dict[str, int]], left: Sequence[Config]) -> Config:
    """Of what is left the most alike, of the same kind if there is one."""
    kind, values = suggested
    same = [c for c in left if _kind(c) == kind] or left
    return min(same, key=lambda c: distance(values, c.as_dict()))
