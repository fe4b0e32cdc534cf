"""A check of an SW26010's mesh: what every rank's core groups did, against the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convgen.compiler import Compiled
from convgen.spec.text import aligned
from convgen.sw26010.target.volume import predicted_rank
from convgen.verify.program import RankResult


@dataclass(frozen=True, slots=True)
class MeshReport:
    """By rank and phase the module's report; and the ranks and phases whose events differ from the closed forms."""

    reports: tuple[dict[str, Any], ...]
    wrong: tuple[tuple[int, str], ...]


def mesh_report(compiled: Compiled, results: Sequence[RankResult]) -> MeshReport | None:
    """The mesh's part of a check; None for other targets."""
    if not compiled.layer.target.is_mesh:
        return None
    wrong: list[tuple[int, str]] = []
    for phase, plans in compiled.mesh_plans().items():
        of = {rank: plan for ranks, plan in plans for rank in ranks}
        for rank, result in enumerate(results):
            found, expected = result.report.get(phase), None
            if found is not None and rank in of:
                expected = predicted_rank(of[rank], [part["plan"] for part in found["core_groups"]])
                found = {key: found[key] for key in expected}
            if found != expected or (rank in of) == (found is None):
                wrong.append((rank, phase))
    return MeshReport(tuple(result.report for result in results), tuple(wrong))


def mesh_lines(report: MeshReport) -> list[str]:
    """A line for each phase, about the rank that takes longest."""
    rows: list[tuple[str, ...]] = [
        ("mesh", "rank", "plan", "core groups", "LDM B", "DMA B", "messages", "cycles", "model ms")
    ]
    for phase in dict.fromkeys(phase for one in report.reports for phase in one):
        rank = max(
            (r for r, one in enumerate(report.reports) if phase in one),
            key=lambda r: report.reports[r][phase]["seconds"],
        )
        one = report.reports[rank][phase]
        parts = one["core_groups"]
        dma = sum(one["get_bytes_by_block"].values()) + sum(one["put_bytes_by_block"].values())
        kinds = ", ".join(dict.fromkeys(part["plan"] for part in parts))
        groups = len({tuple(part["samples"]) for part in parts if part.get("tap") == parts[0].get("tap")})
        numbers = (groups, one["ldm_bytes"], dma, one["putr"] + one["putc"], one["cycles"])
        rows.append((phase, str(rank), kinds, *(f"{n:,}" for n in numbers), f"{one['seconds'] * 1e3:.3f}"))
    same = "equal the closed forms on every rank"
    if report.wrong:
        same = "DIFFER FROM THE CLOSED FORMS: " + ", ".join(f"{phase} on rank {rank}" for rank, phase in report.wrong)
    return [*aligned(rows, (1, *range(3, 9)), "  "), f"  events {same}"]
