"""What `convgen sw26010 allreduce` prints: text for people, dictionaries for programs."""

from __future__ import annotations

from typing import Any

from convgen.sw26010.allreduce.cost import NUMBERINGS, Network, all_reduce_time, ring_time
from convgen.sw26010.allreduce.run import StepTraffic, simulate_traffic
from convgen.sw26010.machine.table import table


def all_reduce_json(network: Network, elements: int) -> dict[str, Any]:
    """Both numberings: seconds by Eqs. 2-6, and the traffic of every step. float32 elements."""
    found: dict[str, Any] = {
        "nodes": network.nodes, "supernode": network.supernode, "bytes": 4 * elements,
        "latency_s": network.latency_s, "inside_s_per_byte": network.inside_s_per_byte,
        "across_s_per_byte": network.across_s_per_byte, "reduce_s_per_byte": network.reduce_s_per_byte,
        "ring_s": ring_time(network, 4 * elements),
    }  # fmt: skip
    for numbering in NUMBERINGS:
        time = all_reduce_time(network, numbering, 4 * elements)
        found[numbering] = {
            "reduce_scatter_s": time.reduce_scatter_s,
            "all_gather_s": time.all_gather_s,
            "all_reduce_s": time.all_reduce_s,
            "steps": [_step_json(step) for step in simulate_traffic(network, numbering, elements, 4)],
        }
    return found


def _step_json(step: StepTraffic) -> dict[str, Any]:
    return {
        "phase": step.phase, "distance": step.distance, "message_bytes": step.message_bytes,
        "total_bytes": step.total_bytes, "crossing_bytes": step.crossing_bytes, "seconds": step.seconds,
    }  # fmt: skip


def all_reduce_text(network: Network, elements: int) -> str:
    """The same for people: steps with what crosses supernodes, then the equations and the messages' sum."""
    runs = {numbering: simulate_traffic(network, numbering, elements, 4) for numbering in NUMBERINGS}
    head = [
        "step",
        "distance",
        "message B",
        *(f"crossing B, {n}" for n in NUMBERINGS),
        *(f"ms, {n}" for n in NUMBERINGS),
    ]
    rows = [
        [a.phase, str(a.distance), f"{a.message_bytes:,}", f"{a.crossing_bytes:,}", f"{b.crossing_bytes:,}",
         f"{a.seconds * 1e3:.4f}", f"{b.seconds * 1e3:.4f}"]
        for a, b in zip(*runs.values(), strict=True)
    ]  # fmt: skip
    times = {numbering: all_reduce_time(network, numbering, 4 * elements) for numbering in NUMBERINGS}
    summary = [
        [numbering, f"{t.reduce_scatter_s * 1e3:.4f}", f"{t.all_gather_s * 1e3:.4f}", f"{t.all_reduce_s * 1e3:.4f}",
         f"{sum(s.seconds for s in runs[numbering]) * 1e3:.4f}", f"{sum(s.crossing_bytes for s in runs[numbering]):,}"]
        for numbering, t in times.items()
    ]  # fmt: skip
    gain = times["adjacent"].all_reduce_s / times["round-robin"].all_reduce_s
    lines = [
        f"all-reduce of {4 * elements:,} B on {network.nodes} nodes in supernodes of {network.supernode}",
        "",
        table(head, rows),
        "",
        table(("ms by Eqs. 2-6", "reduce-scatter", "all-gather", "all-reduce", "messages", "bytes crossing"), summary),
        "",
        f"round-robin numbers are {gain:.3f} times as fast; a ring without oversubscription takes "
        f"{ring_time(network, 4 * elements) * 1e3:.3f} ms",
    ]
    return "\n".join(lines)
