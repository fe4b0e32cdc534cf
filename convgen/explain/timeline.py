"""A timeline in words and numbers, and as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from convgen.cost.timeline import Span, Timeline, by_kind, exposed
from convgen.spec.text import aligned, number_of, times_as

SHOWN = 12  # the most steps of each table
MOST_RANKS = 64  # the most ranks of a trace


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def timeline_text(title: str, timeline: Timeline, plain: Timeline) -> str:
    """The text: the step's time beside the plain schedule's, each kind of collective, the costliest steps, the critical
    path."""
    t = timeline
    lines = [
        title,
        "",
        f"  a step        {milliseconds(t.end_s)}: forward {milliseconds(t.forward_s)}, "
        f"backward {milliseconds(t.end_s - t.forward_s)}",
        f"  plain         {milliseconds(plain.end_s)}, every collective waited for at once: "
        f"{times_as(plain.end_s, t.end_s):.3f} times as long",
        f"  computing     {milliseconds(t.computing_s)}, of the rank that computes most",
        f"  moving        {milliseconds(t.moving_s)}, of which {milliseconds(t.exposed_s)} hold a rank up: "
        f"{t.hidden:.1%} hidden",
        "",
    ]
    table: list[tuple[str, ...]] = [("collective", "number", "ms", "held up", "hidden")]
    for kind, (n, seconds, out) in sorted(by_kind(t.travelled).items()):
        hidden = 1 - min(out / seconds, 1.0) if seconds else 1.0
        table.append((kind, str(n), f"{seconds * 1e3:.3f}", f"{out * 1e3:.3f}", f"{hidden:.1%}"))
    lines += [*aligned(table, (1, 2, 3, 4), "  "), ""]
    some = [one for one in exposed(t) if one.exposed_s > 0]
    table = [("what holds up most", "", "ms", "held up", "hidden")]
    for one in some[:SHOWN]:
        table.append(
            (one.name, one.phase, f"{one.seconds * 1e3:.3f}", f"{one.exposed_s * 1e3:.3f}", f"{one.hidden:.1%}")
        )
    lines += aligned(table, (2, 3, 4), "  ")
    if len(some) > SHOWN:
        lines.append(f"  ... and {number_of(len(some) - SHOWN, 'step')}")
    lines += ["", *aligned(_path(t), (2, 3), "  ")]
    return "\n".join(lines)


def _path(timeline: Timeline) -> list[tuple[str, ...]]:
    """The longest spans of the critical path, with their shares of the step."""
    path = timeline.critical_path()
    found: dict[str, float] = {}
    for span in path:
        found[span.lane] = found.get(span.lane, 0.0) + span.seconds
    of_lanes = ", ".join(f"{lane} {times_as(seconds, timeline.end_s):.1%}" for lane, seconds in found.items())
    table: list[tuple[str, ...]] = [(f"critical path: {number_of(len(path), 'span')}", of_lanes, "ms", "share")]
    for span in sorted(path, key=lambda s: -s.seconds)[:SHOWN]:
        where = span.lane if span.rank < 0 else f"{span.lane}, rank {span.rank}"
        table.append((span.name, where, f"{span.seconds * 1e3:.3f}", f"{times_as(span.seconds, timeline.end_s):.1%}"))
    return table


def timeline_json(timeline: Timeline, plain: Timeline) -> dict[str, Any]:
    """The timeline as plain data."""
    t = timeline
    return {
        "step_s": t.end_s,
        "forward_s": t.forward_s,
        "plain_s": plain.end_s,
        "computing_s": t.computing_s,
        "moving_s": t.moving_s,
        "exposed_s": t.exposed_s,
        "hidden": t.hidden,
        "steps": [
            {"step": one.name, "collective": one.kind, "phase": one.phase, "seconds": one.seconds,
             "exposed_s": one.exposed_s, "hidden": one.hidden}
            for one in t.travelled
        ],
        "critical_path": [
            {"name": s.name, "lane": s.lane, "rank": s.rank, "start_s": s.start_s, "end_s": s.end_s}
            for s in t.critical_path()
        ],
    }  # fmt: skip


def trace(name: str, timeline: Timeline) -> str:
    """Chrome's trace events, in microseconds: a process for each rank, with a thread for what it computes and one for
    each lane.

    Of more than 64 ranks it has those on the critical path, and as many others as there is room for.
    """
    path = timeline.critical_path()
    ranks = list(dict.fromkeys([*(s.rank for s in path if s.rank >= 0), *range(timeline.ranks)]))[:MOST_RANKS]
    lanes = list(dict.fromkeys(["compute", *(s.lane for s in timeline.spans)]))
    events: list[dict[str, Any]] = []
    for rank in sorted(ranks):
        events.append(_named("process_name", rank, 0, f"{name} rank {rank}"))
        events += [_named("thread_name", rank, i, lane) for i, lane in enumerate(lanes)]
    critical = {id(s) for s in path}
    for span in timeline.spans:
        for rank in sorted(ranks) if span.rank < 0 else [span.rank] if span.rank in ranks else []:
            events.append(_event(span, rank, lanes.index(span.lane), id(span) in critical))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None, separators=(",", ":")) + "\n"


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _event(span: Span, rank: int, lane: int, is_critical: bool) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": rank,
        "tid": lane,
        "ts": round(span.start_s * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": {"critical": is_critical},
    }
