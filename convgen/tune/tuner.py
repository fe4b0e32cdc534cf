"""Tuning, problem by problem: candidates are ranked, compiled, measured and raced against ATen, and the winner is
stored.

candidates by closed form -> the model's order -> ask -> compile (GPUs) -> check and time -> tell -> ...
the fastest and ATen in turn, on other operands -> an entry, if it beats ATen beyond noise, else ATen's
"""

from __future__ import annotations

import statistics
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
from convgen.tune.bench_cpu import ATEN
from convgen.tune.candidates import Candidate, candidates, ranked
from convgen.tune.claims import Claims
from convgen.tune.database import Ceilings, Entry, update
from convgen.tune.device import Device, versions
from convgen.tune.intervals import Interval, of_ratios
from convgen.tune.key import key_of
from convgen.tune.model import assumed_ceilings, bounds_us
from convgen.tune.runner import Lost, Runner
from convgen.tune.search import Effort, Ranked, Search, limit_of
from convgen.tune.trials import Trial, append, read_trials
from convgen.tune.verdict import WORTH, Verdict, against_family, challenger, gain_of, judged, right, rivals
from convgen.tune.wanted import Wanted
from convgen.tune.weigh import Weighed, heaviest_first, share_s, weighed

FINALISTS = {"quick": 6, "full": 10}
RACE_ROUNDS = {"quick": 11, "full": 21}
FINALS = 0.25  # at least this share of a problem's time is for its final races
RACE_S = 60.0  # the longest that a race takes, however busy the machine; it ends sooner where nothing disturbs it
SITTINGS = 2  # of a winner: what is peculiar to one sitting shows in the other
LEAST_S = 3.0  # the least seconds of a budget that a problem gets
WAIT_S = 0.5  # between looks at whether another tuner is done
CALLS = 64  # of a winner in one process, so that a mistake once in fifty calls shows
Status = Literal["tuned", "kept", "not reached", "failed"]


@dataclass
class Outcome:
    """The outcome of tuning a problem.

    Attributes:
        status: tuned; kept, where an entry was there; not reached in time; failed, and `said` says why.
        failures: how many candidates failed, by cause.
        resumed: how many measurements an earlier run had made.
    """

    wanted: Wanted
    status: Status
    entry: Entry | None = None
    failures: Counter[str] = field(default_factory=Counter[str])
    resumed: int = 0
    said: str = ""


class View(Protocol):
    """A view that is told how tuning goes."""

    def begin(self, found: Sequence[Weighed]) -> None: ...
    def problem(self, wanted: Wanted, count: int, limit: int, aten_us: float | None) -> None: ...
    def tried(self, candidate: Candidate, us: float | None, cause: str, said: str) -> None: ...
    def racing(self, count: int) -> None: ...
    def done(self, outcome: Outcome) -> None: ...


@dataclass
class Tuner:
    """Tunes on this machine's device.

    Attributes:
        database: the file to which entries are written, after each problem.
        trials: the file to which every measurement is written at once.
        seconds: the time for all problems; None for as long as it takes.
        again: whether to measure again what was tuned and tried before.
        jobs: how many processes compile for a GPU.
        legal: gives a problem's candidates.
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
        """Tune problems, the heaviest first, and give an outcome at a time; an interrupt loses nothing that was
        measured.

        A problem on which another tuner works is left to it, and looked at again in the end.

        Raises:
            InputError: the database can't be read or written.
        """
        end = None if self.seconds is None else time.monotonic() + self.seconds
        known = update(self.database, self.device, {})
        self._versions = versions(self.target)
        self._runner = Runner(self.target, self.device.threads, self.limit_s)
        self._ahead = Ahead(self.jobs, fill=True) if not self.target.is_cpu else None
        self._claims, self._told = Claims(self.database), self._read_told()
        assumed = known.ceilings or assumed_ceilings(self.target)
        self._weights = [weighed(one, self.legal(one.problem, self.target), assumed) for one in wanted]
        rest = heaviest_first(self._weights)
        self._ceilings: Ceilings | None = None
        self.view.begin(self._weights)
        try:
            others: list[Weighed] = []
            for i, one in enumerate(rest):
                outcome = self._one(one, rest[i:], end)
                if outcome is None:
                    others.append(one)
                    continue
                yield self._done(outcome)
            for one in others:
                yield self._done(self._after_another(one, end))
        finally:
            self._runner.close()
            if self._ahead is not None:
                self._ahead.close()

    def _done(self, outcome: Outcome) -> Outcome:
        self.view.done(outcome)
        return outcome

    def _one(self, weight: Weighed, rest: Sequence[Weighed], end: float | None) -> Outcome | None:
        """Tune a problem, if it needs tuning and there is time; None while another tuner works on it."""
        one = weight.wanted
        entry = update(self.database, self.device, {}).entries.get(one.key)
        if end is not None and time.monotonic() >= end:
            return Outcome(one, "not reached", entry)
        if entry is not None and self._keeps(one.problem, entry):
            return Outcome(one, "kept", entry)
        if not self._claims.take(one.key):
            return None
        try:
            if self._ceilings is None:
                self._ceilings = self._measured_ceilings([w.wanted for w in self._weights])
            now = time.monotonic()
            deadline = None if end is None else now + share_s(end - now, rest, LEAST_S)
            outcome = self._tune(one, self._told.get(one.key, {}), deadline, entry)
            if outcome.entry is not None and outcome.status == "tuned":
                update(self.database, self.device, {one.key: outcome.entry})
            return outcome
        finally:
            self._claims.drop(one.key)

    def _after_another(self, weight: Weighed, end: float | None) -> Outcome:
        """Another tuner's outcome for a problem; ours, if that tuner has gone without a result."""
        while True:
            outcome = self._one(weight, [weight], end)
            if outcome is not None:
                return outcome
            time.sleep(WAIT_S)

    def _measured_ceilings(self, wanted: Sequence[Wanted]) -> Ceilings:
        needed, known = {one.problem.dtype for one in wanted}, update(self.database, self.device, {}).ceilings
        if known is not None and not self.again and needed <= known.flops_per_s.keys():
            return known
        return self._measure_ceilings(needed)

    def _measure_ceilings(self, dtypes: set[str]) -> Ceilings:
        """Measure the device's ceilings; the best of those found now and before are kept."""
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

    def _read_told(self) -> dict[str, dict[str, Trial]]:
        """The measurements of earlier runs with today's versions: by problem and kernel, the last one."""
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
        enough = entry.tried >= limit_of(entry.of, self.effort)  # else time was short, or the search quick
        sure = not entry.doubt and (entry.gain is not None or entry.aten_ms is None)
        return fresh and enough and sure and not self.again and current.source == entry.source

    def _tune(self, one: Wanted, told: dict[str, Trial], deadline: float | None, entry: Entry | None = None) -> Outcome:
        """Search and race. An earlier winner is measured first, so that a short search loses nothing that was found."""
        problem, failures = one.problem, Counter[str]()
        assert self._ceilings is not None
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
        outcome = self._finish(one, search, by_config, len(order), deadline)
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
        """Compile a batch of candidates side by side, then measure one after the other; every result is kept at
        once."""
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
        self, one: Wanted, search: Search, by_config: dict[Config, Candidate], count: int, deadline: float | None
    ) -> Outcome:
        """Race the fastest candidates and ATen, then the winner once more alone, and its module; make an entry of the
        results."""
        failures = Counter[str]()
        ratings = [c.label for c in by_config.values()]
        records, finalists = self._raced(search, by_config, failures, self._left(deadline))
        if records is None:
            return self._failed(one, failures, "the race against ATen was lost every time")
        aten = records[ATEN]["laps"] if ATEN in right(records) else None
        if not self.target.is_cpu:
            records = against_family(records)
        while True:
            label = challenger(records, ratings)
            if label is None and ATEN not in right(records):
                return self._failed(one, failures, "no candidate was right, and ATen has no way to this problem")
            verdict, more = Verdict(ATEN), dict[str, Any]()
            if label is not None:
                best = next(c for c in finalists if c.label == label)
                verdict, more = self._judge(best, finalists, records, rivals(records, label, ratings), deadline)
                if "cause" in more:
                    failures[more["cause"]] += 1
                    self._blame(best, more["cause"], more["said"])
                    records[label] = more
                    continue
            entry = self._entry(one, verdict, records, more, aten, search, by_config, count)
            return Outcome(one, "tuned", entry, failures)

    def _raced(
        self, search: Search, by_config: dict[Config, Candidate], failures: Counter[str], seconds: float
    ) -> tuple[dict[str, Any] | None, list[Candidate]]:
        """The records of a race of the fastest against ATen, without candidates that break the race; failures are
        counted."""
        found = [by_config[c] for _, c in search.best() if self._races(c)]
        finalists = found[: FINALISTS[self.effort]]
        finalists += [c for c in found[len(finalists) :] if c.config.family == "aten"]
        while True:
            self.view.racing(len(finalists))
            try:
                records = self._runner.race(finalists, RACE_ROUNDS[self.effort], 1, seconds)
                break
            except Lost as lost:
                failures[lost.cause] += 1
                if not finalists:
                    return None, []
                finalists = self._survivors(finalists)
        for c in finalists:
            cause = records[c.label].get("cause", "")
            if cause:  # it was right on the first operands and is wrong on these: it is never tried again
                failures[cause] += 1
                self._blame(c, cause, records[c.label]["said"])
        return records, finalists

    def _judge(
        self,
        best: Candidate,
        finalists: Sequence[Candidate],
        records: dict[str, Any],
        rival: str,
        deadline: float | None,
    ) -> tuple[Verdict, dict[str, Any]]:
        """The verdict on the best kernel by two sittings of its own and by its module, as far as needed, or the cause
        of its failing there; and further records."""
        first = gain_of(records, best.label)
        if first is None:
            said = records.get(ATEN, {}).get("said", "")
            return Verdict(best.label, doubt=f"ATen was not right in the race: {said}" if said else ""), {}
        if first.high < WORTH:
            return judged(best.label, first, None, None), {}
        try:
            racing = [best, *(c for c in finalists if c.config.family == "aten")]
            rounds, sittings, again = RACE_ROUNDS[self.effort], list[Interval](), dict[str, Any]()
            while len(sittings) < SITTINGS:
                left, calls = self._left(deadline), 0 if sittings else CALLS
                again = self._runner.race(racing, rounds, 2 + len(sittings), left, calls, (1.0, WORTH))
                if "cause" in again[best.label]:
                    return Verdict(ATEN), again[best.label]
                again = again if self.target.is_cpu else against_family(again)
                sittings.append(gain_of(again, best.label) or first)
                if sittings[0].high < WORTH:
                    return judged(best.label, sittings[0], None, None), again
            first, second = sittings
            module = None
            if self.target.is_cpu and first.hull(second).high >= WORTH:
                made = self._runner.module(best, rounds, 9, self._left(deadline), (1.0,))
                if "cause" in made["tuned"]:
                    return Verdict(ATEN), made["tuned"]
                if "cause" not in made["untuned"]:
                    module = of_ratios(made["untuned"]["laps"], made["tuned"]["laps"])
        except Lost as lost:
            return Verdict(ATEN), {"cause": lost.cause, "said": lost.said}
        return judged(best.label, first, second, module, rival), again

    def _entry(
        self, one: Wanted, verdict: Verdict, records: dict[str, Any], more: dict[str, Any], aten: list[float] | None,
        search: Search, by_config: dict[Config, Candidate], count: int,
    ) -> Entry:  # fmt: skip
        """The entry to store. A kernel's time is over all sittings; `aten` is the laps of ATen's own call."""

        def laps(label: str) -> list[float] | None:
            found = [r[label]["laps"] for r in (records, more) if label in r and "laps" in r[label]]
            return [us for one in found for us in one] or None

        own = laps(verdict.label)
        aten = own if verdict.label == ATEN and self.target.is_cpu else aten
        assert own is not None
        p20, us, p80 = statistics.quantiles(own, n=5)[0], statistics.median(own), statistics.quantiles(own, n=5)[3]
        assert self._ceilings is not None
        bounds = bounds_us(one.problem, self._ceilings)
        if max(bounds.values()) > us:  # faster than ceilings that were measured on a busy device
            self._ceilings = self._measure_ceilings({one.problem.dtype})
            bounds = bounds_us(one.problem, self._ceilings)
        bound = max(bounds, key=lambda b: bounds[b])
        plain = records[ATEN].get("label", "aten") if ATEN in records else ""
        config = by_config[parse_config(plain if verdict.label == ATEN else verdict.label)]
        few = f"{len(search.told)} of {search.limit} tried" if len(search.told) < search.limit else ""
        return Entry(
            kernel=str(config.config),
            ms=_short(us / 1e3),
            p20=_short(p20 / 1e3),
            p80=_short(p80 / 1e3),
            aten_ms=None if aten is None else _short(statistics.median(aten) / 1e3),
            ratio=None if aten is None else _short(statistics.median(aten) / us),
            gain=_numbers(verdict.gain),
            module=_numbers(verdict.module),
            doubt="; ".join(d for d in (few, verdict.doubt) if d),
            share=_short(bounds[bound] / us),
            bound=bound,  # pyright: ignore[reportArgumentType]
            error=_short(records.get(verdict.label, {}).get("error", 0.0)),
            tried=len(search.told),
            of=count,
            effort=self.effort,
            versions=self._versions,
            source=config.source,
        )

    def _left(self, deadline: float | None) -> float:
        """Seconds that a race may take."""
        return RACE_S if deadline is None else min(RACE_S, max(0.0, deadline - time.monotonic()))

    def _races(self, config: Config) -> bool:
        """Whether a configuration races: on a CPU the plain call is in the race as ATen itself."""
        return not self.target.is_cpu or config.family != "aten"

    def _survivors(self, finalists: list[Candidate]) -> list[Candidate]:
        """The finalists that don't break a race that each runs alone."""
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


def _numbers(found: Interval | None) -> tuple[float, float, float] | None:
    return None if found is None else (_short(found.median), _short(found.low), _short(found.high))


def _short(number: float) -> float:
    """A number rounded to four digits, which a file needs at most."""
    return float(f"{number:.4g}")
