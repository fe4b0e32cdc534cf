"""A bench from beginning to end, on one screen: ways in turn, marks of a step, collectives alone, a timeline beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from convgen.bench.alone import Call, Nothing
from convgen.bench.correct import Corrected, corrections
from convgen.bench.marks import Clock, Mark, key_of, sums
from convgen.bench.rounds import Took, calls_in_turn, interleaved, marked, parts, run_once, took
from convgen.bench.ways import DDP, MODULE, Way, module_way, package_way
from convgen.calibrate.team import TIMEOUT_S, Team
from convgen.cost.machine import Machine
from convgen.cost.measured_steps import Seconds
from convgen.cost.timeline import Timeline, simulate
from convgen.network_compiler import CompiledNetwork
from convgen.packages import load_package, runtime_of
from convgen.program.network import Program

STEP, PLAIN, COMPUTING = "as compiled", "every collective waited for", "without collectives"
MOVING = "collectives alone"
SKIPS = ("collectives", "compute", "overlap")
Key = tuple[str, str, str]  # phase, row or collective, name
Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        against: other compiled networks to run beside it, by name, with tensors; `torchs`: torch's own, ddp or module.
    """

    compiled: CompiledNetwork
    tensors: Mapping[str, Tensor]
    of_inputs: bool = False
    against: Mapping[str, tuple[CompiledNetwork, Mapping[str, Tensor]]] = field(default_factory=dict[str, Any])
    torchs: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.compiled.program.grid.ranks

    @property
    def name(self) -> str:
        return f"{self.compiled.graph.name} on {self.compiled.program.grid}"


@dataclass(frozen=True)
class Effort:
    """
    Attributes:
        rounds: how many rounds count, after `warm` that don't.
        marked: how many further rounds time every step of the list.
    """

    rounds: int = 15
    warm: int = 3
    marked: int = 5


@dataclass(frozen=True)
class Alone:
    """A collective of the step by itself.

    Attributes:
        sent_bytes: by the rank that sends most; `total_bytes`: by all ranks.
        modelled_s: seconds by the model; None without a machine.
    """

    step: str
    phase: str
    kind: str
    sent_bytes: int
    total_bytes: int
    took: Took
    modelled_s: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.sent_bytes / self.took.median if self.took.median else 0.0


@dataclass(frozen=True)
class Beside:
    """Seconds of a row, or seconds for which a collective held ranks up: simulated beside measured."""

    phase: str
    what: str
    name: str
    simulated: float
    measured: float

    @property
    def off(self) -> float:
        return self.simulated - self.measured


@dataclass(frozen=True)
class Benched:
    """What was measured of a subject.

    Attributes:
        ways: seconds by way and part of a step.
        simulated: by way, seconds of forward and of the step; empty without a machine.
        marks: every rank's marks of one round, that of median length.
        corrected: steps that the machine has wrong, as they were measured.
    """

    subject: Subject
    device: str
    rounds: int
    ways: Mapping[str, Mapping[str, Took]]
    simulated: Mapping[str, tuple[float, float]]
    timeline: Timeline | None
    alone: tuple[Alone, ...]
    beside: tuple[Beside, ...]
    marks: tuple[tuple[Mark, ...], ...]
    corrected: tuple[Corrected, ...] = ()


def bench(
    team: Team,
    subject: Subject,
    folder: Path,
    machine: Machine | None = None,
    effort: Effort = Effort(),
    skip: Sequence[str] = (),
    say: Say = lambda _: None,
) -> Benched:
    """Measure on all ranks; each has the same result.

    Args:
        folder: this rank's own, in which packages are written.
        machine: on which the same step is simulated; None: no simulation.
        skip: what further ways leave out, each one of `SKIPS`, beside the whole step.
    Raises:
        InputError: torch's DDP can't share the samples.
    """
    clock = Clock(team.device)
    say(f"{subject.name}: packages")
    ways = _ways(team, subject, folder, skip)
    nothing, silent = _on_nothing(team, subject, folder / "step")
    if "collectives" in skip:
        ways[COMPUTING] = silent
    calls = _calls(team, clock, silent, nothing)
    runs = _moving(team, folder / "step", calls)
    if "compute" in skip:
        ways[MOVING] = _in_order(calls, runs, is_here=silent.is_here)
    say(f"{subject.name}: {effort.rounds} rounds of {', '.join(ways)}")
    seconds = interleaved(team, clock, ways, effort.rounds, effort.warm)
    say(f"{subject.name}: every step, every collective")
    rounds = marked(team, clock, ways[STEP], effort.marked)
    timelines = timelines_of(subject, machine, ways)
    alone = _alone(team, clock, subject, calls, runs, effort, timelines.get(STEP))
    every = team.gather(rounds)
    step = timelines.get(STEP)
    return Benched(
        subject,
        team.device.type,
        effort.rounds,
        {name: parts(one) for name, one in seconds.items()},
        {name: (one.forward_s, one.end_s) for name, one in timelines.items()},
        step,
        alone,
        () if step is None else tuple(beside(step, every)),
        tuple(tuple(_middle(one)) for one in every if one),
        () if machine is None else tuple(corrected_of(subject, machine, every, alone)),
    )


def corrected_of(
    subject: Subject, machine: Machine, every: Sequence[Sequence[Sequence[Mark]]], alone: Sequence[Alone]
) -> list[Corrected]:
    """Steps that the machine's model has wrong."""
    took = {(one.phase, one.step): Seconds(one.took.median, one.took.spread) for one in alone if one.took.median}
    compiled = subject.compiled
    return corrections(compiled.program, machine, compiled.dtype, every, took, of_inputs=subject.of_inputs)


def step_corrections(
    team: Team, way: Way, subject: Subject, folder: Path, machine: Machine, effort: Effort
) -> list[Corrected]:
    """Steps that the machine has wrong, of a package that has run: every step is timed, and every collective alone.

    Args:
        folder: the package's.
    """
    clock = Clock(team.device)
    nothing, silent = _on_nothing(team, subject, folder)
    calls = _calls(team, clock, silent, nothing)
    every = team.gather(marked(team, clock, way, effort.marked))
    alone = _alone(team, clock, subject, calls, _moving(team, folder, calls), effort, None)
    return corrected_of(subject, machine, every, alone)


def _ways(team: Team, subject: Subject, folder: Path, skip: Sequence[str]) -> dict[str, Way]:
    def way(name: str, compiled: CompiledNetwork, program: Program, tensors: Mapping[str, Tensor], to: str) -> Way:
        at = folder / to
        return package_way(name, compiled, program, tensors, at, team.device, team.rank, of_inputs=subject.of_inputs)

    compiled, tensors = subject.compiled, subject.tensors
    ways = {STEP: way(STEP, compiled, compiled.program, tensors, "step")}
    if "overlap" in skip:
        ways[PLAIN] = way(PLAIN, compiled, compiled.plain, tensors, "plain")
    for i, (name, (other, own)) in enumerate(subject.against.items()):
        ways[name] = way(name, other, other.program, own, f"other{i}")
    for what in subject.torchs:
        ddp = what == "ddp"
        ways[DDP if ddp else MODULE] = module_way(compiled, tensors, team.device, team.size, ddp=ddp)
    return ways


def _moving(team: Team, package: Path, calls: Sequence[Call]) -> dict[int, Callable[[], object]]:
    """A function that runs each call, by the call's number."""
    if not calls:
        return {}
    end = runtime_of(load_package(package)).TorchTransport(timedelta(seconds=TIMEOUT_S), team.device.type)

    def run_of(call: Call) -> Callable[[], object]:
        return team.communicate(lambda: getattr(end, call.kind)(call.tensor, call.splits, call.group))

    return {i: run_of(call) for i, call in enumerate(calls)}


def _in_order(calls: Sequence[Call], runs: Mapping[int, Callable[[], object]], *, is_here: bool) -> Way:
    """A way that runs a step's collectives, one after the other."""

    def run(phase: str) -> None:
        for i, call in enumerate(calls):
            if call.phase == phase:
                runs[i]()

    return Way(MOVING, lambda: run("forward"), lambda _: run("backward"), is_here=is_here)


def _on_nothing(team: Team, subject: Subject, folder: Path) -> tuple[Nothing, Way]:
    nothing, compiled = Nothing(team.rank, team.size), subject.compiled
    way = package_way(
        COMPUTING, compiled, compiled.program, subject.tensors, folder, team.device, team.rank,
        of_inputs=subject.of_inputs, transport=lambda _: nothing,
    )  # fmt: skip
    return nothing, way


def _calls(team: Team, clock: Clock, way: Way, nothing: Nothing) -> list[Call]:
    """The collectives of a step on this rank, in order."""
    recorder = way.recorder
    run_once(team, clock, way)  # the first step also sets up what later ones keep
    nothing.calls.clear()
    if recorder is None:
        team.barrier()
        team.barrier()
        return []
    nothing.marked = lambda: (recorder.current, recorder.phase)
    team.barrier()
    with recorder.at_work():
        recorder.phase = "forward"
        made = way.forward()
        recorder.phase = "backward"
        way.backward(made)
    recorder.taken(clock.now())
    calls = list(nothing.calls)
    nothing.marked = lambda: ("", "")
    team.barrier()
    return calls


def timelines_of(subject: Subject, machine: Machine | None, ways: Mapping[str, Way]) -> dict[str, Timeline]:
    """By way, the step simulated on a machine; nothing without one."""
    if machine is None:
        return {}
    compiled = subject.compiled
    programs = {STEP: (compiled.program, compiled.dtype), PLAIN: (compiled.plain, compiled.dtype)}
    programs |= {name: (other.program, other.dtype) for name, (other, _) in subject.against.items()}
    return {
        name: simulate(program, machine, dtype, of_inputs=subject.of_inputs)
        for name, (program, dtype) in programs.items()
        if name in ways
    }


def _alone(
    team: Team,
    clock: Clock,
    subject: Subject,
    calls: Sequence[Call],
    runs: Mapping[int, Callable[[], object]],
    effort: Effort,
    step: Timeline | None,
) -> tuple[Alone, ...]:
    """Seconds of each collective after a barrier. A rank that has no part in one takes part in its barrier alone."""
    mine = _numbered(calls)
    known = team.gather({key: calls[i].sent_bytes for key, i in mine.items()})
    keys = list(dict.fromkeys(key for one in known for key in one))
    if not keys:
        return ()
    each = [runs[mine[key]] if key in mine else (lambda: None) for key in keys]
    seconds = calls_in_turn(team, clock, each, effort.rounds, effort.warm)
    modelled = {} if step is None else {one.name: one.seconds for one in step.travelled}
    found: list[Alone] = []
    for i, (name, phase, kind, number) in enumerate(keys):
        sent = [one.get((name, phase, kind, number), 0) for one in known]
        of_ranks = took(seconds[: subject.ranks, :, i])
        found.append(Alone(name, phase, kind, max(sent), sum(sent), of_ranks, modelled.get(name)))
    return tuple(found)


def _numbered(calls: Sequence[Call]) -> dict[tuple[str, str, str, int], int]:
    """Numbers of calls by (step, phase, kind, place among such calls): some ranks lack some calls."""
    found: dict[tuple[str, str, str, int], int] = {}
    for i, call in enumerate(calls):
        number = 0
        while (key := (call.step, call.phase, call.kind, number)) in found:
            number += 1
        found[key] = i
    return found


def beside(step: Timeline, every: Sequence[Sequence[Sequence[Mark]]]) -> list[Beside]:
    """Rows and collectives of a step, those that are farthest off first.

    A row's seconds are those on the slowest rank. A collective's are those on the rank that stands still least: the
    other ranks also wait for this rank.

    Args:
        every: marks by rank and round.
    """
    measured: dict[Key, list[float]] = {}
    for rounds in every:
        laps = [sums(marks) for marks in rounds]
        for key in {k for lap in laps for k in lap}:
            measured.setdefault(key, []).append(median(lap.get(key, 0.0) for lap in laps))
    simulated: dict[Key, float] = {}
    rows: dict[Key, dict[int, float]] = {}
    for span in step.spans:
        if span.lane == "compute" and not span.name.endswith(" (processor)"):
            phase = "forward" if span.end_s <= step.forward_s * (1 + 1e-9) else "backward"
            of_rank = rows.setdefault(key_of("local", span.name, phase), {})
            of_rank[span.rank] = of_rank.get(span.rank, 0.0) + span.seconds
    simulated |= {key: max(by_rank.values()) for key, by_rank in rows.items()}
    for one in step.travelled:
        key = key_of("move", one.name, one.phase)
        simulated[key] = simulated.get(key, 0.0) + one.exposed_s
    found = [
        Beside(*key, simulated.get(key, 0.0), (max if key[1] == "row" else min)(measured.get(key, [0.0])))
        for key in {**simulated, **measured}
    ]
    return sorted(found, key=lambda one: (-abs(one.off), one.name, one.phase))


def _middle(rounds: Sequence[Sequence[Mark]]) -> Sequence[Mark]:
    """The round of median length."""
    return sorted(rounds, key=lambda marks: max((m.end_s for m in marks), default=0.0))[len(rounds) // 2]


def weak_batch(batch: int, ranks: int, most: int) -> int | None:
    """Samples for `ranks` ranks, where `most` ranks have `batch`; None where that is no whole number."""
    share, rest = divmod(batch * ranks, most)
    return None if rest or not share else share
