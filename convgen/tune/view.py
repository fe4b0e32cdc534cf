"""The display of tuning's progress on stderr: live on a terminal, a line for each problem elsewhere."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from convgen.tune.candidates import Candidate
from convgen.tune.report import causes_text, time_text
from convgen.tune.tuner import Outcome
from convgen.tune.wanted import Wanted
from convgen.tune.weigh import Weighed


class Screen:
    """A live display: bars of problems and of one problem's candidates, the best so far against ATen, failures by
    cause.

    Args:
        budget_s: seconds for all problems; it shows what is left of them.
    """

    def __init__(self, console: Console, budget_s: float | None) -> None:
        self.console, self.budget_s, self.start = console, budget_s, time.monotonic()
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[said]}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.live = console.is_terminal
        self.best_us, self.best, self.aten_us = float("inf"), "", None

    def __enter__(self) -> Screen:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def begin(self, found: Sequence[Weighed]) -> None:
        self.total, self.count = len(found), 0
        self.network_us = {w.wanted.key: w.network_us for w in found}
        self.whole_us, self.done_us = max(sum(self.network_us.values()), 1e-9), 0.0
        busy, cores = os.getloadavg()[0], os.cpu_count() or 1
        if busy > cores / 2:
            text = f"this machine is busy (load {busy:.1f} on {cores} cores); what is in doubt is measured again later"
            self.console.print(text, highlight=False, markup=False)
        self.problems = self.bars.add_task("of the layers' time", total=100, said="")
        self.current = self.bars.add_task("", total=None, said="")

    def problem(self, wanted: Wanted, count: int, limit: int, aten_us: float | None) -> None:
        self.best_us, self.best, self.aten_us = float("inf"), "", aten_us
        self.failures = Counter[str]()
        self.bars.reset(self.current, total=limit, description=str(wanted), said=f"{count} legal")

    def tried(self, candidate: Candidate, us: float | None, cause: str, said: str) -> None:
        if us is None:
            self.failures[cause] += 1
            if cause in ("wrong", "crashed", "hung"):
                self.console.print(f"{cause}: {candidate.label}: {said}", highlight=False, markup=False)
        elif us < self.best_us:
            self.best_us, self.best = us, candidate.label
        self.bars.update(self.current, advance=1, said=self._standing())
        left = (
            ""
            if self.budget_s is None
            else f"{max(0.0, self.budget_s - time.monotonic() + self.start):.0f} s of budget"
        )
        self.bars.update(self.problems, said=left)

    def racing(self, count: int) -> None:
        self.bars.update(self.current, said=f"{count} raced against ATen")

    def done(self, outcome: Outcome) -> None:
        self.count += 1
        self.done_us += self.network_us[outcome.wanted.key]
        part = self.done_us / self.whole_us
        self.bars.update(self.problems, completed=100 * part)
        if outcome.status == "not reached" or (self.live and outcome.status == "kept"):
            return
        head = f"{self.count}/{self.total}, {part:.0%} of the layers' time:"
        self.console.print(f"{head} {_line(outcome)}", highlight=False, markup=False)

    def _standing(self) -> str:
        """The text of the best candidate so far, timed by a few launches."""
        failed = causes_text(self.failures)
        words = [f"best {time_text(self.best_us / 1e3)} {self.best}"] if self.best else []
        if self.aten_us is not None:
            words.append(f"ATen {time_text(self.aten_us / 1e3)}")
        return ", ".join([*words, *([f"failed: {failed}"] if failed else [])])


def _line(o: Outcome) -> str:
    if o.entry is None:
        return f"{o.wanted}: {o.status}" + (f": {o.said}" if o.said else "")
    e = o.entry
    against = "" if e.ratio is None or e.aten_ms is None else f", ATen {time_text(e.aten_ms)}, x{e.ratio:.2f}"
    failed = causes_text(o.failures)
    resumed = f", {o.resumed} from before" if o.resumed else ""
    resumed += f"; in doubt: {e.doubt}" if e.doubt else ""
    words = f"{o.wanted}: {o.status}: {e.kernel} {time_text(e.ms)}{against}; {e.tried} of {e.of} tried{resumed}"
    return words + (f"; failed: {failed}" if failed else "")
