"""Passes, run in tests."""

from __future__ import annotations

from convgen.algebra.space import Space
from convgen.compiler import pipeline
from convgen.passes.contract import Context, SchedulePass, run_passes, with_options
from convgen.program.nodes import Schedule
from convgen.spec.layer import Layer
from convgen.spec.target import CPU, Target, read_target

CUDA = read_target("cuda")


def passed(schedule: Schedule, space: Space, *passes: SchedulePass, target: Target = CPU) -> Schedule:
    """What passes make of a schedule, one after the other."""
    context = Context(space, target)
    return run_passes(passes, schedule, lambda one, given: one.run(given, context))


def eager(layer: Layer) -> tuple[SchedulePass, ...]:
    """The pipeline that fuses whatever layouts can be, however little it pays: small layers have few channels."""
    return with_options(pipeline(layer), "fuse-layouts{least_part=1 most_boxes=8}")
