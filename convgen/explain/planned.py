"""A network's plan, as text and as plain data: a line for each layer, sums, and the other candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import program_cost
from convgen.cost.timeline import Timeline, simulate
from convgen.cost.uncertainty import Estimate, estimate, plus_minus
from convgen.explain.memory import memory_json, memory_line
from convgen.explain.planned_layers import Layer, layers_of
from convgen.network_compiler import CompiledNetwork, on_one_rank, sample_parallelism
from convgen.plan.collection import without_collection
from convgen.plan.fewer import IDLE, idle_line
from convgen.plan.program.bound import Bound, bound
from convgen.plan.program.by_timeline import overlapped_s
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import NetworkPlan
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.program.rows import Stored
from convgen.spec.network_plan import entries
from convgen.spec.text import aligned, gib, number_of, times_as

MIB = 1 << 20
HEAD = ("layer", "x", "w", "y", "roles", "ranks", "compute", "comm.", "MB sent", "MiB", "runner-up")
NUMBERS = range(5, 10)
NAMED = 4  # how many layers with other groups are named


@dataclass(frozen=True)
class WhatIf:
    """Says that a plan is of a changed network, in which some convolutions have groups (spec/graph_grouped.py).

    Attributes:
        modules: the modules of these convolutions.
        seconds: those of a step of the unchanged network's plan.
    """

    groups: int
    modules: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, with the network and the machine that it is for.

    Attributes:
        nodes: by module of the source, the name and kind of a layer, if the network's file says them.
    """

    compiled: CompiledNetwork
    found: NetworkPlan
    setting: Setting
    nodes: Mapping[str, tuple[str, str]]
    what_if: WhatIf | None = None

    @property
    def program(self) -> Program:
        return self.found.program

    @property
    def dtype(self) -> str:
        return self.setting.dtype or self.compiled.dtype

    @property
    def ranks(self) -> int:
        """The number of ranks, whether they work or not."""
        return self.found.ranks or self.program.grid.ranks

    @cached_property
    def layers(self) -> list[Layer]:
        return layers_of(self.found, self.setting.machine, self.dtype)

    def name(self, layer: Layer) -> str:
        return self.nodes.get(layer.name, (layer.name, layer.kind))[0]

    def kind(self, layer: Layer) -> str:
        return self.nodes.get(layer.name, (layer.name, layer.kind))[1]

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of a step, with what travels while ranks compute."""
        return simulate(self.compiled.program, self.setting.machine, self.dtype, alike=True)

    @cached_property
    def estimate(self) -> Estimate | None:
        """The seconds of that step, and how far they may be off; None if the machine doesn't know, or if its steps hide
        sums of gradients."""
        machine = self.setting.machine
        return None if machine.hides_gradients else estimate(self.compiled.program, machine, self.dtype)

    @cached_property
    def alike(self) -> list[str]:
        """The names of other candidates that the model can't tell from this one."""
        own, machine = self.estimate, self.setting.machine
        if own is None:
            return []
        others = {"one rank alone": on_one_rank(self.compiled), "sample parallelism alone": self.sample}
        found: list[str] = []
        for name, program in others.items():
            if program is not None and program != self.program:
                other = estimate(overlapped(program, machine, self.dtype), machine, self.dtype)
                found += [name] * (other is not None and own.is_alike(other))
        near = [grid for grid, seconds in self.found.tried if abs(seconds - self.found.seconds) <= own.deviation]
        return [*found, *map(str, near)]

    @cached_property
    def bound(self) -> Bound | None:
        """How far the plan is from the best at most; None where no bound is known (plan/program/bound.py)."""
        return bound(self.found, self.setting.machine, self.dtype)

    @cached_property
    def sample(self) -> Program | None:
        return sample_parallelism(self.compiled, self.ranks)

    def seconds_of(self, program: Program) -> float:
        return program_cost(program, self.setting.machine, self.dtype).seconds

    def overlapped_s(self, program: Program) -> float:
        """Seconds of a step of it with what travels meanwhile."""
        return overlapped_s(program, self.setting.machine, self.dtype)

    def sample_json(self) -> dict[str, Any]:
        """The seconds of samples split alone, also with what travels meanwhile, as plain data."""
        if self.sample is None:
            why = f"{_ranks(self)}, {self.compiled.graph.batch} samples"
            return {"seconds": None, "overlapped_seconds": None, "why_not": why}
        meanwhile = None if self.setting.machine.hides_gradients else self.overlapped_s(self.sample)
        return {"seconds": self.seconds_of(self.sample), "overlapped_seconds": meanwhile, "why_not": None}


@without_collection()
def planned_text(plan: Planned) -> str:
    """The text: a line for each layer with products, and for each other layer that redistributes activations."""
    rows = [HEAD, *(_row(plan, one) for one in plan.layers if one.product is not None or one.redistributes)]
    return "\n".join([*aligned(rows, NUMBERS), "", *_summary(plan)])


def _row(plan: Planned, one: Layer) -> tuple[str, ...]:
    x = "; ".join(dict.fromkeys(map(entries, one.reads.values())))
    return (
        plan.name(one),
        x,
        "" if one.w is None else entries(one.w),
        "" if one.stored is None else entries(one.stored),
        f"({plan.kind(one)})" if one.roles is None else one.roles,
        f"{one.working}",
        _milliseconds(one.compute_ps),
        _milliseconds(one.moving_ps),
        f"{one.sent_bytes / 1e6:.2f}",
        f"{one.kept_bytes / MIB:.1f}",
        "" if one.runner_up is None else f"{one.runner_up[0]} +{one.runner_up[1] * 1e3:.3f} ms",
    )


def _summary(plan: Planned) -> Iterator[str]:
    program, machine, layers = plan.program, plan.setting.machine, plan.layers
    products = [one for one in layers if one.product is not None]
    rest = [one for one in layers if one.product is None]
    yield (
        f"{program.name}: {number_of(len(products), 'layer')}, {number_of(plan.compiled.graph.batch, 'sample')}, "
        f"{_ranks(plan)} of {machine.name} as {program.grid}"
        + f", under autocast of {program.autocast}"
        * bool(program.autocast)
    )
    hidden = ", sums of parameters' gradients hidden" if machine.hides_gradients else ""
    yield f"step    {plan.found.seconds * 1e3:.3f} ms: {_sums(layers)}; modelled, steps one after the other{hidden}"
    if not machine.hides_gradients:
        yield from _meanwhile(plan)
    if plan.bound is not None:
        yield f"bound   {_bound(plan.bound)}"
    if plan.what_if is not None:
        yield f"groups  {_what_if(plan, plan.what_if)}"
    yield f"others  {number_of(len(rest), 'other layer')}: {_sums(rest)}"
    yield f"sent    {sum(one.sent_bytes for one in layers) / 1e6:.2f} MB a rank"
    yield _memory(plan)
    yield f"one     rank alone: {_beside(plan, on_one_rank(plan.compiled))}"
    if plan.sample is None:
        yield f"sample  parallelism alone can't be: {plan.compiled.graph.batch} samples are fewer than {_ranks(plan)}"
    else:
        yield f"sample  parallelism alone: {_beside(plan, plan.sample)}"
    if plan.found.heuristic is not None:
        paths = plan.found.heuristic() / PICOSECONDS
        more = 100 * (times_as(paths, plan.found.seconds) - 1)
        yield f"paths   longest paths one after the other ([SP] V-C): {paths * 1e3:.3f} ms, {more:.2f} % more"
    if program.again:
        yield f"again   in backward: {', '.join(s.path for s in program.again)}"
    if IDLE in program.grid.sizes or program.grid.ranks < plan.ranks:
        yield f"ranks   {idle_line(program.grid, plan.ranks)}"
    for grid, seconds in plan.found.tried:
        yield f"scouted {grid}: {seconds * 1e3:.3f} ms with few candidates"
    if machine.timed is not None:
        yield _measured(plan)
    if machine.steps:
        steps = number_of(sum(len(one.steps) for one in layers), "step")
        yield f"known   {_known(plan)} of {steps} as they were measured"


def _ranks(plan: Planned) -> str:
    return number_of(plan.ranks, "rank")


def _sums(layers: Sequence[Layer]) -> str:
    compute, moving = sum(one.compute_ps for one in layers), sum(one.moving_ps for one in layers)
    return f"compute {_milliseconds(compute)}, communication {_milliseconds(moving)}"


def _beside(plan: Planned, other: Program) -> str:
    """Another program's step, by what the plan was chosen by."""
    seconds = plan.seconds_of(other) if plan.found.step is None else plan.overlapped_s(other)
    return f"{seconds * 1e3:.3f} ms, {times_as(seconds, plan.found.step_s):.2f} times as long"


def _meanwhile(plan: Planned) -> Iterator[str]:
    """The lines about the step with what travels while ranks compute."""
    found = plan.timeline
    hidden, moving = found.moving_s * found.hidden * 1e3, found.moving_s * 1e3
    yield f"overlap {found.end_s * 1e3:.3f} ms with what travels meanwhile: {hidden:.3f} of {moving:.3f} ms hidden"
    if plan.estimate is not None:
        alike = f"alike with {', '.join(plan.alike)}" if plan.alike else "alike with none of the others here"
        yield f"  sure    {plus_minus(plan.estimate)}, one standard deviation; {alike}"
    if plan.found.step is not None:
        took, sums = (f"{seconds * 1e3:.3f} ms" for seconds in plan.found.step)
        yield f"  chosen by that time: {took}; the plan of the least sum: {sums}"


def _bound(known: Bound) -> str:
    said = f"at most {known.gap:.2%} from the best of its grid's candidates, none of which is below "
    said += f"{known.candidates_s * 1e3:.3f} ms"
    if known.anywhere_s is None:
        return said
    return f"{said}; {known.gap_anywhere:.2%} from any layout, which computes for {known.anywhere_s * 1e3:.3f} ms"


def _what_if(plan: Planned, one: WhatIf) -> str:
    names = [plan.nodes.get(module, (module, ""))[0] for module in one.modules]
    more = f" and {number_of(len(names) - NAMED, 'other')}" * (len(names) > NAMED)
    return (
        f"{one.groups}, as if, of {', '.join(names[:NAMED])}{more}; a step of the network as it is takes "
        f"{one.seconds * 1e3:.3f} ms, {times_as(one.seconds, plan.found.step_s):.2f} times as long"
    )


def _memory(plan: Planned) -> str:
    room, taken = plan.setting.bounded, plan.found.memory_bytes
    of = f", of {gib(room.memory_bytes)} GiB that it may take" if room.memory_bytes is not None else ""
    if plan.found.walk is None:
        return f"memory  {gib(taken)} GiB on the fullest rank{of}; every output and an error signal stay"
    return f"{memory_line(memory_json(plan.found.walk.memory()), room.states)}{of}"


def _measured(plan: Planned) -> str:
    machine = plan.setting.machine
    steps = [s for one in plan.layers for s in one.steps if s.kind.startswith("conv_")]
    known, peak = sum(s.measured for s in steps), dict(machine.peak_flops)[plan.dtype]
    in_tiles = f", in tiles on {machine.tiles.processors} processors" if machine.tiles and not machine.probes else ""
    return (
        f"local   {known} of {number_of(len(steps), 'local convolution')} measured; the others by the roofline at "
        f"{machine.efficiency:.0%} of {peak / 1e9:.0f} GFLOP/s{in_tiles}"
    )


def _known(plan: Planned) -> int:
    """How many steps take seconds that were measured of the same work."""
    return sum(s.measured > 0 for one in plan.layers for s in one.steps)


def _milliseconds(time_ps: int) -> str:
    return f"{time_ps / PICOSECONDS * 1e3:.3f} ms"


@without_collection()
def planned_json(plan: Planned) -> dict[str, Any]:
    """The plan as plain data."""
    found, program, machine = plan.found, plan.program, plan.setting.machine
    layers = plan.layers
    by_rows = sum(one.kept_bytes for one in layers)
    return {
        "network": program.name,
        "machine": machine.name,
        "ranks": plan.ranks,
        "grid": program.grid.plain,
        "working_ranks": program.grid.ranks // program.grid.sizes.get(IDLE, 1),
        "samples": plan.compiled.graph.batch,
        "seconds": found.seconds,
        "overlapped_seconds": None if machine.hides_gradients else plan.timeline.end_s,
        "deviation_seconds": None if plan.estimate is None else plan.estimate.deviation,
        "alike": plan.alike,
        "what_if": None if plan.what_if is None else _what_if_json(plan, plan.what_if),
        "bound": None if plan.bound is None else _bound_json(plan.bound),
        "compute_seconds": sum(one.compute_ps for one in layers) / PICOSECONDS,
        "communication_seconds": sum(one.moving_ps for one in layers) / PICOSECONDS,
        "sent_bytes": sum(one.sent_bytes for one in layers),
        "memory_bytes": found.memory_bytes,
        "other_memory_bytes": found.memory_bytes - by_rows,
        "memory": None if found.walk is None else memory_json(found.walk.memory()),
        "memory_budget_bytes": plan.setting.bounded.memory_bytes,
        "keep": plan.setting.room.keep,
        "one_rank_seconds": plan.seconds_of(on_one_rank(plan.compiled)),
        "sample_parallelism": plan.sample_json(),
        "heuristic_seconds": None if found.heuristic is None else found.heuristic() / PICOSECONDS,
        "again": [s.path for s in program.again],
        "measured_steps": _known(plan) if machine.steps else 0,
        "tried": [{"grid": grid.plain, "seconds": seconds} for grid, seconds in found.tried],
        "nodes": [_layer_json(plan, one) for one in layers],
    }


def _bound_json(known: Bound) -> dict[str, float | None]:
    return {
        "candidates_seconds": known.candidates_s,
        "gap": known.gap,
        "anywhere_seconds": known.anywhere_s,
        "gap_anywhere": known.gap_anywhere,
    }


def _what_if_json(plan: Planned, one: WhatIf) -> dict[str, Any]:
    names = [plan.nodes.get(module, (module, ""))[0] for module in one.modules]
    return {"groups": one.groups, "layers": names, "ungrouped_seconds": one.seconds}


def _layer_json(plan: Planned, one: Layer) -> dict[str, Any]:
    return {
        "name": plan.name(one),
        "kind": plan.kind(one),
        "makes": one.makes,
        "reads": [_entries(stored) for stored in one.reads.values()],
        "stored": None if one.stored is None else _entries(one.stored),
        "w": None if one.w is None else _entries(one.w),
        "roles": one.roles,
        "working_ranks": one.working,
        "compute_seconds": one.compute_ps / PICOSECONDS,
        "communication_seconds": one.moving_ps / PICOSECONDS,
        "sent_bytes": one.sent_bytes,
        "memory_bytes": one.kept_bytes,
        "runner_up": None if one.runner_up is None else {"roles": one.runner_up[0], "more_seconds": one.runner_up[1]},
        "steps": [
            {
                "phase": s.phase,
                "kind": s.kind,
                "what": s.what,
                "seconds": s.seconds,
                "sent_bytes": s.sent_bytes,
                "flops": s.flops,
                "measured": s.measured > 0,
            }
            for s in one.steps
        ],
    }


def _entries(stored: Stored) -> list[list[str]]:
    return [list(axes) for axes in stored]
