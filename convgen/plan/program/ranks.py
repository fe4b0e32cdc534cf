"""A network, a machine and a number of ranks: the best grid of axes, and on it the best layout.

Grids are the ways to write the ranks as a product of as many axes as a plan may have. The most even ones are searched
with few candidates, then the best of them with its axes in other orders. The best is then searched with all candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.network_memory import MemoryWalk
from convgen.cost.rows import program_cost
from convgen.errors import InputError, InternalError, Note
from convgen.plan.factors import MOST_AXES, NAMES, factorisations, primes
from convgen.plan.fewer import LITTLE, MUCH, on_fewer, with_idle, without_idle
from convgen.plan.letters import lay_out
from convgen.plan.parts import ANY, Parts, Room
from convgen.plan.program.candidates import Way
from convgen.plan.program.fitting import Fitted, counted, fitted
from convgen.plan.program.improved import improved
from convgen.plan.program.nearby import Nearby
from convgen.plan.program.search import Effort, Found, Search, TooLittleMemory
from convgen.plan.program.sweep import sweep
from convgen.plan.program.written import plan_of, program_of
from convgen.program.network import Program
from convgen.spec.placement import MAX_RANKS

SCOUT = Effort(ways=2, others=6, stored=5, parameters=3, apart=False)
LAYOUTS = 2  # that are searched, at most, until statistics by parts and the best layout agree
NEAR, MOST_NEAR = 40, 4000  # layouts near a plan that are looked at: for each row, and in all
NEAR_FEW, MOST_FEW, FEW = 1000, 20000, 40  # the same compared by the step, in networks of at most so many rows
WARM = (3e-2, 0.0)  # by round of these, how much longer, as a part of the step, a layout may be taken at first
HOPS = 100  # before these rounds: changes whatever they cost, with what is better around them (improved.py)
SMALL = 40  # networks of at most so many distinct operations are planned for many numbers of working ranks
SCOUTED = 2  # grids, the most even ones: a role may have several axes, so that uneven splits are had on them too


class StepSeconds(NamedTuple):
    """Seconds of a step with communication overlapped: of the plan chosen by it, and of the plan with the least sum."""

    overlapped: float
    by_sums: float


@dataclass(frozen=True)
class NetworkPlan:
    """The best program found, its modelled seconds, and the bytes that the fullest rank keeps.

    Attributes:
        tried: seconds on the other grids, with few candidates.
        runner_up: by row, the best roles of a product but those that it has, and the seconds that the best plan with
            them takes more; none where memory decided on the plan.
        step: the step of a plan that was chosen by its timeline (by_timeline.py); else None.
        heuristic: picoseconds of the plan that the longest paths give, one after the other ([SP] V-C).
        room: the memory that there was.
        walk: the walk that counted the bytes, row by row; None where the room counts another way.
        parts: the network that is planned; where its statistics are by parts, with these.
        ranks: how many there are, of which the program's grid has the first; 0: no others.
        beside: plans that split samples alone, where these were looked at too.
        elsewhere: other numbers of ranks' grids that were searched with all candidates.
    """

    program: Program
    seconds: float
    memory_bytes: int
    tried: tuple[tuple[Grid, float], ...]
    runner_up: Mapping[int, tuple[Way, float]]
    step: StepSeconds | None = None
    room: Room = ANY
    walk: MemoryWalk | None = None
    heuristic: Callable[[], int] | None = None
    parts: Parts | None = None
    ranks: int = 0
    beside: tuple[NetworkPlan, ...] = ()
    elsewhere: tuple[Grid, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds by which it was chosen: of a step with communication overlapped, or of one step after the other."""
        return self.seconds if self.step is None else self.step.overlapped

    def checked(self, machine: Machine, dtype: str) -> NetworkPlan:
        """The plan itself.

        Raises:
            InternalError: its seconds are not those of its program, on its program's ranks.
        """
        if (own := program_cost(self.program, machine, dtype).seconds) != self.seconds:
            what = f"{self.program.name} on {self.program.grid}"
            raise InternalError(f"{what}: a plan says {self.seconds:.12f} s a step, and its program takes {own:.12f} s")
        return self


def check_ranks(parts: Parts, grid: Grid | None, ranks: int) -> None:
    """Raises InputError: more ranks than can be, or an axis that splits nothing."""
    if ranks > MAX_RANKS:
        raise InputError(f"{ranks} ranks, more than {MAX_RANKS}", hint=f"--ranks up to {MAX_RANKS}")
    if grid is None:  # the plan says how many of them work
        return
    products = [bound for bound in parts.rows if bound.operation.is_product]
    extents = [(n, bound.module) for bound in products for s in bound.operation.signatures for _, n in s.extents]
    most, where = max(extents, key=lambda pair: pair[0], default=(MAX_RANKS, ""))
    sizes = [size for _, size in grid.axes]
    if max(sizes, default=1) > most:
        fact = f"an axis of {max(sizes)} ranks splits nothing: no index of {parts.name} is above {most}"
        notes = (Note("layer", f"{where} has the largest, {most}"),)
        raise InputError(fact, ("input",), notes, f"fewer ranks, axes of up to {most} (--grid), or more samples")


def grids_of(ranks: int, machine: Machine) -> list[Grid]:
    """Grids with the most axes, largest first; last, where groups are nearest, the largest axis that a node holds."""
    axes = min(MOST_AXES, len(primes(ranks)))
    if axes == 0:
        return [Grid((("a", 1),))]
    return [
        Grid(tuple(zip(NAMES, _ordered(factors, machine.ranks_per_node), strict=False)))
        for factors in factorisations(ranks, axes)
    ]


def _ordered(factors: Sequence[int], node: int) -> tuple[int, ...]:
    inside = [n for n in factors if n <= node]
    if not inside:
        return tuple(factors)
    rest = list(factors)
    rest.remove(inside[0])  # factors descend
    return (*rest, inside[0])


def _in_other_orders(grid: Grid, machine: Machine) -> list[Grid]:
    """The grid with another axis innermost, where groups are nearest; none on one level, where orders are alike."""
    sizes = sorted((n for _, n in grid.axes), reverse=True)
    found: list[tuple[int, ...]] = []
    for last in sorted({*sizes} - {grid.axes[-1][1]}) if len(machine.levels) > 1 else ():
        rest = sizes.copy()
        rest.remove(last)
        found.append((*rest, last))
    return [Grid(tuple(zip(grid.names, order, strict=True))) for order in found]


def scouted_in(room: Room, recompute: bool) -> Room:
    """The room of a scout: unbounded where blocks may be computed again, as nobody knows yet what that saves."""
    return replace(room, memory_bytes=None) if recompute else room


def by_tiles(machine: Machine, parts: Parts) -> bool:
    """Whether a device's time is steps of whole tiles, so that few candidates say little, of a network of few rows."""
    return machine.tiles is not None and len(parts.rows) <= FEW


class _Scout:
    """Plans with few candidates, a grid each; remembered."""

    def __init__(self, parts: Parts, machine: Machine, dtype: str, room: Room) -> None:
        self.parts, self.machine, self.dtype, self.room = parts, machine, dtype, room
        self.known: dict[Grid, int | None] = {}

    def time_ps(self, grid: Grid) -> int | None:
        """Picoseconds of a grid's best plan with few candidates; None where none fits."""
        if grid not in self.known:
            try:
                self.known[grid] = self._least(grid)
            except TooLittleMemory:
                self.known[grid] = None
        return self.known[grid]

    def seconds(self, grid: Grid) -> float:
        """Seconds of that plan; infinite where none fits."""
        ps = self.time_ps(grid)
        return float("inf") if ps is None else ps / PICOSECONDS

    def of(self, grids: Iterable[Grid]) -> list[tuple[int, Grid]]:
        """(picoseconds, grid) of those grids on which a plan fits."""
        return [(ps, grid) for grid in grids if (ps := self.time_ps(grid)) is not None]

    def _least(self, grid: Grid) -> int:
        search = Search(self.parts, grid, self.machine, self.dtype, SCOUT, self.room)
        if self.parts.parted is not None:
            stays = self.parts.parted(search.run(compared=False).program, True)
            search = Search(stays, grid, self.machine, self.dtype, SCOUT, self.room)
        if not by_tiles(self.machine, self.parts):
            return search.time_ps()
        near = Nearby(search.run(compared=False).program, self.machine, self.dtype)
        sweep(near)
        return near.time_ps


def scouted_s(parts: Parts, grid: Grid, machine: Machine, dtype: str, room: Room, recompute: bool) -> float:
    """Seconds of a grid's best plan with few candidates; infinite where none fits."""
    return _Scout(parts, machine, dtype, scouted_in(room, recompute)).seconds(grid)


def is_alike(one: Parts, other: Parts) -> bool:
    return list(one.rows) == list(other.rows)


def _agreed(parts: Parts, plan: Callable[[Parts], Fitted]) -> tuple[Fitted, Parts]:
    """The best plan found whose statistics by parts, if it has any, follow its own layout; and its network."""
    best, free = None, parts
    for _ in range(LAYOUTS):
        one = plan(free)
        if parts.parted is None or is_alike(parts.parted(one.found.program, False), free):
            return min(best or (one, free), (one, free), key=_time_ps)
        stays = parts.parted(one.found.program, True)
        one = plan(stays)
        best = min(best or (one, stays), (one, stays), key=_time_ps)
        free = parts.parted(one.found.program, False)
    assert best is not None
    return best


def _first(pair: tuple[int, Grid]) -> int:
    return pair[0]


def _time_ps(pair: tuple[Fitted, Parts]) -> int:
    return pair[0].found.time_ps


def plan_network(
    parts: Parts,
    grids: Sequence[Grid],
    machine: Machine,
    dtype: str,
    room: Room = ANY,
    recompute: bool = False,
    scout: _Scout | None = None,
    *,
    reorder: bool = False,
) -> NetworkPlan:
    """The best layout over these grids.

    Args:
        grids: all of the same number of ranks.
        recompute: whether blocks may be computed again in backward (fitting.py).
        scout: one that remembers grids of other calls.
        reorder: whether axes may be in another order than the grids have them.
    Raises:
        InputError: no layout fits the memory.
    """

    scout = scout or _Scout(parts, machine, dtype, scouted_in(room, recompute))
    scouted = scout.of(grids[-SCOUTED:]) if len(grids) > 1 else []
    best = min(scouted, key=_first)[1] if scouted else grids[-1]
    if reorder and (others := _in_other_orders(best, machine)):
        scouted = [*(scouted or scout.of([best])), *scout.of(others)]
        best = min(scouted, key=_first)[1] if scouted else best

    def plan(parts: Parts) -> Fitted:
        def search(bound: int | None) -> Found:
            return Search(parts, best, machine, dtype, Effort(), replace(room, memory_bytes=bound)).run()

        return fitted(search, room, machine, dtype, recompute=recompute)

    one, parts = _agreed(parts, plan)
    found = one.found
    tried = tuple((grid, ps / PICOSECONDS) for ps, grid in scouted)
    second = {i: (way, more / PICOSECONDS) for i, (way, more) in found.runner_up.items()}
    return NetworkPlan(
        found.program,
        found.time_ps / PICOSECONDS,
        one.peak,
        tried,
        second,
        room=room,
        walk=one.walk,
        heuristic=found.heuristic,
        parts=parts,
    )


def plan_counted(
    parts: Parts,
    ranks: int,
    machine: Machine,
    dtype: str,
    room: Room = ANY,
    recompute: bool = False,
    told: Callable[[int], None] = lambda _: None,
) -> NetworkPlan:
    """The best layout on these ranks; or on the first of them, where that is faster (plan/fewer.py).

    Args:
        told: is called with each number of ranks that is planned.
    Raises:
        InputError: no layout of all ranks takes so little memory.
    """

    scout = _Scout(parts, machine, dtype, scouted_in(room, recompute))
    searched: list[Grid] = []

    def planned(count: int) -> NetworkPlan:
        told(count)
        found = plan_network(parts, grids_of(count, machine), machine, dtype, room, recompute, scout, reorder=True)
        searched.append(found.program.grid)
        return polished(found, machine, dtype) if by_tiles(machine, parts) else found

    def roughly(count: int) -> float:
        return scout.seconds(grids_of(count, machine)[-1])

    @cache
    def of_one() -> float:
        program = lay_out(parts._replace(given=()), Grid((("N", 1),)), "sample")
        return sum(computing for computing, _ in program_cost(program, machine, dtype).rows) / PICOSECONDS

    patience = MUCH if len({bound.operation for bound in parts.rows}) <= SMALL else LITTLE
    best = on_fewer(ranks, planned, lambda plan: plan.seconds, roughly, lambda count: of_one() / count, patience)
    beside = tuple(of_samples(best[1], parts, ranks, machine, dtype))
    least = min((polished(one, machine, dtype) for one in (best[1], *beside)), key=lambda one: one.seconds)
    wider = tuple(widened(one, ranks, machine, dtype) for one in beside)
    others = tuple(grid for grid in searched if grid != least.program.grid)
    return replace(widened(least, ranks, machine, dtype), beside=wider, elsewhere=others)


def plan_on(
    parts: Parts, grid: Grid, ranks: int, machine: Machine, there: Machine, dtype: str, room: Room, recompute: bool
) -> NetworkPlan:
    """The best layout on a grid, for `machine`. The grid has some or all of the `ranks` ranks of the machine `there`;
    layouts near the best are looked at only where both machines are the same."""
    found = plan_network(parts, [grid], machine, dtype, room, recompute)
    return widened(polished(found, machine, dtype) if machine == there else found, ranks, there, dtype)


def of_samples(plan: NetworkPlan, parts: Parts, ranks: int, machine: Machine, dtype: str) -> list[NetworkPlan]:
    """A plan that splits samples and nothing else, over all ranks or as many as there are samples, whose neighbours a
    search may lack. None where that can't be, takes more memory than there is, rows are given, or blocks are computed
    again.

    Args:
        plan: the plan whose room and types it takes.
    """
    if parts.given or plan.program.again:
        return []
    samples = min(parts.extents("N"), default=ranks)
    try:
        program = lay_out(parts, Grid((("N", min(ranks, samples)),)), "sample")
        if parts.parted is not None:
            parts = parts.parted(program, True)
            program = lay_out(parts, program.grid, "sample")
    except InputError:
        return []
    program = replace(program, reduce_dtype=plan.program.reduce_dtype, autocast=plan.program.autocast)
    if (fits := in_room(plan, program)) is None:
        return []
    seconds = program_cost(program, machine, dtype).seconds
    made = replace(plan, program=program, seconds=seconds, memory_bytes=fits.peak, walk=fits.walk, parts=parts)
    return [replace(made, runner_up={}, heuristic=None, ranks=ranks)]


def frozen_in(plan: NetworkPlan) -> frozenset[str] | None:
    """Values whose storage stays where layouts near a plan are looked at; None where none are: rows are given, blocks
    are computed again, or types are those under autocast."""
    program, parts = plan.program, plan.parts
    if parts is None or parts.given or program.again or program.autocast:
        return None
    return frozenset((*parts.fixed, *(parts.parted(program, True).fixed if parts.parted is not None else ())))


def in_room(plan: NetworkPlan, program: Program) -> Fitted | None:
    """What another program's fullest rank keeps; None where that is more memory than the plan's room has."""
    fits = counted(Found(program, 0, 0, 0, 0, {}), plan.room)
    return None if plan.room.memory_bytes is not None and fits.peak > plan.room.memory_bytes else fits


def polished(plan: NetworkPlan, machine: Machine, dtype: str, *, by_step: bool = False) -> NetworkPlan:
    """A plan, or a better one near it (plan/program/improved.py) that takes no more memory than there is.

    Args:
        by_step: better is a shorter step with communication overlapped, counted quickly, not a smaller sum.
    """
    program, parts = plan.program, plan.parts
    if (frozen := frozen_in(plan)) is None or parts is None:
        return plan
    few = by_step and len(program.rows) <= FEW
    rounds = WARM if few else (0.0,)
    each, most = (NEAR_FEW, MOST_FEW) if few else (NEAR, MOST_NEAR)
    draws = min(each * len(program.rows), most) // len(rounds)
    how = {"of_inputs": parts.of_inputs, "by_step": by_step}
    better, ps = improved(program, machine, dtype, draws, frozen, **how, warm=rounds, hops=HOPS * few)
    if better == program or (fits := in_room(plan, better)) is None:
        return plan
    saved = plan.seconds - ps / PICOSECONDS
    second = {} if by_step else {i: (way, more + saved) for i, (way, more) in plan.runner_up.items()}
    return replace(
        plan, program=better, seconds=ps / PICOSECONDS, memory_bytes=fits.peak, walk=fits.walk, runner_up=second
    )


def nearer(plan: NetworkPlan, ranks: int, machine: Machine, dtype: str) -> NetworkPlan:
    """A plan of so many ranks, or one near it whose step, counted quickly with communication overlapped, is shorter."""
    return widened(polished(working(plan), machine, dtype, by_step=True), ranks, machine, dtype)


def working(plan: NetworkPlan) -> NetworkPlan:
    """The same plan on the ranks that do different work."""
    grid = without_idle(plan.program.grid)
    if plan.parts is None or grid == plan.program.grid:
        return plan
    return replace(plan, program=_on_grid(plan.program, grid, plan.parts))


def widened(plan: NetworkPlan, ranks: int, machine: Machine, dtype: str) -> NetworkPlan:
    """A plan where there are more ranks: the others hold copies, if that takes no longer, or are left out."""
    plan = replace(plan, ranks=ranks)
    grid = plan.program.grid
    if plan.parts is None or grid.ranks == ranks or ranks % grid.ranks:
        return plan
    wider = _on_grid(plan.program, with_idle(grid, ranks), plan.parts)
    return replace(plan, program=wider) if program_cost(wider, machine, dtype).seconds == plan.seconds else plan


def _on_grid(program: Program, grid: Grid, parts: Parts) -> Program:
    """The same layout with other axes of copies."""
    found = program_of(replace(plan_of(program, ""), grid=grid), parts)
    return replace(found, reduce_dtype=program.reduce_dtype, autocast=program.autocast)
