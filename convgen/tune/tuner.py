"""Tuning: problem by problem, candidates ranked, compiled, measured and raced against ATen; what won is remembered.

candidates by closed form -> the model's order -> ask -> compile (GPUs) -> check and time -> tell -> ...
the fastest and ATen in turn, on other operands -> an entry, if it beats ATen beyond noise, else ATen's
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from convgen.errors import InputError
from convgen.kernels.config import Config, parse_config
from convgen.kernels.problem import Problem
from convgen.spec.target import Target
from convgen.tune.ahead import Ahead
from convgen.tune.candidates import Candidate, candidates, ranked
from convgen.tune.database import Ceilings, Entry, update
from convgen.tune.device import Device, versions
from convgen.tune.key import key_of
from convgen.tune.model import bounds_us
from convgen.tune.runner import Lost, Runner
from convgen.tune.search import Effort, Ranked, Search, limit_of
from convgen.tune.trials import Trial, append, read_trials
from convgen.tune.wanted import Wanted
from convgen.tune.worker import ATEN

FINALISTS = {"quick": 4, "full": 8}
RACE_ROUNDS = {"quick": 11, "full": 21}
FINALS = 0.25  # of a problem's time at least
RACE_S = 20.0  # a race takes about so long at most
BEATS, MARGIN = 0.8, 1.02  # a winner is faster than ATen in so many rounds, and in the median by so much
Status = Literal["tuned", "kept", "not reached", "failed"]


@dataclass
class Outcome:
    """What tuning a problem gave.

    Attributes:
        status: tuned; kept, where an entry was there; not reached in time; failed, and `said` says why.
        failures: candidates that failed, by cause.
        resumed: measurements that an earlier run made.
    """

    wanted: Wanted
    status: Status
    entry: Entry | None = None
    failures: Counter[str] = field(default_factory=Counter[str])
    resumed: int = 0
    said: str = ""


class View(Protocol):
    """What is told how it goes."""

    def begin(self, wanted: Sequence[Wanted]) -> None: ...
    def problem(self, wanted: Wanted, count: int, limit: int, aten_us: float | None) -> None: ...
    def tried(self, candidate: Candidate, us: float | None, cause: str, said: str) -> None: ...
    def racing(self, count: int) -> None: ...
    def done(self, outcome: Outcome) -> None: ...


@dataclass
class Tuner:
    """Tunes on this machine's device.

    Attributes:
        database: where entries go, after each problem.
        trials: where every measurement goes, at once.
        seconds: for all problems; None is as long as it takes.
        again: measure what was tuned and tried before once more.
        jobs: processes that compile for a GPU.
        legal: a problem's candidates.
    """

    device: Device
    target: Target
    database: Path
    trials: Path
    view: View
    effort: Effort = "full"
    seconds: float | None = None
    again: bool = False
    jobs: int = 1
    legal: Callable[[Problem, Target], list[Candidate]] = candidates
    limit_s: float = 30.0

    def run(self, wanted: Sequence[Wanted]) -> Iterator[Outcome]:
        """Tune, an outcome at a time; an interrupt ends it, and loses nothing that was measured.

        Raises:
            InputError: the database can't be read or written.
        """
        end = None if self.seconds is None else time.monotonic() + self.seconds
        known = update(self.database, self.device, {})
        self._versions = versions(self.target)
        self._runner = Runner(self.target, self.device.threads, self.limit_s)
        self._ahead = Ahead(self.jobs, fill=True) if not self.target.is_cpu else None
        self.view.begin(wanted)
        try:
            told, ceilings = self._told(), None
            for i, one in enumerate(wanted):
                now = time.monotonic()
                if end is not None and now >= end:
                    outcome = Outcome(one, "not reached", known.entries.get(one.key))
                elif (entry := known.entries.get(one.key)) is not None and self._keeps(one.problem, entry):
                    outcome = Outcome(one, "kept", entry)
                else:
                    ceilings = ceilings or self._measured_ceilings(known.ceilings, wanted)
                    self._ceilings = ceilings
                    share = None if end is None else now + (end - now) / (len(wanted) - i)
                    outcome = self._tune(one, told.get(one.key, {}), share, entry)
                    if outcome.entry is not None and outcome.status == "tuned":
                        update(self.database, self.device, {one.key: outcome.entry})
                self.view.done(outcome)
                yield outcome
        finally:
            self._runner.close()
            if self._ahead is not None:
                self._ahead.close()

    def _measured_ceilings(self, known: Ceilings | None, wanted: Sequence[Wanted]) -> Ceilings:
        needed = {one.problem.dtype for one in wanted}
        if known is not None and not self.again and needed <= known.flops_per_s.keys():
            return known
        return self._measure_ceilings(needed)

    def _measure_ceilings(self, dtypes: set[str]) -> Ceilings:
        """The best of what was found now and before."""
        try:
            made = Ceilings(**self._runner.ceilings(tuple(sorted(dtypes))))
        except Lost as lost:
            raise InputError(
                f"{self.device.name}: what the device reaches can't be measured: {lost.said}",
                hint="see whether torch works on it",
            ) from None
        known = update(self.database, self.device, {}, made).ceilings
        assert known is not None
        return known

    def _told(self) -> dict[str, dict[str, Trial]]:
        """Measurements of earlier runs with today's versions: problem -> kernel -> the last one."""
        found: dict[str, dict[str, Trial]] = {}
        earlier: Iterator[Trial] = iter(()) if self.again else read_trials(self.trials)
        for trial in earlier:
            if trial.versions == self._versions:
                found.setdefault(trial.key, {})[trial.kernel] = trial
        return found

    def _keeps(self, problem: Problem, entry: Entry) -> bool:
        """Whether an entry needs no further search."""
        config = parse_config(entry.kernel)
        current = Candidate(problem, config, self.target)
        fresh = entry.versions == self._versions and any(c.config == config for c in self.legal(problem, self.target))
        enough = entry.tried >= limit_of(entry.of, self.effort)  # fewer were in time, or of a quick search
        return fresh and enough and not self.again and current.source == entry.source

    def _tune(self, one: Wanted, told: dict[str, Trial], deadline: float | None, entry: Entry | None = None) -> Outcome:
        """Search, and race; what won before is measured first, so that a short search loses nothing that was found."""
        problem, failures = one.problem, Counter[str]()
        order = ranked(self.legal(problem, self.target), self._ceilings)
        by_config, by_label = {c.config: c for _, c in order}, {c.label: c for _, c in order}
        known: dict[Config, float | None] = {}
        for label, trial in told.items():
            candidate = by_label.get(label)
            if candidate is not None and candidate.source == trial.source:
                known[candidate.config] = trial.us
                failures[trial.cause] += trial.us is None
        limit = limit_of(len(order), self.effort)
        search = Search(Ranked(tuple(c.config for _, c in order), tuple(us for us, _ in order)), limit, known)
        try:
            aten = self._runner.open(problem)
        except Lost as lost:
            return self._failed(one, failures, f"ATen, or its operands, {lost.cause}: {lost.said}")
        except InputError as error:
            return self._failed(one, failures, error.fact)
        aten_us = min(aten.values(), default=None)
        self.view.problem(one, len(order), search.limit, aten_us)
        before = None if entry is None else by_label.get(entry.kernel)
        if before is not None and before.config not in known and self._races(before.config):
            self._measure([before], search, failures, aten_us, None)
        start = time.monotonic()
        stop = None if deadline is None else start + (1 - FINALS) * (deadline - start)
        while batch := search.ask(self.jobs if self._ahead is not None else 1):
            self._measure([by_config[c] for c in batch], search, failures, aten_us, stop)
            if stop is not None and time.monotonic() >= stop:
                break
        left = RACE_S if deadline is None else max(0.0, deadline - time.monotonic())
        outcome = self._finish(one, search, by_config, len(order), min(left, RACE_S))
        outcome.failures += failures
        outcome.resumed = len(known)
        return outcome

    def _failed(self, one: Wanted, failures: Counter[str], said: str) -> Outcome:
        return Outcome(one, "failed", failures=+failures, said=said)

    def _measure(
        self,
        batch: Sequence[Candidate],
        search: Search,
        failures: Counter[str],
        aten_us: float | None,
        stop: float | None,
    ) -> None:
        """Compile a batch side by side, then measure one after the other; every result is kept at once."""
        if self._ahead is not None:
            self._ahead.submit(batch)
        for candidate in batch:
            if stop is not None and time.monotonic() >= stop:
                return
            prepared = self._ahead.result(candidate) if self._ahead is not None else None
            if prepared is not None and prepared.cause:
                us, cause, said = None, prepared.cause, prepared.said
            else:
                best = min([us for us, _ in search.best()[:1]] + ([aten_us] if aten_us else []), default=float("inf"))
                found = self._runner.attempt(candidate, best)
                us, cause, said = found.get("us"), found.get("cause", ""), found.get("said", "")
            key, source = key_of(candidate.problem), candidate.source
            append(self.trials, Trial(key, candidate.label, us, cause, said, self._versions, source))
            search.tell(candidate.config, us)
            failures[cause] += us is None
            self.view.tried(candidate, us, cause, said)

    def _finish(
        self, one: Wanted, search: Search, by_config: dict[Config, Candidate], count: int, seconds: float
    ) -> Outcome:
        """Race the fastest and ATen, in about so many seconds, and make an entry of the winner."""
        failures = Counter[str]()
        right = [by_config[c] for _, c in search.best() if self._races(c)]
        finalists = right[: FINALISTS[self.effort]]
        finalists += [c for c in right[len(finalists) :] if c.config.family == "aten"]
        records: dict[str, Any] = {}
        while not records:
            self.view.racing(len(finalists))
            try:
                records = self._runner.race(finalists, RACE_ROUNDS[self.effort], 1, seconds)
            except Lost as lost:
                failures[lost.cause] += 1
                if not finalists:
                    return self._failed(one, failures, f"the race against ATen {lost.cause}: {lost.said}")
                finalists = self._survivors(finalists)
        for c in finalists:
            cause = records[c.label].get("cause", "")
            if cause:  # right on the first operands, wrong on these: never to be tried again
                failures[cause] += 1
                self._blame(c, cause, records[c.label]["said"])
        winner = _winner(finalists, records, self.target)
        if winner is None:
            return self._failed(one, failures, "no candidate was right, and ATen has no way to this problem")
        label, record = winner
        aten = records.get(ATEN)
        bounds = bounds_us(one.problem, self._ceilings)
        if max(bounds.values()) > record["us"]:  # faster than the device was found to be, by one that was busy
            self._ceilings = self._measure_ceilings({one.problem.dtype})
            bounds = bounds_us(one.problem, self._ceilings)
        bound = max(bounds, key=lambda b: bounds[b])
        config = by_config[parse_config(label)] if label != ATEN else by_config[Config("aten", warps=0, stages=0)]
        entry = Entry(
            kernel=str(config.config),
            ms=_short(record["us"] / 1e3),
            p20=_short(record["p20"] / 1e3),
            p80=_short(record["p80"] / 1e3),
            aten_ms=None if aten is None else _short(aten["us"] / 1e3),
            ratio=None if aten is None else _short(aten["us"] / record["us"]),
            share=_short(bounds[bound] / record["us"]),
            bound=bound,  # pyright: ignore[reportArgumentType]
            error=_short(record.get("error", 0.0)),
            tried=max(1, len(search.told)),
            of=count,
            effort=self.effort,
            versions=self._versions,
            source=config.source,
        )
        return Outcome(one, "tuned", entry, failures)

    def _races(self, config: Config) -> bool:
        """On a CPU the plain call is in the race as ATen itself."""
        return not self.target.is_cpu or config.family != "aten"

    def _survivors(self, finalists: list[Candidate]) -> list[Candidate]:
        """Those that a race alone does not break."""
        alive: list[Candidate] = []
        for c in finalists:
            try:
                self._runner.race([c], 1, 1, 0.0)
                alive.append(c)
            except Lost as lost:
                self._blame(c, lost.cause, lost.said)
        return alive if len(alive) < len(finalists) else alive[: len(alive) // 2]

    def _blame(self, candidate: Candidate, cause: str, said: str) -> None:
        trial = Trial(key_of(candidate.problem), candidate.label, None, cause, said, self._versions, candidate.source)
        append(self.trials, trial)
        self.view.tried(candidate, None, cause, said)


def _winner(
    finalists: Sequence[Candidate], records: dict[str, Any], target: Target
) -> tuple[str, dict[str, Any]] | None:
    """The fastest that is right; ATen where that does not beat it beyond noise.

    On a GPU ATen as a module has it (the family, which copies its result) is what a kernel has to beat.
    """
    right = sorted(
        ((c.label, records[c.label]) for c in finalists if "cause" not in records[c.label]), key=lambda r: r[1]["us"]
    )
    ours = [r for r in right if not r[0].startswith("aten")]
    atens = [r for r in right if r[0].startswith("aten")]
    if target.is_cpu and ATEN in records:
        atens.append((ATEN, records[ATEN]))
    if not ours or not atens:
        return (ours or atens or [None])[0]
    best, aten = ours[0], min(atens, key=lambda r: r[1]["us"])
    record = best[1]
    clear = record["us"] * MARGIN < aten[1]["us"]
    if target.is_cpu:
        clear = clear and record["beats"] >= BEATS and (record["against"] or 0.0) >= MARGIN
    return best if clear else aten


def _short(number: float) -> float:
    """Four digits: what a file needs."""
    return float(f"{number:.4g}")
