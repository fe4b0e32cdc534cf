"""The outcome of a check as text and as plain data."""

from __future__ import annotations

from typing import Any

from convgen.compiler import Compiled
from convgen.verify.check import Report
from convgen.verify.mesh import mesh_lines
from convgen.verify.parted import verdict

WHAT = {"y": "output", "dx": "gradient of the input", "dw": "gradient of the weight", "dbias": "gradient of the bias"}


def report_text(compiled: Compiled, report: Report, *, derived: bool = False) -> str:
    """Each tensor with what it is, its error and its tolerance; bytes sent by tensor; the verdict.

    Args:
        derived: whether to add what the tolerances are derived from.
    """
    ranks = compiled.layer.grid.ranks
    how = "virtual ranks" if report.transport == "virtual" else "processes (gloo)"
    how += ", kernels in Triton's interpreter," if report.interpreted else ""
    lines = [
        f"{compiled.layer.name}: {ranks} {how} on {compiled.schedule.grid}, {compiled.layer.dtype}, "
        "against one device in float64"
    ]
    what = {t.name: f"{WHAT[t.name]}, {' x '.join(map(str, t.shape))}" for t in report.tensors}
    wide = max(map(len, what.values()))
    lines.append(f"  {'tensor':<6}  {'':<{wide}}  {'max|error|/max|ref|':>20}  {'tolerance':>10}")
    for t in report.tensors:
        said = "ok" if t.ok else "WRONG" if t.error > t.tolerance else "COPIES DIFFER"
        lines.append(f"  {t.name:<6}  {what[t.name]:<{wide}}  {t.error:>20.2e}  {t.tolerance:>10.1e}  {said}")
    sent = "  ".join(f"{name} {n:,}" for name, n in report.bytes_sent.items()) or "none"
    counted = "as counted behind the seam" if report.counted_equals_volume else "BUT COUNTED OTHERWISE behind the seam"
    lines.append(f"  bytes sent, all ranks: {sent}; VOLUME {counted}")
    lines += mesh_lines(report.mesh) if report.mesh is not None else []
    if derived:
        lines.append(f"  tolerance: {report.tolerance_from}")
    others = () if report.counted_equals_volume else ("what was sent is not what VOLUME says",)
    others += ("the emulated mesh did not do what its model counts",) if report.mesh and report.mesh.wrong else ()
    wrong = [t.name for t in report.tensors if not t.ok]
    first = next((t.parted for t in report.tensors if t.parted), None)
    return "\n".join([*lines, verdict(len(report.tensors), wrong, first, others)])


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
