"""The planner's graph of a network on one grid: its variables, their domains, and tables of cost and memory.

| variable | values |
|---|---|
| a stored activation | splits (splits.py); normalisation, ReLU and dropout keep the one of what they read |
| a convolution or linear layer | options (conv_node.py), the best for each pair of splits of its input and output |
| with `recompute`, an activation that is made in place from another | kept, or computed again in backward |

A convolution joins its input's and its output's variables and its option; other nodes join their inputs' and output's.
Redistribution needs no variable: it is in the tables, done by who reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import numpy as np

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.cost.model import PICOSECONDS
from convgen.cost.training_memory import parameter_bytes
from convgen.errors import InputError
from convgen.plan.network.conv_node import ConvNode, Option, candidates, same_blocks, wishes
from convgen.plan.network.conv_tables import NEVER
from convgen.plan.network.eliminate import Factor, Problem, Table
from convgen.plan.network.longest_path import Vertex
from convgen.plan.network.node_step import NodeStep, passes
from convgen.plan.network.other_node import IN_PLACE, OtherNode, block_elements
from convgen.plan.network.phase_roles import Letters
from convgen.plan.network.reduced import largest
from convgen.plan.network.setting import Setting
from convgen.plan.network.splits import Shape, Split, any_splits, fits
from convgen.spec.network import CONVOLUTIONS, Network, Node

MOST = 1 << 62  # of bytes, added up in 64 bits
MOST_ROLES = 12
MOST_MORE = 6
MOST_SPLITS = 14
_DIMS = {2: ("N", "C"), 3: ("N", "C", "W"), 4: ("N", "C", "H", "W"), 5: ("N", "C", "D", "H", "W")}


@dataclass(eq=False)
class Graph:
    """A problem, and what its variables mean.

    Attributes:
        root: for each node with an output, the node whose stored activation its output shares.
        variable: of each root's split, each convolution's option, and each root's recomputation.
        splits: the domain of each root's split.
    """

    network: Network
    grid: Grid
    setting: Setting
    root: dict[str, str] = field(default_factory=dict[str, str])
    variable: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    splits: dict[str, tuple[Split, ...]] = field(default_factory=dict[str, tuple[Split, ...]])
    convs: dict[str, ConvNode] = field(default_factory=dict[str, ConvNode])
    others: dict[str, OtherNode] = field(default_factory=dict[str, OtherNode])
    sizes: list[int] = field(default_factory=list[int])
    factors: list[Factor] = field(default_factory=list[Factor])
    owners: list[str] = field(default_factory=list[str])  # the node of each factor

    @property
    def problem(self) -> Problem:
        return Problem(tuple(self.sizes), tuple(self.factors))

    @property
    def vertices(self) -> list[Vertex]:
        """Nodes, as the heuristic lays them out (longest_path.py)."""
        number = {node.name: k for k, node in enumerate(self.network.nodes)}
        found: list[Vertex] = []
        for node in self.network.nodes:
            variables = {v for (_, name), v in self.variable.items() if name == node.name}
            if node.name in self.root:
                variables.add(self.variable["split", self.root[node.name]])
            least = 0
            if node.name in self.convs:
                option = self.variable["option", node.name]
                least = next(int(f.cost.min()) for f in self.factors if option in f.scope)
            found.append(Vertex(tuple(number[name] for name in node.inputs), frozenset(variables), least))
        return found

    def option(self, values: tuple[int, ...], name: str) -> Option:
        """What a convolution chooses under an assignment."""
        inputs = self.network.node[name].inputs
        kinds = ("split", self.root[inputs[0]]), ("split", self.root[name]), ("option", name)
        return self.convs[name].option(*(values[self.variable[kind]] for kind in kinds))

    def recomputed(self, values: tuple[int, ...], node: Node) -> bool:
        """Whether a node's output is computed again in backward under an assignment."""
        choice = self.variable.get(("recompute", self.root.get(node.name, "")))
        again = node.kind in IN_PLACE and is_kept(self.network, node, self.setting.keep)
        return choice is not None and again and values[choice] == 1

    def split(self, values: tuple[int, ...], name: str) -> Split:
        """How a node's output is stored under an assignment."""
        root = self.root[name]
        return self.splits[root][values[self.variable["split", root]]]


def build(
    network: Network,
    grid: Grid,
    setting: Setting,
    *,
    roles: Mapping[str, str] | None = None,
    most_roles: int = MOST_ROLES,
    most_more: int = MOST_MORE,
    most_splits: int = MOST_SPLITS,
) -> Graph:
    """The graph of a network on a grid.

    Args:
        roles: only this role for each axis, in every convolution (for pure sample parallelism, say).
        most_roles, most_splits: how many role assignments of a convolution and splits of a shape stay; those with
            the best estimates.
        most_more: how many more roles each phase may have, and how many more ways there are to store w.
    Raises:
        InputError: bytes or picoseconds that sums in 64 bits would not hold.
    """
    if 2 * sum(n.elements for n in network.nodes if n.shape) * network.element_bytes >= MOST:
        fact = (
            f"outputs of {network.name} with {network.batch} samples and their error signals take 2**62 bytes or more"
        )
        raise InputError(fact, ("input",), hint="smaller extents, or fewer samples (--batch)")
    graph = Graph(network, grid, setting)
    for node in network.nodes:
        if node.shape:
            in_place = node.kind in IN_PLACE
            graph.root[node.name] = graph.root[node.inputs[0]] if in_place else node.name
    assigned: dict[Conv, tuple[Letters, ...]] = {}
    for node in network.nodes:
        if node.kind in CONVOLUTIONS and node.conv is not None and node.conv not in assigned:
            given = (tuple(roles[a] for a in grid.names),) if roles is not None else ()
            assigned[node.conv] = given or candidates(node.conv, grid, setting, network.dtype, most_roles)
    domains = _domains(network, grid, assigned, most_splits)
    for node in network.nodes:
        if graph.root.get(node.name) == node.name:
            graph.splits[node.name] = _allowed(graph, node, domains[node.shape])
            _add_variable(graph, "split", node.name, len(graph.splits[node.name]))
    try:
        _Filler(graph, assigned, most_more).fill()
        most = max(
            sum(int(t.max()) for f in graph.factors if (t := f.memory if m else f.cost) is not None) * NEVER // limit
            for m, limit in enumerate((NEVER, MOST))
        )
    except OverflowError:
        most = NEVER
    if most >= NEVER:
        days = NEVER / 86400 / PICOSECONDS
        fact = f"a step of {network.name} on {setting.machine.name} may take {days:.0f} days or more"
        hint = "fewer samples (--batch), or a machine file with other numbers: see its latencies and rates"
        raise InputError(fact, ("input",), hint=hint)
    return graph


def _add_variable(graph: Graph, kind: str, name: str, size: int) -> int:
    graph.variable[kind, name] = len(graph.sizes)
    graph.sizes.append(size)
    return graph.variable[kind, name]


def _domains(
    network: Network, grid: Grid, assigned: Mapping[Conv, tuple[Letters, ...]], most: int
) -> dict[Shape, tuple[Split, ...]]:
    """For each shape, the splits that convolutions on it wish for, best roles first, in turns."""
    wished: dict[Shape, dict[tuple[Conv, str], list[Split]]] = {}
    for node in network.nodes:
        if node.kind in CONVOLUTIONS and node.conv is not None:
            for tensor, shape in (("x", network.node[node.inputs[0]].shape), ("y", node.shape)):
                wished.setdefault(shape, {})[node.conv, tensor] = [
                    split
                    for letters in assigned[node.conv]
                    for split in wishes(dict(zip(grid.names, letters, strict=True)), tensor, _DIMS[len(shape)])
                ]
    found: dict[Shape, tuple[Split, ...]] = {}
    for node in network.nodes:
        if node.shape and node.shape not in found:
            turns = zip_longest(*wished.get(node.shape, {}).values())
            splits = [s for turn in turns for s in turn if s is not None and fits(s, node.shape, grid)]
            if not splits:
                splits = list(any_splits(node.shape, grid))
            found[node.shape] = tuple(dict.fromkeys(splits))[:most]
    return found


def _allowed(graph: Graph, node: Node, splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """The splits that all nodes on an activation can have."""
    network = graph.network
    members = [n for n in network.nodes if graph.root.get(n.name) == node.name]
    checks = [_other(graph, m) for m in members if m.kind not in (*CONVOLUTIONS, "input")]
    touching: list[tuple[Conv, str]] = []
    for m in members:
        if m.kind in CONVOLUTIONS and m.conv is not None and m.conv.groups > 1:
            touching.append((m.conv, "y"))
        touching += [
            (reader.conv, "x")
            for reader in network.readers[m.name]
            if reader.kind in CONVOLUTIONS and reader.conv is not None and reader.conv.groups > 1
        ]

    def allowed(split: Split) -> bool:
        return all(c.allows(split) for c in checks) and all(same_blocks(c, graph.grid, t, split) for c, t in touching)

    found = tuple(s for s in splits if allowed(s))
    if not found:
        found = tuple(s for s in any_splits(node.shape, graph.grid) if allowed(s))[:MOST_SPLITS]
    return found or (tuple(() for _ in node.shape),)


def _other(graph: Graph, node: Node) -> OtherNode:
    network = graph.network
    shapes = tuple(network.node[name].shape for name in node.inputs)
    return OtherNode(node.kind, shapes, node.shape, node.conv, graph.grid, network.dtype, graph.setting)


class _Filler:
    """Makes the tables; those of nodes alike are made once."""

    def __init__(self, graph: Graph, assigned: Mapping[Conv, tuple[Letters, ...]], most_more: int) -> None:
        self.graph, self.assigned, self.most_more = graph, assigned, most_more
        self._convs: dict[object, ConvNode] = {}
        self._others: dict[object, OtherNode] = {}
        self._tables: dict[object, Table] = {}

    def fill(self) -> None:
        for node in self.graph.network.nodes:
            if node.kind in CONVOLUTIONS:
                self.convolution(node)
            elif node.kind != "input":
                self.other(node)
            if self.graph.root.get(node.name) == node.name:
                self.memory(node)

    def put(self, node: Node, scope: tuple[int, ...], cost: Table, memory: Table | None) -> None:
        """A factor over variables in any order."""
        order = sorted(range(len(scope)), key=lambda i: scope[i])
        cost = cost.transpose(order)
        memory = memory.transpose(order) if memory is not None else None
        self.graph.factors.append(Factor(tuple(scope[i] for i in order), cost, memory))
        self.graph.owners.append(node.name)

    def convolution(self, node: Node) -> None:
        graph, conv = self.graph, node.conv
        assert conv is not None
        x_root, y_root = graph.root[node.inputs[0]], node.name
        dx = graph.network.node[x_root].kind != "input"
        xs, ys = graph.splits[x_root], graph.splits[y_root]
        if (key := (conv, dx, xs, ys)) not in self._convs:
            self._convs[key] = ConvNode(
                conv,
                graph.grid,
                graph.network.dtype,
                graph.setting,
                self.assigned[conv],
                xs,
                ys,
                dx=dx,
                most_more=self.most_more,
            )
        one = graph.convs[node.name] = self._convs[key]
        x, y = graph.variable["split", x_root], graph.variable["split", y_root]
        option = _add_variable(graph, "option", node.name, one.best.cost.shape[2])
        self.put(node, (x, y, option), one.best.cost, one.best.memory)

    def other(self, node: Node) -> None:
        graph = self.graph
        key = (node.kind, tuple(graph.network.node[n].shape for n in node.inputs), node.shape, node.conv)
        if key not in self._others:
            self._others[key] = _other(graph, node)
        one = graph.others[node.name] = self._others[key]
        roots = [graph.root[name] for name in node.inputs]
        if node.kind in IN_PLACE or node.kind == "softmax_loss":
            splits = graph.splits[roots[0]]
            table = self.table((key, splits), lambda: [one.time_ps((s,), s) for s in splits])
            self.put(node, (graph.variable["split", roots[0]],), table, None)
            return
        ys = graph.splits[node.name]
        if len(roots) == 1:
            xs = graph.splits[roots[0]]
            table = self.table((key, xs, ys), lambda: [[one.time_ps((x,), y) for y in ys] for x in xs])
            self.put(node, (graph.variable["split", roots[0]], graph.variable["split", node.name]), table, None)
            return
        self.join(node, one, roots, ys)

    def join(self, node: Node, one: OtherNode, roots: list[str], ys: tuple[Split, ...]) -> None:
        """Each input's redistribution by a table of its own; the local work by one over the output alone."""
        graph = self.graph
        y = graph.variable["split", node.name]
        for root, shape in zip(roots, one.inputs, strict=True):
            xs = graph.splits[root]
            alone = OtherNode(node.kind, (shape,), node.shape, None, graph.grid, graph.network.dtype, graph.setting)
            table = self.table((node.kind, shape, node.shape, xs, ys), partial(_moved_table, alone, xs, ys))
            scope = graph.variable["split", root], y
            self.put(node, scope, table, None)
        local = [sum(one.pass_step(t).cost.time_ps for t in one.touches([s] * len(roots), s)) for s in ys]
        self.put(node, (y,), np.array(local, dtype=np.int64), None)

    def memory(self, root: Node) -> None:
        """Activations and error signals on one variable; with recomputation, on two."""
        graph, network = self.graph, self.graph.network
        splits = graph.splits[root.name]
        bytes_each = np.array(
            [block_elements(root.shape, s, graph.grid) * network.element_bytes for s in splits], dtype=np.int64
        )
        members = [n for n in network.nodes if graph.root.get(n.name) == root.name]
        kept = [m for m in members if is_kept(network, m, graph.setting.keep)]
        errors = len(members) if graph.setting.keep == "every" and root.kind != "input" else 0
        split = graph.variable["split", root.name]
        again = [m for m in kept if m.kind in IN_PLACE]
        total = bytes_each * (len(kept) + errors) + self.scales(members, splits)
        if not graph.setting.recompute or not again:
            self.put(root, (split,), np.zeros_like(total), total)
            return
        extra = [sum(run_again(m, int(b), graph.setting).cost.time_ps for m in again) for b in bytes_each]
        choice = _add_variable(graph, "recompute", root.name, 2)
        cost = np.stack([np.zeros_like(total), np.array(extra, dtype=np.int64)], axis=1)
        self.put(root, (split, choice), cost, np.stack([total, total - bytes_each * len(again)], axis=1))

    def scales(self, members: Sequence[Node], splits: Sequence[Split]) -> Table:
        """Bytes of normalisations' scales and shifts, their gradients and the optimizer's states, for each split."""
        graph = self.graph
        each = [
            sum(
                2 * largest(m.shape[1], 1, tuple(graph.grid.sizes[a] for a in split[1]))
                for m in members
                if m.kind == "batch_norm"
            )
            for split in splits
        ]
        states = graph.setting.optimizer_states
        found = [sum(parameter_bytes(n, graph.network.dtype, states)) for n in each]
        return np.array(found, dtype=np.int64)

    def table(self, key: object, make: Callable[[], object]) -> Table:
        if key not in self._tables:
            self._tables[key] = np.array(make(), dtype=np.int64)
        return self._tables[key]


def run_again(node: Node, block_bytes: int, setting: Setting) -> NodeStep:
    """Computing a normalisation, ReLU or dropout again in backward, on the busiest rank's block."""
    moved = (3 if node.kind == "batch_norm" else 2) * block_bytes
    return passes("backward", node.kind, "computed again", moved, setting.machine)


def is_kept(network: Network, node: Node, keep: str) -> bool:
    """Whether a node's output stays for backward."""
    if keep == "every" or node.kind == "input":
        return True
    reads = (*CONVOLUTIONS, "batch_norm", "max_pool", "softmax_loss")
    return node.kind in ("relu", "dropout") or any(r.kind in reads for r in network.readers[node.name])


def _moved_table(node: OtherNode, xs: Sequence[Split], ys: Sequence[Split]) -> list[list[int]]:
    """Picoseconds of what one input of a join moves."""

    def moved(x: Split, y: Split) -> int:
        moves = node.moves((x,), y)
        return sum(cost.time_ps for move in moves for _, cost in move.model.chain(move.src, move.dst))

    return [[moved(x, y) for y in ys] for x in xs]
