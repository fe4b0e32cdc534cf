"""From a network, a machine and a number of ranks to a plan: the layout of every layer, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.cost.model import PICOSECONDS
from convgen.errors import InputError, Note
from convgen.plan.fewer import with_idle
from convgen.plan.network.bounded import FREE, DoesNotFit, least_memory, solve
from convgen.plan.network.collection import without_collection
from convgen.plan.network.conv_node import Option
from convgen.plan.network.eliminate import Belief, Elimination
from convgen.plan.network.graph import Graph, build, run_again
from convgen.plan.network.grids import grids
from convgen.plan.network.longest_path import longest_paths
from convgen.plan.network.node_step import NodeStep
from convgen.plan.network.setting import Setting
from convgen.plan.network.splits import Split
from convgen.spec.network import CONVOLUTIONS, Network, Node
from convgen.spec.network_blocks import INPUT
from convgen.spec.network_reader import with_batch
from convgen.spec.placement import MAX_RANKS
from convgen.spec.text import number_of

GIB = 1 << 30
SCOUTED = 4  # how many of the best estimated grids are searched with few candidates
FEW_ROLES, FEW_MORE, FEW_SPLITS = 5, 1, 6


@dataclass(frozen=True, eq=False)
class NodePlan:
    """One node under a plan.

    Attributes:
        reads, stored: splits of its inputs as they are stored, and of its output (None for a loss).
        option: of a convolution or linear layer.
        memory_bytes: that its weights, what it holds, and its output take on the fullest rank.
        runner_up: the best roles that the layer can have with others in forward, everything else chosen anew, and the
            seconds that the whole plan then takes more, whatever memory that takes; None where memory decided on it.
    """

    node: Node
    reads: tuple[Split, ...]
    stored: Split | None
    option: Option | None
    steps: tuple[NodeStep, ...]
    memory_bytes: int
    runner_up: tuple[str, float] | None = None

    @property
    def compute_s(self) -> float:
        return sum(s.cost.time_ps for s in self.steps if not s.communicates) / PICOSECONDS

    @property
    def communication_s(self) -> float:
        return sum(s.cost.time_ps for s in self.steps if s.communicates) / PICOSECONDS

    @property
    def sent_bytes(self) -> int:
        return sum(s.cost.sent_bytes for s in self.steps)

    def working(self, grid: Grid) -> int:
        """Ranks that do different work in forward; the others do the same as one of these."""
        split = self.reads[0] if self.stored is None else self.stored
        nests = [axes for _, axes in self.option.roles[0].nests] if self.option is not None else split
        return prod(grid.sizes[a] for axes in nests for a in axes)

    @property
    def redistributes(self) -> bool:
        """Whether activations travel, not statistics alone."""
        return self.node.kind != "batch_norm" and self.sent_bytes > 0


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout of every layer.

    Attributes:
        values: of the graph's variables.
        budget_bytes: of memory on each rank; None where there is no bound.
        tried: the grids searched with few candidates, and their best seconds; None where nothing fits the budget. The
            best of them is searched with all.
        how: what found the optimum.
        idle: ranks that hold copies of each rank of the graph's grid, and compute the same (plan/fewer.py).
    """

    graph: Graph
    values: tuple[int, ...]
    cost_ps: int
    memory_bytes: int
    budget_bytes: int | None
    how: str
    tried: tuple[tuple[Grid, float | None], ...] = ()
    idle: int = 1

    @property
    def network(self) -> Network:
        return self.graph.network

    @property
    def grid(self) -> Grid:
        """Of all ranks, those with copies too."""
        return with_idle(self.graph.grid, self.graph.grid.ranks * self.idle)

    @property
    def setting(self) -> Setting:
        return self.graph.setting

    @property
    def free(self) -> bool:
        """Whether the plan is the best of all, and not only of those that fit the budget."""
        return self.how == FREE

    @property
    def seconds(self) -> float:
        """Modelled seconds of a training step: forward and backward, steps one after the other."""
        return self.cost_ps / PICOSECONDS

    @cached_property
    def nodes(self) -> tuple[NodePlan, ...]:
        """Every node but the input."""
        return tuple(_nodes(self))

    @property
    def input_memory_bytes(self) -> int:
        """What the network's input takes on the fullest rank: all of the plan's memory that is no node's in `nodes`."""
        return self.memory_of.get(INPUT, 0)

    @cached_property
    def memory_of(self) -> dict[str, int]:
        """Bytes on the fullest rank by the name of the node."""
        found: dict[str, int] = {}
        for factor, owner in zip(self.graph.factors, self.graph.owners, strict=True):
            if factor.memory is not None:
                taken = int(factor.memory[tuple(self.values[v] for v in factor.scope)])
                found[owner] = found.get(owner, 0) + taken
        return found

    @cached_property
    def heuristic_seconds(self) -> float:
        """What [SP] V-C's longest-path heuristic comes to on the same grid and tables, memory left out."""
        return self.graph.problem.total(longest_paths(self.graph.problem, self.graph.vertices))[0] / PICOSECONDS


def budget_of(setting: Setting, given: int | None) -> int | None:
    """Bytes that a rank may take: as given, else what the machine's ranks have, where its file says it."""
    memory = setting.machine.memory_bytes
    return given if given is not None or memory is None else int(memory)


def convolutions(network: Network) -> Counter[Conv]:
    """Convolutions and linear layers, and how often each comes."""
    return Counter(n.conv for n in network.nodes if n.kind in CONVOLUTIONS and n.conv is not None)


@without_collection()
def plan_network(
    network: Network, setting: Setting, ranks: int, *, grid: Grid | None = None, budget_bytes: int | None = None
) -> Plan:
    """The layout of least modelled seconds among the candidates (graph.py), on the best of the grids searched.

    Args:
        ranks: how many.
        grid: this one only; its sizes multiply to `ranks`.
        budget_bytes: of memory on each rank; by default what the machine's ranks have, where its file says it.
    Raises:
        InputError: nothing fits the budget, or the ranks can't be used.
    """
    budget_bytes = budget_of(setting, budget_bytes)
    if ranks > MAX_RANKS:
        raise InputError(f"{ranks} ranks, more than {MAX_RANKS}", hint=f"--ranks up to {MAX_RANKS}")
    counts = convolutions(network)
    if not counts:
        raise InputError(f"{network.name} has no convolution and no linear layer", hint="a network with one")
    all_grids = [grid] if grid is not None else grids(ranks, list(counts.items()), setting, network.dtype)
    tried: list[tuple[Grid, float | None]] = []
    if len(all_grids) > 1:
        tried = [(one, _scouted(network, one, setting, budget_bytes)) for one in all_grids[:SCOUTED]]
        all_grids = sorted(all_grids[:SCOUTED], key=lambda g: dict(tried)[g] or float("inf"))
    missed: list[tuple[int, Graph, DoesNotFit]] = []
    for one in all_grids:
        _check_usable(network, counts, one)
        graph = build(network, one, setting)
        try:
            found = solve(graph.problem, budget_bytes)
        except DoesNotFit as miss:
            missed.append((miss.memory, graph, miss))
            continue
        return Plan(graph, found.values, found.cost, found.memory, budget_bytes, found.how, tuple(tried))
    _, graph, miss = min(missed, key=lambda m: m[0])
    raise _refusal(graph, miss, budget_bytes or 0, grid)


def scouted_s(network: Network, setting: Setting, ranks: int, budget_bytes: int | None) -> float:
    """Seconds of the best plan with few candidates on the grids of the best estimates; infinite where nothing fits.

    Raises:
        InputError: a grid can't be used.
    """
    counts = convolutions(network)
    found: list[float] = []
    for one in grids(ranks, list(counts.items()), setting, network.dtype)[:SCOUTED]:
        _check_usable(network, counts, one)
        seconds = _scouted(network, one, setting, budget_bytes)
        found += [] if seconds is None else [seconds]
    return min(found, default=float("inf"))


def _scouted(network: Network, grid: Grid, setting: Setting, budget_bytes: int | None) -> float | None:
    scout = build(network, grid, setting, most_roles=FEW_ROLES, most_more=FEW_MORE, most_splits=FEW_SPLITS)
    return _solved_s(scout, budget_bytes)


def _solved_s(graph: Graph, budget_bytes: int | None) -> float | None:
    try:
        return solve(graph.problem, budget_bytes).cost / PICOSECONDS
    except DoesNotFit:
        return None


def _check_usable(network: Network, counts: Counter[Conv], grid: Grid) -> None:
    """Refuse a grid with an axis that no index of any layer has enough of."""
    for axis, size in grid.axes:
        most = 0
        where: Node | None = None
        for node in network.nodes:
            if node.conv is not None and node.conv in counts:
                conv = node.conv
                extents = [conv.batch, conv.channels, conv.filters, *(min(s.extent, s.out) for s in conv.spatial)]
                if max(extents) > most:
                    most, where = max(extents), node
        if size > most and where is not None:
            fact = f"axis {axis} of {size} ranks splits nothing: no index of {network.name} is above {most}"
            notes = (Note("layer", f"{where.name} has the largest, {most}", where.path),)
            raise InputError(fact, ("input",), notes, f"fewer ranks, axes of up to {most} (--grid), or more samples")


def _refusal(graph: Graph, miss: DoesNotFit, budget: int, given: Grid | None) -> InputError:
    """Nothing fits: the least memory there is, what takes most of it, and what would do."""
    network, setting, ranks = graph.network, graph.setting, graph.grid.ranks
    plan = Plan(graph, miss.values, 0, miss.memory, budget, "least memory")
    largest = sorted(plan.nodes, key=lambda n: -n.memory_bytes)[:3]
    notes = tuple(
        Note("layer", f"{n.node.name} takes {gib(n.memory_bytes, 2)} GiB a rank", n.node.path) for n in largest
    )
    fact = (
        f"{network.name} with {number_of(network.batch, 'sample')} on {number_of(ranks, 'rank')} needs at least "
        f"{gib(miss.memory)} GiB a rank, {gib(budget)} are given"
    )
    ways = [f"--memory {miss.memory / GIB + 0.0005:.3f}", *_ways(network, setting, budget, ranks, given)]
    return InputError(fact, (), notes, ", ".join(ways[:-1]) + " or " + ways[-1] if len(ways) > 1 else ways[0])


def gib(count: int, digits: int = 3) -> str:
    """Bytes in GiB with so many digits behind the point, and of less than one as many that count.

    Example:
        >>> gib(5 << 29), gib(5 << 9)
        ('2.500', '2.38e-06')
    """
    return f"{count / GIB:.{digits}f}" if count >= GIB else f"{count / GIB:.{digits}g}"


def _ways(network: Network, setting: Setting, budget: int, ranks: int, given: Grid | None) -> Iterator[str]:
    """What would make it fit, tried out; on the grid that was asked for, if one was."""

    def fits(network: Network, setting: Setting, ranks: int) -> bool:
        one = given
        if one is None or one.ranks != ranks:
            one = grids(ranks, list(convolutions(network).items()), setting, network.dtype)[0]
        few = build(network, one, setting, most_roles=FEW_ROLES, most_more=FEW_MORE, most_splits=FEW_SPLITS)
        return least_memory(few.problem) <= budget

    for option, other in (
        ("--recompute", replace(setting, recompute=True)),
        ("--keep needed", replace(setting, keep="needed")),
        ("--regather", replace(setting, regather=True)),
    ):
        if other != setting and fits(network, other, ranks):
            yield option
    for times in (2, 4, 8, 16):
        if ranks * times <= MAX_RANKS and fits(network, setting, ranks * times):
            yield f"--ranks {ranks * times}" + (" without --grid" if given is not None else "")
            break
    for part in (2, 4, 8, 16, 32):
        if network.batch >= part and fits(with_batch(network, network.batch // part), setting, ranks):
            yield f"--batch {network.batch // part}"
            break


def _nodes(plan: Plan) -> Iterator[NodePlan]:
    graph, values = plan.graph, plan.values
    beliefs = dict(Elimination(graph.problem).beliefs()) if plan.free else {}
    for node in graph.network.nodes:
        if node.kind == "input":
            continue
        reads = tuple(graph.split(values, name) for name in node.inputs)
        stored = graph.split(values, node.name) if node.shape else None
        option, runner = None, None
        if node.name in graph.convs:
            conv = graph.convs[node.name]
            option = graph.option(values, node.name)
            assert stored is not None
            steps = tuple(conv.steps(reads[0], stored, option))
            if plan.free:
                runner = _runner_up(plan, node, option, beliefs)
        else:
            other = graph.others[node.name]
            steps = tuple(other.steps(reads, stored if stored is not None else ()))
            if stored is not None and graph.recomputed(values, node):
                steps += (run_again(node, other.block_bytes(node.shape, stored), graph.setting),)
        yield NodePlan(node, reads, stored, option, steps, plan.memory_of.get(node.name, 0), runner)


def _runner_up(plan: Plan, node: Node, option: Option, beliefs: Mapping[int, Belief]) -> tuple[str, float] | None:
    """The best other roles in forward of a convolution, and what the plan then costs more."""
    graph, conv = plan.graph, plan.graph.convs[node.name]
    if (others := conv.other_roles(option)) is None:
        return None
    least, option_of = others
    kinds = ("split", graph.root[node.inputs[0]]), ("split", node.name), ("option", node.name)
    x, y, own = (graph.variable[kind] for kind in kinds)
    # The first of the three to be eliminated is so together with the other two.
    scope, belief = next(b for b in (beliefs[v] for v in (own, x, y)) if x in b[0] and y in b[0])
    order = [v for v in scope if v in (x, y)]
    rest = belief.min(axis=tuple(i for i, v in enumerate(scope) if v not in order))
    total = (rest if order == [x, y] else rest.T) - conv.best.cost[..., 0] + least
    i, j = map(int, np.unravel_index(int(total.argmin()), total.shape))
    return option_of(i, j).roles_text(), (int(total[i, j]) - plan.cost_ps) / PICOSECONDS
