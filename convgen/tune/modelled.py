"""Candidates for a target that this machine lacks, by the model's order and by what compiling says. Nothing is
measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from convgen.spec.target import Target
from convgen.tune.ahead import Ahead
from convgen.tune.candidates import Candidate, candidates, ranked
from convgen.tune.model import assumed_ceilings
from convgen.tune.report import causes_text
from convgen.tune.search import Effort
from convgen.tune.wanted import Wanted

COMPILED = {"quick": 6, "full": 24}
SHOWN = 3
FACTS = ("registers", "shared_bytes", "matrix_instructions", "widest_global_load_bytes")


@dataclass(frozen=True)
class Modelled:
    """A problem's candidates that compile well, in the model's order.

    Attributes:
        found: modelled microseconds, configuration and facts of each.
        of: the number of legal candidates. compiled: how many of the first were compiled.
    """

    wanted: Wanted
    found: tuple[tuple[float, Candidate, dict[str, int]], ...]
    of: int
    compiled: int
    failures: Counter[str]


def rank_only(
    wanted: Sequence[Wanted],
    target: Target,
    effort: Effort,
    jobs: int,
    seconds: float | None,
    told: Callable[[int, str], None],
) -> list[Modelled]:
    """Rank every problem's candidates and compile the best, until time is up.

    Args:
        told: is called after each problem with how many are done, and what was found.
    """
    end = None if seconds is None else time.monotonic() + seconds
    ahead = Ahead(jobs, fill=False)
    made: list[Modelled] = []
    try:
        ceilings = assumed_ceilings(target)
        for one in wanted:
            if end is not None and time.monotonic() >= end:
                break
            order = [
                (us, c) for us, c in ranked(candidates(one.problem, target), ceilings) if c.config.family != "aten"
            ]
            first = order[: COMPILED[effort]]
            ahead.submit([c for _, c in first])
            failures, good = Counter[str](), list[tuple[float, Candidate, dict[str, int]]]()
            for us, c in first:
                prepared = ahead.result(c)
                if prepared.cause:
                    failures[prepared.cause] += 1
                else:
                    good.append((us, c, dict(prepared.facts)))
            made.append(Modelled(one, tuple(good), len(order), len(first), failures))
            told(len(made), f"{one}: {good[0][1].label if good else 'nothing compiles well'}")
    finally:
        ahead.close()
    return made


def modelled_table(made: Sequence[Modelled], target: Target) -> Table:
    """A table of the best few candidates of each problem."""
    table = Table(
        title=f"{target}: NOT MEASURED, this machine has none. Order of the model, and what compiling says",
        title_justify="left",
    )
    left = ("problem", "kernel", "left out")
    for column in ("problem", "kernel", "modelled", "registers", "shared", "tensor ops", "load bytes", "left out"):
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for m in made:
        for i, (us, c, facts) in enumerate(m.found[:SHOWN]):
            table.add_row(
                str(m.wanted) if i == 0 else "",
                c.label,
                f"{us:.1f} us",
                *(str(facts[n]) for n in FACTS),
                f"{causes_text(m.failures)} (of {m.compiled} compiled, {m.of} legal)" if i == 0 else "",
                end_section=i == min(SHOWN, len(m.found)) - 1,
            )
        if not m.found:
            table.add_row(str(m.wanted), "none", "", "", "", "", "", causes_text(m.failures), end_section=True)
    return table


def modelled_records(made: Sequence[Modelled], target: Target) -> list[dict[str, Any]]:
    """The records that --json prints: `measured` is false, and there is no `ms`."""
    return [
        {
            "problem": m.wanted.key,
            "uses": [str(use) for use in m.wanted.uses],
            "target": str(target),
            "measured": False,
            "status": "modelled",
            "of": m.of,
            "compiled": m.compiled,
            "failures": dict(sorted(m.failures.items())),
            "candidates": [{"kernel": c.label, "modelled_ms": us / 1e3, "facts": facts} for us, c, facts in m.found],
        }
        for m in made
    ]
