"""The best plan of each of several numbers of ranks, beside samples split alone: does it help, and on which grid?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from convgen.algebra.blocks import most_of
from convgen.algebra.grid import Grid
from convgen.compiler import Compiled, compile_layer
from convgen.cost.machine import Machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.cost.uncertainty import estimate, milliseconds
from convgen.explain.planned import Planned
from convgen.explain.planned_scaling import memory_bytes
from convgen.network_compiler import CompiledNetwork, by_samples, compile_network, plan_graph
from convgen.pictures.scaling import Curves, draw_ranks
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import grids_of
from convgen.plan.program.refusal import TooLittleOnRanks
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.graph import Graph
from convgen.spec.layer import Layer
from convgen.spec.text import aligned, gib, number_of, times_as

HEAD = ("ranks", "grid", "split by", "step", "speed-up", "GiB a rank", "samples alone", "GiB a rank", "over plan")
NUMBERS = (0, 3, 4, 5, 6, 7, 8)
SPLITS, LEAST = 2, 0.01  # how many splits are named, and the least share of one

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A step of training on some ranks.

    Attributes:
        seconds: modelled; None if the step can't run, and `why_not` says why.
        memory_bytes: the fullest rank's; if no plan fits, the least that is needed; None if not known.
        fits: whether the ranks have that memory.
        deviation_s: one standard deviation of seconds; None if the machine doesn't know it, or for a layer.
    """

    seconds: float | None
    memory_bytes: int | None
    fits: bool = True
    why_not: str = ""
    deviation_s: float | None = None


@dataclass(frozen=True)
class OnRanks:
    """The plans for one number of ranks.

    Attributes:
        split: by a text such as "N=2 H=2", the share of the products' seconds that is split so, the largest first.
    """

    ranks: int
    grid: Grid | None
    split: tuple[tuple[str, float], ...]
    plan: Step
    sample: Step


@dataclass(frozen=True)
class Help:
    """How much plans help, by number of ranks.

    Attributes:
        what: what is planned, in words; `how`: how a step runs.
        one_s: seconds of a step on one rank, whether it fits there or not.
        budget_bytes: the most that a rank may take; None: any.
        counted: which of a rank's memory is counted, in words.
    """

    name: str
    what: str
    how: str
    machine: str
    batch: int
    one_s: float
    budget_bytes: int | None
    counted: str
    rows: tuple[OnRanks, ...]

    @property
    def fastest(self) -> OnRanks | None:
        """The plan with the shortest step; of equal ones, that with the fewest ranks."""
        fitting = [row for row in self.rows if row.plan.fits and row.plan.seconds is not None]
        return min(fitting, key=lambda row: (row.plan.seconds, row.ranks), default=None)


# ---- Networks ----


def network_help(graph: Graph, setting: Setting, counts: Sequence[int], tell: Tell) -> Help:
    """Plans a network for each number of ranks.

    Raises:
        InputError: ranks can't be used, or an operator can't be run.
    """
    room, rows = setting.bounded, list[OnRanks]()
    planned: dict[int, Planned | TooLittleOnRanks] = {}
    for ranks in counts:
        tell(f"planning {number_of(ranks, 'rank')}")
        try:
            planned[ranks] = Planned(*plan_graph(graph, ranks, setting), setting, {})
        except TooLittleOnRanks as error:
            planned[ranks] = error
    fitting = [one for one in planned.values() if isinstance(one, Planned)]
    base = fitting[0].compiled if fitting else _not_split(graph, setting)
    dtype, machine = setting.dtype or base.dtype, setting.machine

    def took(program: Program) -> tuple[float, float | None]:
        """Seconds of a step, and their standard deviation."""
        if machine.hides_gradients:
            return program_cost(program, machine, dtype).seconds, None
        meanwhile = overlapped(program, machine, dtype)
        known = estimate(meanwhile, machine, dtype)
        if known is None:
            return simulate(meanwhile, machine, dtype, alike=True).end_s, None
        return known.seconds, known.deviation

    def sample(ranks: int) -> Step:
        if graph.batch < ranks:
            return Step(None, None, fits=False, why_not=_too_few(graph.batch, ranks))
        tell(f"splitting samples over {number_of(ranks, 'rank')}")
        program = by_samples(base, ranks)
        taken, (seconds, deviation) = memory_bytes(program, room), took(program)
        fits = room.memory_bytes is None or taken <= room.memory_bytes
        return Step(seconds, taken, fits, deviation_s=deviation)

    for ranks, one in planned.items():
        if isinstance(one, TooLittleOnRanks):
            step = Step(None, one.least_bytes, fits=False, why_not=one.fact)
            rows.append(OnRanks(ranks, None, (), step, sample(ranks)))
            continue
        seconds = one.found.seconds if machine.hides_gradients else one.timeline.end_s
        deviation = None if one.estimate is None else one.estimate.deviation
        step = Step(seconds, one.found.memory_bytes, deviation_s=deviation)
        rows.append(OnRanks(ranks, one.program.grid, _split(one), step, sample(ranks)))
    products = sum(row.bound.operation.is_product for row in base.plain.rows)
    counted = "outputs and error signals of every layer stay" if room.keep == "every" else "what backward reads stays"
    one_s = took(by_samples(base, 1))[0]
    what = number_of(products, "layer")
    how = "sums of gradients hidden" if machine.hides_gradients else "with what travels meanwhile"
    budget = room.memory_bytes
    return Help(base.graph.name, what, how, machine.name, graph.batch, one_s, budget, counted, tuple(rows))


def _not_split(graph: Graph, setting: Setting) -> CompiledNetwork:
    return compile_network(
        graph,
        Grid((("N", 1),)),
        "sample",
        machine=setting.machine,
        statistics=setting.statistics,
        reduce_dtype=setting.reduce_dtype,
        autocast=setting.autocast,
    )


def _split(plan: Planned) -> tuple[tuple[str, float], ...]:
    took, sizes = Counter[str](), plan.program.grid.sizes
    for layer in plan.layers:
        if layer.product is not None:
            counts = ((index, prod(sizes[a] for a in axes)) for index, axes in layer.product.roles)
            took[" ".join(f"{index}={n}" for index, n in counts if n > 1) or "nothing"] += layer.compute_ps
    whole = sum(took.values()) or 1
    return tuple((text, ps / whole) for text, ps in took.most_common())


# ---- Layers ----


def layer_help(layer: Layer, machine: Machine, counts: Sequence[int], budget_bytes: int | None, tell: Tell) -> Help:
    """The best grid and layout of a layer for each number of ranks, whatever the file says of its own.

    A step is forward and the gradients of x and of w, one step after the other, as a layer's module runs.

    Raises:
        InputError: a number of ranks can't be used.
    """
    free = replace(layer, algorithm="auto", distribution=None, roles=(), options=replace(layer.options, kernels=()))
    batch = layer.conv.batch

    def on(grid: Grid, algorithm: str = "auto") -> tuple[Compiled, Step]:
        compiled = compile_layer(replace(free, grid=grid, algorithm=algorithm), machine=machine)
        taken = _blocks_bytes(compiled)
        return compiled, Step(_seconds(compiled), taken, budget_bytes is None or taken <= budget_bytes)

    def best(ranks: int) -> OnRanks:
        tell(f"planning {number_of(ranks, 'rank')}")
        found = [on(grid) for grid in grids_of(ranks, machine)]
        compiled, step = min(found, key=lambda pair: (not pair[1].fits, pair[1].seconds))
        few = batch < ranks
        sample = Step(None, None, fits=False, why_not=_too_few(batch, ranks)) if few else by_sample(ranks)
        roles, sizes = dict(compiled.schedule.roles)["forward"].nests, compiled.space.grid.sizes
        text = " ".join(f"{index}={n}" for index, axes in roles if (n := prod(sizes[a] for a in axes)) > 1)
        return OnRanks(ranks, compiled.layer.grid, ((text or "nothing", 1.0),), step, sample)

    def by_sample(ranks: int) -> Step:
        return on(Grid((("N", ranks),)), "sample")[1]

    rows = tuple(best(ranks) for ranks in counts)
    one = by_sample(1).seconds
    assert one is not None
    counted = "blocks of x, w and y, and of their gradients"
    how = "one step after the other"
    return Help(layer.name, layer.kind, how, machine.name, batch, one, budget_bytes, counted, rows)


def _seconds(compiled: Compiled) -> float:
    return compiled.cost.total().seconds


def _blocks_bytes(compiled: Compiled) -> int:
    """Bytes of x, w, y and their gradients on the fullest rank; every rank has all of w's taps."""
    sizes, conv = compiled.space.grid.sizes, compiled.layer.conv
    elements = 0
    for tensor in ("x", "w", "y"):
        axes = dict(compiled.schedule.stored)[tensor].axes
        shape = conv.shape(tensor)
        some = (*axes, *((),) * (len(shape) - len(axes)))
        elements += 2 * prod(most_of(n, (sizes[a] for a in split)) for n, split in zip(shape, some, strict=True))
    return elements * compiled.layer.element_bytes


def _too_few(batch: int, ranks: int) -> str:
    return f"{number_of(batch, 'sample')}, {number_of(ranks, 'rank')}"


# ---- Text, data, a picture ----


def help_text(found: Help, lines: Sequence[str]) -> str:
    """The text: a line for each number of ranks, and what to type next.

    Args:
        lines: the commands for the fastest plan.
    """
    rows = [HEAD, *(_row(found, one) for one in found.rows)]
    return "\n".join([_title(found), *aligned(rows, NUMBERS), "", *_verdict(found), *_next(found, lines)])


def _title(found: Help) -> str:
    return (
        f"{found.name}: {found.what}, {number_of(found.batch, 'sample')} a step, on ranks of {found.machine}; "
        f"modelled, {found.how}"
    )


def _row(found: Help, one: OnRanks) -> tuple[str, ...]:
    plan, sample = one.plan, one.sample
    more = f"{sample.seconds / plan.seconds:.2f} x" if plan.seconds and sample.seconds and sample.fits else ""
    return (
        f"{one.ranks}",
        "" if one.grid is None else f"{one.grid}".removeprefix("grid"),
        _split_text(one.split),
        _took(plan),
        f"{found.one_s / plan.seconds:.2f} x" if plan.seconds and plan.fits else "",
        _needs(plan),
        _took(sample),
        _needs(sample),
        more,
    )


def _split_text(split: tuple[tuple[str, float], ...]) -> str:
    told = [(text, share) for text, share in split[:SPLITS] if share >= LEAST]
    return told[0][0] if len(told) == 1 else ", ".join(f"{text} ({share:.0%})" for text, share in told)


def _took(step: Step) -> str:
    if step.seconds is not None and step.fits:
        return milliseconds(step.seconds, step.deviation_s)
    return "does not fit" if step.memory_bytes is not None else step.why_not


def _needs(step: Step) -> str:
    return "" if step.memory_bytes is None else gib(step.memory_bytes)


def _verdict(found: Help) -> Iterator[str]:
    budget = "any" if found.budget_bytes is None else f"{gib(found.budget_bytes)} GiB"
    yield f"memory   a rank may take {budget}; {found.counted}"
    best = found.fastest
    if best is None or best.plan.seconds is None:
        yield "plan     none fits: more ranks, a smaller batch, or more memory (--memory, --keep needed, --recompute)"
        return
    times = times_as(found.one_s, best.plan.seconds)
    yield (
        f"fastest  {number_of(best.ranks, 'rank')}: {times:.2f} times as fast as the {found.one_s * 1e3:.3f} ms of one "
        f"rank, {times / best.ranks:.0%} of {best.ranks} times"
    )
    samples = [r.sample.seconds for r in found.rows if r.sample.fits and r.sample.seconds is not None]
    if not samples:
        yield "samples  alone can be split on none of these numbers of ranks"
    else:
        least = min(samples)
        more = times_as(least, best.plan.seconds)
        yield f"samples  split alone take {least * 1e3:.3f} ms at best, {more:.2f} times as long"


def _next(found: Help, lines: Sequence[str]) -> Iterator[str]:
    best = found.fastest
    if lines and best is not None:
        idle = 0 if best.grid is None else best.ranks - best.grid.ranks
        yield ""
        rest = f", of which {idle} {'has' if idle == 1 else 'have'} nothing to do" if idle else ""
        yield f"next, on {number_of(best.ranks, 'rank')}{rest}:"
        yield from (f"  {line}" for line in lines)


def help_json(found: Help, lines: Sequence[str]) -> dict[str, Any]:
    """The table as plain data."""
    best = found.fastest

    def step(one: Step) -> dict[str, Any]:
        return {
            "seconds": one.seconds, "deviation_seconds": one.deviation_s, "memory_bytes": one.memory_bytes,
            "fits": one.fits, "why_not": one.why_not or None,
        }  # fmt: skip

    return {
        "name": found.name,
        "machine": found.machine,
        "samples": found.batch,
        "one_rank_seconds": found.one_s,
        "memory_budget_bytes": found.budget_bytes,
        "fastest_ranks": None if best is None else best.ranks,
        "ranks": [
            {
                "ranks": one.ranks,
                "grid": None if one.grid is None else one.grid.plain,
                "split": [{"by": text, "share": share} for text, share in one.split],
                "plan": step(one.plan),
                "speed_up": found.one_s / one.plan.seconds if one.plan.seconds else None,
                "sample_parallelism": step(one.sample),
            }
            for one in found.rows
        ],
        "next": [*lines],
    }


def plot_help(found: Help, file: Path) -> None:
    """Draw seconds, their deviations, and memory against ranks.

    Raises:
        InputError: matplotlib is missing, or the file can't be written.
    """
    plans, samples = [(r.ranks, r.plan) for r in found.rows], [(r.ranks, r.sample) for r in found.rows]
    title = f"{found.name}: {number_of(found.batch, 'sample')}"
    draw_ranks(title, found.machine, _curves(plans), _curves(samples), found.budget_bytes, file)


def _curves(steps: Sequence[tuple[int, Step]]) -> Curves:
    seconds = [(ranks, one.seconds) for ranks, one in steps if one.fits and one.seconds is not None]
    memory = [(ranks, float(one.memory_bytes)) for ranks, one in steps if one.memory_bytes is not None]
    off = [(ranks, one.deviation_s) for ranks, one in steps if one.fits and one.deviation_s is not None]
    return Curves(seconds, memory, off)
