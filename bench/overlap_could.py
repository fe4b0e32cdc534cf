"""What of a step's communication its schedule lets hide, where nothing that is done for it costs anything.

A timeline of the same program on a machine without latencies, launches and lanes that take of the processor, whose
rates are such that the plain program's parts take what was measured. So it knows what depends on what, and nothing of
what is to be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.timeline import Timeline, simulate
from convgen.program.network import Program

PARTS = ("forward", "backward")
Parts = Mapping[str, float]


def could(plain: Program, way: Program, machine: Machine, comp: Parts, comm: Parts) -> dict[str, float]:
    """Seconds by part that the schedule saves if all goes on beside the other as far as it may.

    Args:
        comp, comm: measured seconds by part.
    """
    levels = tuple(replace(one, latency_s=0.0) for one in machine.levels)
    machine = replace(
        machine,
        levels=levels,
        launch_s=0.0,
        network_launch_s=None,
        misfits=(),
        message_processor_s=0.0,
        processor_s_per_byte=0.0,
    )
    found: dict[str, float] = {}
    for part in PARTS:
        like = machine
        for _ in range(3):  # what adds in a collective goes by the memory
            timeline = simulate(plain, like, "float32", of_inputs=True)
            moving = sum(one.seconds for one in timeline.travelled if one.phase == part)
            like = _faster(like, (_seconds(timeline, part) - moving) / comp[part], moving / max(comm[part], 1e-9) or 1)
        both = [_seconds(simulate(one, like, "float32", of_inputs=True), part) for one in (plain, way)]
        found[part] = both[0] - both[1]
    return found | {"step": sum(found.values())}


def _seconds(timeline: Timeline, part: str) -> float:
    return timeline.forward_s if part == "forward" else timeline.end_s - timeline.forward_s


def _faster(machine: Machine, computing: float, moving: float) -> Machine:
    return replace(
        machine,
        levels=tuple(replace(one, bytes_per_s=one.bytes_per_s * moving) for one in machine.levels),
        memory_bytes_per_s=machine.memory_bytes_per_s * computing,
        peak_flops=tuple((dtype, rate * computing) for dtype, rate in machine.peak_flops),
    )
