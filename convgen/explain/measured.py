"""A recorded step beside the simulated one, matched by the names that both have.

Packages mark what they do for torch.profiler: `convgen move STEP` where a collective is waited for at once, `convgen
wait STEP` where one that was started is, `convgen local ROW`.

    with torch.profiler.profile() as profile:
        model(x).sum().backward()
    profile.export_chrome_trace("measured.json")
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

from convgen.cost.timeline import MAIN, Timeline
from convgen.errors import InputError
from convgen.explain.timeline import SHOWN
from convgen.files import said
from convgen.spec.text import aligned, number_of, open_bytes, shown

MARK = "convgen "
MOST_US = 1e15  # the longest event that is believed: thirty years
Measured = Mapping[tuple[str, str], float]  # (move, wait or local, name): seconds, the median of its occurrences


def read_measured(path: Path) -> Measured:
    """The seconds that a profiler's trace has for a package's steps.

    Raises:
        InputError: it is no trace, or has nothing of a package.
    """
    hint = "what torch.profiler's export_chrome_trace wrote of a step of a package"
    try:
        data: Any = json.loads(open_bytes(path, -1))
    except OSError as error:
        raise InputError(f"--measured: cannot read {said(path)}: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError):
        raise InputError(f"--measured: {said(path)} is no trace: it is not JSON", hint=hint) from None
    events: Any = cast("dict[str, Any]", data).get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"--measured: {said(path)} is no trace: it has no traceEvents", hint=hint)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in cast("list[dict[str, Any]]", [e for e in cast("list[object]", events) if isinstance(e, dict)]):
        name = str(event.get("name", ""))
        if name.startswith(MARK) and "dur" in event:
            what, _, step = name.removeprefix(MARK).partition(" ")
            took = event["dur"]
            if isinstance(took, bool) or not isinstance(took, (int, float)) or not 0 <= took < MOST_US:
                fact = f"--measured: {said(path)} is no trace: {shown(name)} can't take {shown(took)} us"
                raise InputError(fact, hint=hint)
            found[what, step].append(took * 1e-6)
    if not found:
        raise InputError(f"--measured: {said(path)} has nothing of a package of convgen", hint=hint)
    return {key: median(several) for key, several in found.items()}


def measured_text(timeline: Timeline, measured: Measured) -> str:
    """The text of how long collectives held ranks up, simulated and measured: in all, and those that differ most."""
    lanes = {span.name: span.lane for span in timeline.spans if span.rank < 0}
    pairs: list[tuple[str, float, float]] = []
    for one in timeline.travelled:
        key = ("move" if lanes.get(one.name) == MAIN else "wait", one.name)
        if key in measured:
            pairs.append((one.name, one.exposed_s, measured[key]))
    missing = len(timeline.travelled) - len(pairs)
    table: list[tuple[str, ...]] = [("held up", "simulated ms", "measured ms", "ratio")]
    for name, simulated, seconds in sorted(pairs, key=lambda p: -abs(p[1] - p[2]))[:SHOWN]:
        table.append((name, f"{simulated * 1e3:.3f}", f"{seconds * 1e3:.3f}", _ratio(simulated, seconds)))
    all_of_them = sum(p[1] for p in pairs), sum(p[2] for p in pairs)
    table.append(("in all", *(f"{s * 1e3:.3f}" for s in all_of_them), _ratio(*all_of_them)))
    lines = aligned(table, (1, 2, 3), "  ")
    if missing:
        lines.append(f"  {number_of(missing, 'step')} of the program not in the trace")
    return "\n".join(lines)


def _ratio(simulated: float, measured: float) -> str:
    return f"{simulated / measured:.2f}" if measured else "-"
