"""VOLUME: the bytes that each rank sends in each step, from exact index sets (docs/design.md, Two views of a step)."""

from __future__ import annotations

from typing import Any

from convgen.algebra.space import Space
from convgen.cost.network import record
from convgen.cost.traffic import elements_sent
from convgen.program.nodes import PHASES, Convert, Schedule


def volume(schedule: Schedule, space: Space, element_bytes: int) -> dict[str, list[dict[str, Any]]]:
    """Per phase, a record for each collective; ranks in mesh order. Slices send nothing and are left out."""
    types = schedule.types()
    return {
        phase: [
            record(
                step.result,
                step.kind,
                step.over,
                elements_sent(space, step.kind, step.over, types[step.source], step.type),
                element_bytes,
            )
            for step in schedule.section(phase)
            if isinstance(step, Convert) and step.kind != "slice"
        ]
        for phase in PHASES
    }
