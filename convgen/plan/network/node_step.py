"""One step of a node on the busiest rank: what tables add up and explanations list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgen.cost.machine import Machine
from convgen.cost.model import PICOSECONDS, Chain, StepCost


@dataclass(frozen=True, slots=True)
class NodeStep:
    """A step of forward or backward; `what` says it in words, `kind` is the operation or collective."""

    phase: str
    kind: str
    what: str
    cost: StepCost

    @property
    def communicates(self) -> bool:
        return self.cost.sent_bytes > 0 or self.kind in ("exchange", "all_reduce")


def conversions(phase: str, what: str, chain: Chain) -> Iterator[NodeStep]:
    """The steps of a redistribution, slices left out."""
    for step, cost in chain:
        if step.kind != "slice":
            over = ",".join(step.over)
            yield NodeStep(phase, step.kind, f"{what} over {over}: {step.src} -> {step.dst}", cost)


def passes(phase: str, kind: str, what: str, moved_bytes: int, machine: Machine) -> NodeStep:
    """A local operation that memory bounds: bytes read and written, and a launch."""
    time_s = moved_bytes / machine.memory_bytes_per_s + machine.launch_s
    return NodeStep(phase, kind, f"{what}, {moved_bytes} bytes", StepCost(0, 0, 0, round(time_s * PICOSECONDS)))


def time_ps(steps: Iterable[NodeStep]) -> int:
    return sum(step.cost.time_ps for step in steps)
