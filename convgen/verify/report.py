"""The outcome of a check as text and as plain data."""

from __future__ import annotations

from typing import Any

from convgen.compiler import Compiled
from convgen.verify.check import Report
from convgen.verify.mesh import mesh_lines


def report_text(compiled: Compiled, report: Report) -> str:
    """A line per tensor: error, tolerance, verdict; then bytes sent per tensor."""
    ranks = compiled.layer.grid.ranks
    how = "virtual ranks" if report.transport == "virtual" else "processes (gloo)"
    how += ", kernels in Triton's interpreter," if report.interpreted else ""
    lines = [
        f"{compiled.layer.name}: {ranks} {how} on {compiled.schedule.grid}, {compiled.layer.dtype}, "
        "against one device in float64"
    ]
    lines.append(f"  {'tensor':<6}  {'max|error|/max|ref|':>20}  {'tolerance':>10}")
    for t in report.tensors:
        verdict = "ok" if t.ok else "WRONG" if t.error > t.tolerance else "COPIES DIFFER"
        lines.append(f"  {t.name:<6}  {t.error:>20.2e}  {t.tolerance:>10.1e}  {verdict}")
    sent = "  ".join(f"{name} {n:,}" for name, n in report.bytes_sent.items()) or "none"
    counted = "as counted behind the seam" if report.counted_equals_volume else "BUT COUNTED OTHERWISE behind the seam"
    lines.append(f"  bytes sent, all ranks: {sent}; VOLUME {counted}")
    lines += mesh_lines(report.mesh) if report.mesh is not None else []
    lines.append(f"  tolerance: {report.tolerance_from}")
    return "\n".join(lines)


def report_json(compiled: Compiled, report: Report) -> dict[str, Any]:
    data: dict[str, Any] = {
        "layer": compiled.layer.name,
        "ranks": compiled.layer.grid.ranks,
        "transport": report.transport,
        "interpreted": report.interpreted,
        "ok": report.ok,
        "tensors": [
            {"name": t.name, "error": t.error, "tolerance": t.tolerance, "copies_equal": t.copies_equal, "ok": t.ok}
            for t in report.tensors
        ],
        "bytes_sent": report.bytes_sent,
        "counted_equals_volume": report.counted_equals_volume,
        "tolerance_from": report.tolerance_from,
    }
    if report.mesh is not None:
        data["mesh"] = {"events_equal_closed_forms": not report.mesh.wrong, "ranks": list(report.mesh.reports)}
    return data
