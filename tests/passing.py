"""Passes, run in tests."""

from __future__ import annotations

from convgen.algebra.space import Space
from convgen.compiler import pipeline
from convgen.passes.contract import Context, Pass, run_passes, with_options
from convgen.program.nodes import Schedule
from convgen.spec.layer import Layer


def passed(schedule: Schedule, space: Space, *passes: Pass, reads_parts: bool = False) -> Schedule:
    """What passes make of a schedule, one after the other."""
    return run_passes(passes, schedule, Context(space, reads_parts=reads_parts))


def eager(layer: Layer) -> tuple[Pass, ...]:
    """The pipeline that fuses whatever layouts can be, however little it pays: small layers have few channels."""
    return with_options(pipeline(layer), "fuse-layouts{least_part=1 most_boxes=8}")
