"""Results of tuning, as text, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from convgen.kernels.work import whole_bytes, whole_flops
from convgen.tune.database import Entry
from convgen.tune.tuner import Outcome
from convgen.tune.wanted import Wanted


def time_text(ms: float) -> str:
    """A time in milliseconds or microseconds."""
    return f"{ms:.3f} ms" if ms >= 0.1 else f"{ms * 1e3:.2f} us"


def rate_text(wanted: Wanted, entry: Entry) -> str:
    """The rate reached: FLOP/s where products bound the problem, else bytes/s."""
    if entry.bound == "compute":
        giga = whole_flops(wanted.problem) / entry.ms / 1e6
        return f"{giga / 1e3:.3g} TFLOP/s" if giga >= 1e3 else f"{giga:.3g} GFLOP/s"
    return f"{whole_bytes(wanted.problem) / entry.ms / 1e6:.3g} GB/s"


def causes_text(failures: Counter[str]) -> str:
    """Failures by cause, as `2 wrong, 1 hung`; empty where nothing failed."""
    return ", ".join(f"{n} {cause}" for cause, n in sorted(failures.items()) if n)


def closing_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """The closing table, with a line for each problem."""
    table = Table(title=title, title_justify="left")
    left = ("problem", "kernel", "how", "failed")
    for column in (
        "problem", "kernel", "time", "rate", "of roofline", "ATen", "ATen / kernel", "tried", "how", "failed",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    missed = [o for o in outcomes if o.status == "not reached" and o.entry is None]
    for o in outcomes:
        if o in missed:
            continue
        e = o.entry
        if e is None:
            table.add_row(
                str(o.wanted), "", "", "", "", "", "", "", f"{o.status}: {o.said}" if o.said else o.status, ""
            )
            continue
        ratio = "" if e.ratio is None else f"{e.ratio:.2f}"
        aten = "none" if e.aten_ms is None else time_text(e.aten_ms)
        how = f"{o.status}, {o.resumed} resumed" if o.resumed else o.status
        how += ", in doubt" if e.doubt else ""
        table.add_row(
            str(o.wanted), e.kernel, time_text(e.ms), rate_text(o.wanted, e), f"{e.share:.0%} {e.bound}", aten, ratio,
            f"{e.tried} of {e.of}", how, causes_text(o.failures),
        )  # fmt: skip
    if missed:
        table.add_row(f"{len(missed)} more", *[""] * 7, "not reached", "")
    return table


def record(outcome: Outcome, device: str) -> dict[str, Any]:
    """The record of a problem that --json prints."""
    entry = outcome.entry
    return {
        "problem": outcome.wanted.key,
        "uses": [str(use) for use in outcome.wanted.uses],
        "device": device,
        "measured": entry is not None,
        "status": outcome.status,
        **({} if entry is None else entry.model_dump()),
        "resumed": outcome.resumed,
        "failures": dict(sorted((+outcome.failures).items())),
        "said": outcome.said,
    }
