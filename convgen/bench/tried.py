"""The best layouts by the model, run in turn for a while: which of them is fastest here, and how sure that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from convgen.algebra.grid import Grid
from convgen.bench.correct import Corrected
from convgen.bench.marks import Clock
from convgen.bench.rounds import Took, interleaved, took
from convgen.bench.run import Effort, Subject, step_corrections
from convgen.bench.ways import package_way
from convgen.calibrate.team import Team
from convgen.cost.machine import Machine
from convgen.cost.timeline import simulate
from convgen.cost.uncertainty import Estimate, estimate, plus_minus
from convgen.errors import InputError
from convgen.explain.planned_scaling import memory_bytes
from convgen.network_compiler import CompiledNetwork, by_samples, compile_network, compile_plan, plan_graph
from convgen.plan.program.by_timeline import with_links
from convgen.plan.program.ranks import grids_of
from convgen.plan.program.written import plan_of
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.graph import Graph
from convgen.spec.target import Target
from convgen.spec.text import aligned, number_of

EFFORT = Effort(rounds=7, warm=2, marked=7)  # for each candidate's steps and collectives
WARM, LEAST, MOST = 3, 5, 300  # rounds: that don't count, and the fewest and most that do
LINKS = (0.25, 4.0)  # plans for links so many times as fast are layouts that move less, or more
DRAWN = 2000  # resamples of the rounds
LETTERS = ("N", "D", "H", "W", "C", "F")


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Attributes:
        name: how it was found.
        seconds: modelled seconds of a step, with what travels while ranks compute.
        estimate: these seconds, and how far they may be off; None where the machine doesn't know.
    """

    name: str
    compiled: CompiledNetwork
    seconds: float
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Tried:
    """A candidate that has been run.

    Attributes:
        fastest: the share of resamples of the rounds in which its median is the least.
    """

    candidate: Candidate
    took: Took
    fastest: float


def candidates(
    graph: Graph, ranks: int, setting: Setting, target: Target, count: int, tell: Callable[[str], None] = lambda _: None
) -> list[Candidate]:
    """At most `count` distinct layouts, those that are fastest by the model, the fastest first.

    Raises:
        InputError: nothing that is searched fits the memory, or the ranks can't be used.
    """
    machine, room, found = setting.machine, setting.bounded, list[Candidate]()
    dtype = setting.dtype
    for name, program in _programs(graph, ranks, setting, tell):
        if room.memory_bytes is not None and memory_bytes(program, room) > room.memory_bytes:
            continue
        compiled = compile_plan(graph, plan_of(program, ""), overlap=machine, target=target)
        if any(compiled.plain == other.compiled.plain for other in found):
            continue
        step = simulate(compiled.program, machine, dtype or compiled.dtype, alike=True).end_s
        found.append(Candidate(name, compiled, step, estimate(compiled.program, machine, dtype or compiled.dtype)))
    return sorted(found, key=lambda one: one.seconds)[:count]


def _programs(graph: Graph, ranks: int, setting: Setting, tell: Callable[[str], None]) -> Iterator[tuple[str, Program]]:
    """Programs to try, by name: the plan, samples alone, plans of grids (also for other links), each letter alone."""
    tell(f"planning {number_of(ranks, 'rank')}")
    compiled, plan = plan_graph(graph, ranks, setting)
    yield "plan", plan.program
    if ranks <= graph.batch:
        yield "samples", by_samples(compiled, ranks)
    for grid in grids_of(ranks, setting.machine):
        for times in (1.0, *LINKS):
            tell(f"planning {grid}, links {times:g} times as fast")
            machine = setting.machine if times == 1 else with_links(setting.machine, times)
            with suppress(InputError):
                said = f"{grid}" + f", links {times:g} x" * (times != 1)
                yield said, plan_graph(graph, ranks, replace(setting, machine=machine), grid)[1].program
    for letter in LETTERS:
        with suppress(InputError):
            grid = Grid(((letter, ranks),))
            one = compile_network(
                graph, grid, machine=setting.machine, statistics=setting.statistics,
                reduce_dtype=setting.reduce_dtype, autocast=setting.autocast, passes=(),
            )  # fmt: skip
            if not one.idle_axes:
                yield f"{letter}={ranks}", one.plain


def run_in_turn(
    team: Team,
    tried: Sequence[Candidate],
    tensors: Mapping[str, Tensor],
    folder: Path,
    seconds: float,
    machine: Machine | None = None,
) -> tuple[list[Tried], list[Corrected]]:
    """Run candidates in turn, each for about `seconds`; results, the fastest first, are the same on all ranks.

    Args:
        machine: corrections are of this machine's model; None: there are none.
    """
    clock = Clock(team.device)
    ways = {
        f"{i}": package_way(
            one.name, one.compiled, one.compiled.program, tensors, folder / f"try{i}", team.device, team.rank
        )
        for i, one in enumerate(tried)
    }
    start = time.perf_counter()
    interleaved(team, clock, ways, 1, WARM)
    round_s = (time.perf_counter() - start) / (WARM + 1)
    rounds = max(LEAST, min(MOST, int(seconds * len(tried) / round_s)))
    found = interleaved(team, clock, ways, int(team.gather(rounds)[0]), 0)
    steps = {name: one.sum(axis=-1) for name, one in found.items()}  # [ranks, rounds]
    shares = sure([steps[name].max(axis=0) for name in ways])
    done = [Tried(one, took(steps[f"{i}"]), shares[i]) for i, one in enumerate(tried)]
    corrected: list[Corrected] = []
    for i, one in enumerate(tried if machine is not None else ()):
        assert machine is not None
        subject = Subject(one.compiled, tensors)
        corrected += step_corrections(team, ways[f"{i}"], subject, folder / f"try{i}", machine, EFFORT)
    return sorted(done, key=lambda one: one.took.median), corrected


def sure(rounds: Sequence[NDArray[np.float64]]) -> list[float]:
    """The share of resamples in which each has the least median; rounds are drawn with replacement (Efron's bootstrap).

    Args:
        rounds: each one's seconds on the slowest rank by round; a resample takes the same rounds of all.
    """
    seconds = np.stack(rounds)
    draw = np.random.default_rng(0)
    picked = draw.integers(0, seconds.shape[1], (DRAWN, seconds.shape[1]))
    medians = np.median(seconds[:, picked], axis=2)  # [candidates, resamples]
    least = np.bincount(medians.argmin(axis=0), minlength=len(rounds))
    return [float(n) / DRAWN for n in least]


def tried_text(found: Sequence[Tried], ranks: int, machine: str) -> str:
    """A line for each layout, the fastest first, and how sure the measurement and the model are."""
    best = found[0]
    name = best.candidate.compiled.graph.name
    rows: list[tuple[str, ...]] = [("layout", "grid", "modelled ms", "measured ms", "p20 to p80", "ratio", "fastest")]
    for one in found:
        step, modelled = one.took, one.candidate.seconds
        rows.append(
            (
                one.candidate.name,
                f"{one.candidate.compiled.program.grid}",
                f"{modelled * 1e3:.3f}",
                f"{step.median * 1e3:.3f}",
                f"{step.p20 * 1e3:.3f} to {step.p80 * 1e3:.3f}",
                f"{modelled / step.median:.2f}",
                f"{one.fastest:.0%}",
            )
        )
    modelled = min(found, key=lambda one: one.candidate.seconds)
    head = f"{name}: {number_of(len(found), 'layout')} on {number_of(ranks, 'rank')}, modelled on {machine}"
    lines = [head, *aligned(rows, range(2, 7))]
    lines.append(f"fastest {best.candidate.name}: it is so in {best.fastest:.0%} of resamples of the rounds")
    if modelled is not best:
        more = modelled.took.median / best.took.median - 1
        lines.append(f"modelled {modelled.candidate.name}, which takes {more:.1%} longer")
    alike = _alike([one.candidate for one in found])
    if alike is not None:
        lines.append(f"the model {alike}")
    return "\n".join(lines)


def _alike(found: Sequence[Candidate]) -> str | None:
    """Which layouts the model can't tell from its fastest; None where it doesn't know how far it is off."""
    first = min(found, key=lambda one: one.seconds)
    if first.estimate is None:
        return None
    others = [one for one in found if one is not first and one.estimate is not None]
    near = [one.name for one in others if one.estimate is not None and first.estimate.is_alike(one.estimate)]
    with_which = f"alike with {', '.join(near)}" if near else "alike with none of the others"
    return f"says {plus_minus(first.estimate)} of {first.name}, one standard deviation, {with_which}"


def tried_json(found: Sequence[Tried]) -> list[dict[str, Any]]:
    """What was measured of each layout, as plain data."""
    return [
        {
            "layout": one.candidate.name,
            "grid": one.candidate.compiled.program.grid.plain,
            "modelled_s": one.candidate.seconds,
            "deviation_s": None if one.candidate.estimate is None else one.candidate.estimate.deviation,
            "seconds": one.took.median,
            "p20": one.took.p20,
            "p80": one.took.p80,
            "by_rank": [*one.took.by_rank],
            "fastest": one.fastest,
        }
        for one in found
    ]
