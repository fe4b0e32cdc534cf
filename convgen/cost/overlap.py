"""The time of a network's layers one after the other, with the reductions of dw hidden behind the backward pass.

| task | is | runs |
|---|---|---|
| compute | a local convolution, or what else a layer computes | one after the other |
| transfer | a collective or exchange that what follows waits for | between them |
| halo | an exchange of windows | beside the next computation, if halos are hidden; else as a transfer |
| reduce | a collective of dw or db | one at a time, in the background, behind computation |

Backward goes through the layers in reverse. In each layer the conversions of dy come first, then dw, whose reduction
starts when the one before it has ended, then dx. What is left of the reductions when the last computation ends is
exposed. Links that two tasks use at the same time are not slowed down.

Source: [SP] V-A (halos behind interiors and behind dw) and V-B ("greedily overlapping as much computation as possible
    with an
allreduce. Only one allreduce at a time is considered to run"). Modules run a layer's steps in the schedule's order;
this says what hiding is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convgen.cost.model import PICOSECONDS
from convgen.cost.schedule import ScheduleCost
from convgen.program.nodes import Compute, Convert, Phase, Schedule, Step, reads

TaskKind = Literal["compute", "transfer", "halo", "reduce"]
Behind = Literal["compute", "everything", "nothing"]


@dataclass(frozen=True, slots=True)
class Task:
    """A step, named by its result, in picoseconds."""

    name: str
    kind: TaskKind
    time_ps: int


@dataclass(frozen=True, slots=True)
class LayerTasks:
    """One layer's tasks, in the order in which they run."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What is hidden.

    Attributes:
        reductions: behind computation ([SP] V-B), behind transfers too ([CF] 5: "concurrent NCCL allreduces and
            reduce-scatters or allgathers during backpropagation overlap well"), or behind nothing.
        halos: whether they are hidden behind the next computation.
    """

    reductions: Behind = "compute"
    halos: bool = True


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Picoseconds of one training step.

    Attributes:
        forward_ps, backward_ps: of the phases, with what is exposed in them.
        compute_ps: of all computation.
        transfers_ps: of all that computation waits for, halos as far as they are not hidden.
        reductions_ps: of all reductions, hidden or not; exposed_ps: of those that are not.
    """

    forward_ps: int
    backward_ps: int
    compute_ps: int
    transfers_ps: int
    reductions_ps: int
    exposed_ps: int

    @property
    def seconds(self) -> float:
        return (self.forward_ps + self.backward_ps) / PICOSECONDS


def layer_tasks(schedule: Schedule, cost: ScheduleCost, *, needs_dx: bool = True) -> LayerTasks:
    """A layer's tasks from its schedule.

    Args:
        cost: of the same schedule.
        needs_dx: False for a network's first layer, whose input has no gradient; steps that only dx needs do not run.
    """
    times = {s.result: s.cost.time_ps for s in cost.steps}
    forward: list[tuple[Phase, Step]] = [("forward", step) for step in schedule.forward]
    backward: list[tuple[Phase, Step]] = [named for named in schedule.steps() if named[0] != "forward"]
    if not needs_dx:
        wanted = _needed([step for _, step in backward], ("dw", "db"))
        backward = [(phase, step) for phase, step in backward if step.result in wanted]
    return LayerTasks(_tasks(forward, times), _tasks(sorted(backward, key=_place), times))


def _tasks(steps: Sequence[tuple[Phase, Step]], times: Mapping[str, int]) -> tuple[Task, ...]:
    """Tasks of the steps that take time."""
    return tuple(Task(s.result, _kind(phase, s), times[s.result]) for phase, s in steps if times[s.result])


def _kind(phase: Phase, step: Step) -> TaskKind:
    match step:
        case Compute():
            return "compute"
        case Convert(kind="exchange") if step.type.has_window:
            return "halo"
        case Convert():
            return "reduce" if phase == "backward_filter" and step.type.tensor in ("w", "bias") else "transfer"


def _place(named: tuple[Phase, Step]) -> int:
    """Conversions of what is read; dw and its reduction; dx and its conversions."""
    phase, step = named
    made = "w" if phase == "backward_filter" else "x"
    if isinstance(step, Convert) and step.type.tensor not in (made, "bias"):
        return 0
    return 1 if phase == "backward_filter" else 2


def _needed(steps: Sequence[Step], results: Sequence[str]) -> set[str]:
    wanted = set(results)
    for step in reversed(steps):
        if step.result in wanted:
            wanted |= set(reads(step))
    return wanted


def network_time(layers: Sequence[LayerTasks], overlap: Overlap | None = None) -> NetworkTime:
    """One training step over these layers, in the order of forward."""
    overlap = overlap or Overlap()
    forward = _Clock(overlap).run(t for layer in layers for t in layer.forward)
    backward = _Clock(overlap).run(t for layer in reversed(layers) for t in layer.backward)
    exposed = backward.waiting
    return NetworkTime(
        forward_ps=forward.now,
        backward_ps=backward.now + exposed,
        compute_ps=forward.computed + backward.computed,
        transfers_ps=forward.now - forward.computed + backward.now - backward.computed,
        reductions_ps=backward.reduced,
        exposed_ps=exposed,
    )


@dataclass
class _Clock:
    """Runs tasks in order: `waiting` is what is left of the reductions that have been started."""

    overlap: Overlap
    now: int = 0
    computed: int = 0
    reduced: int = 0
    waiting: int = 0
    halo: int = 0

    def run(self, tasks: Iterator[Task]) -> _Clock:
        for task in tasks:
            if task.kind == "reduce":
                self.reduced += task.time_ps
                self.waiting += task.time_ps
            elif task.kind == "halo" and self.overlap.halos:
                self.halo += task.time_ps
            elif task.kind == "compute":
                self._advance(task.time_ps, computes=True)
                self._advance(max(0, self.halo - task.time_ps), computes=False)
                self.computed += task.time_ps
                self.halo = 0
            else:
                self._advance(task.time_ps, computes=False)
        self._advance(self.halo, computes=False)
        return self

    def _advance(self, time_ps: int, computes: bool) -> None:
        self.now += time_ps
        hides = self.overlap.reductions == "everything" or (computes and self.overlap.reductions == "compute")
        if hides:
            self.waiting = max(0, self.waiting - time_ps)


def beside(tasks: LayerTasks, forward: Sequence[Task] = (), backward: Sequence[Task] = ()) -> LayerTasks:
    """A layer with tasks besides: what follows it in forward (normalisation, a redistribution) and precedes it in
    backward."""
    return replace(tasks, forward=(*tasks.forward, *forward), backward=(*backward, *tasks.backward))
