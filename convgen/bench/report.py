"""What was measured, as text, plain data, and a trace that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from convgen.bench.marks import MOVES, Mark
from convgen.bench.rounds import PARTS, Took
from convgen.bench.run import STEP, Alone, Benched, Beside
from convgen.explain.timeline import trace
from convgen.spec.text import aligned, number_of

SHOWN = 12  # lines of each table
NEAR = 0.15  # share of a measured step: a simulated step within it is right


def bench_text(found: Benched) -> str:
    """Ways, collectives alone, and where the timeline differs, as text."""
    return "\n".join([*_head(found), *_ways(found), *_alone(found), *_beside(found)])


def _head(found: Benched) -> Iterator[str]:
    compiled = found.subject.compiled
    inputs = ", gradients of inputs too" * found.subject.of_inputs
    yield (
        f"{found.subject.name}: {number_of(compiled.graph.batch, 'sample')} a step of training, {compiled.types}, on "
        f"{found.device}{inputs}; medians of {number_of(found.rounds, 'round')}, of each its slowest rank"
    )


def _ways(found: Benched) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", *(f"{part} ms" for part in PARTS), "p20 to p80", "ranks", "simulated", "ratio")]
    for name, by_part in found.ways.items():
        step = by_part["step"]
        simulated = found.simulated.get(name)
        there = [seconds for seconds in step.by_rank if seconds] or [0.0]  # others have no part in it
        rows.append(
            (
                name,
                *(_ms(by_part[part].median) for part in PARTS),
                f"{_ms(step.p20)} to {_ms(step.p80)}",
                f"{_ms(min(there))} to {_ms(max(there))}",
                "" if simulated is None else _ms(simulated[1]),
                "" if simulated is None else f"{simulated[1] / step.median:.2f}",
            )
        )
    yield from aligned(rows, range(1, len(rows[0])), "  ")


def _alone(found: Benched) -> Iterator[str]:
    if not found.alone:
        yield "  no collectives"
        return
    rows: list[tuple[str, ...]] = [("collective alone", "", "", "bytes", "ms", "MB/s", "simulated", "ratio")]
    longest = sorted(found.alone, key=lambda one: (-one.took.median, one.step))
    for one in longest[:SHOWN]:
        known = one.modelled_s is not None
        rows.append(
            (
                one.step,
                one.phase,
                one.kind,
                f"{one.sent_bytes}",
                _ms(one.took.median),
                f"{one.bytes_per_s / 1e6:.1f}",
                _ms(one.modelled_s) if one.modelled_s is not None else "",
                f"{one.modelled_s / one.took.median:.2f}" if one.modelled_s is not None and known else "",
            )
        )
    yield ""
    yield from aligned(rows, range(3, 8), "  ")
    whole, sent = sum(one.took.median for one in longest), sum(one.sent_bytes for one in longest)
    left = f"; {number_of(len(longest) - SHOWN, 'more')} not shown".replace("mores", "more") * (len(longest) > SHOWN)
    yield f"  in all {number_of(len(longest), 'collective')}: {sent} bytes, {_ms(whole)} ms one after the other{left}"


def _beside(found: Benched) -> Iterator[str]:
    if found.timeline is None:
        return
    rows: list[tuple[str, ...]] = [("simulated beside measured", "", "", "simulated ms", "measured ms", "off ms")]
    rows += [
        (one.name, one.phase, one.what, _ms(one.simulated), _ms(one.measured), f"{one.off * 1e3:+.3f}")
        for one in found.beside[:SHOWN]
    ]
    yield ""
    yield from aligned(rows, range(3, 6), "  ")
    for what in ("row", "collective"):
        of_kind = [one for one in found.beside if one.what == what]
        sums = [sum(getattr(one, key) for one in of_kind) for key in ("simulated", "measured")]
        said = {"row": "rows compute", "collective": "ranks stand still"}[what]
        yield f"  {said} {_ms(sums[0])} ms simulated, {_ms(sums[1])} ms measured"
    yield f"  {_verdict(found)}"


def _verdict(found: Benched) -> str:
    step, simulated = found.ways[STEP]["step"].median, found.simulated[STEP][1]
    off = simulated / step - 1
    if abs(off) <= NEAR:
        return f"the simulated step is {off:+.0%} off"
    worst = farthest(found.beside, off)
    if worst is None:
        return f"the simulated step is {off:+.0%} off"
    return f"the simulated step is {off:+.0%} off; most by {worst.what} {worst.name}, {worst.phase}"


def farthest(beside: Sequence[Beside], off: float) -> Beside | None:
    """What is off most in the direction in which the step is off; None where nothing is."""
    same = [one for one in beside if (one.off > 0) == (off > 0) and one.off]
    return max(same, key=lambda one: abs(one.off), default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def bench_json(found: Benched) -> dict[str, Any]:
    """All that was measured, as plain data."""
    subject = found.subject
    off = 0.0
    if found.timeline is not None:
        off = found.simulated[STEP][1] / found.ways[STEP]["step"].median - 1
    worst = farthest(found.beside, off)
    return {
        "network": subject.compiled.graph.name,
        "grid": subject.compiled.program.grid.plain,
        "ranks": subject.ranks,
        "samples": subject.compiled.graph.batch,
        "device": found.device,
        "rounds": found.rounds,
        "ways": [
            {
                "way": name,
                **{part: _took_json(one) for part, one in by_part.items()},
                "simulated_s": found.simulated[name][1] if name in found.simulated else None,
                "simulated_forward_s": found.simulated[name][0] if name in found.simulated else None,
            }
            for name, by_part in found.ways.items()
        ],
        "collectives": [_alone_json(one) for one in found.alone],
        "steps": [asdict(one) for one in found.beside],
        "off": None if found.timeline is None else off,
        "off_most": None if worst is None or found.timeline is None else asdict(worst),
    }


def _took_json(one: Took) -> dict[str, Any]:
    return {"seconds": one.median, "p20": one.p20, "p80": one.p80, "spread": one.spread, "by_rank": [*one.by_rank]}


def _alone_json(one: Alone) -> dict[str, Any]:
    return {
        "step": one.step,
        "phase": one.phase,
        "collective": one.kind,
        "sent_bytes": one.sent_bytes,
        "total_bytes": one.total_bytes,
        "bytes_per_s": one.bytes_per_s,
        "simulated_s": one.modelled_s,
        **_took_json(one.took),
    }


def bench_trace(found: Benched) -> str:
    """Chrome's trace events: a process for each rank, its measured thread above those of the simulated step."""
    name, events = found.subject.compiled.graph.name, list[dict[str, Any]]()
    if found.timeline is not None:
        for event in json.loads(trace(name, found.timeline))["traceEvents"]:
            is_lane = event["name"] == "thread_name"
            args = {"name": f"simulated: {event['args']['name']}"} if is_lane else event["args"]
            events.append({**event, "tid": event["tid"] + 1, "args": args})
    for rank, marks in enumerate(found.marks):
        if found.timeline is None:
            events.append(_named("process_name", rank, f"{name} rank {rank}"))
        events += [_named("thread_name", rank, "measured"), *(_event(rank, m) for m in marks)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _named(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": 0, "args": {"name": name}}


def _event(rank: int, m: Mark) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": m.name,
        "cat": "moving" if m.kind in MOVES else "computing",
        "pid": rank,
        "tid": 0,
        "ts": round(m.start_s * 1e6, 3),
        "dur": round((m.end_s - m.start_s) * 1e6, 3),
        "args": {"kind": m.kind, "phase": m.phase},
    }


# ---- Several grids ----


def scaling_text(strong: Sequence[Benched], weak: Sequence[Benched]) -> str:
    """Tables of steps over ranks: the batch fixed, and the batch growing with the ranks."""
    lines: list[str] = []
    for title, several in (("strong scaling", strong), ("weak scaling", weak)):
        if not several:
            continue
        first = several[0]
        rows: list[tuple[str, ...]] = [(title, "ranks", "samples", "step ms", "times", "efficiency", "simulated ms")]
        for one in several:
            times, efficiency = scaled(first, one)
            simulated = one.simulated.get(STEP)
            rows.append(
                (
                    f"{one.subject.compiled.program.grid}",
                    f"{one.subject.ranks}",
                    f"{one.subject.compiled.graph.batch}",
                    _ms(one.ways[STEP]["step"].median),
                    f"{times:.2f} x",
                    f"{efficiency:.0%}",
                    "" if simulated is None else _ms(simulated[1]),
                )
            )
        lines += ["", *aligned(rows, range(1, 7))]
    return "\n".join(lines[1:])


def scaled(first: Benched, one: Benched) -> tuple[float, float]:
    """Samples a second over those of the first, and this quotient over that of the ranks (efficiency)."""
    rate = [b.subject.compiled.graph.batch / b.ways[STEP]["step"].median for b in (first, one)]
    times = rate[1] / rate[0]
    return times, times * first.subject.ranks / one.subject.ranks
