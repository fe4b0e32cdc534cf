"""From a network's graph to its package, on one screen.

| stage | in | out |
|---|---|---|
| read (spec/graph_file, spec/exported) | a graph file, or a PyTorch module | Graph: calls of ATen's operators |
| describe (spec/aten) | Graph | rows: operations bound to values |
| lay out (plan/letters) | rows, a grid's letters | Program: every row's roles, every value's storage, what moves |
| emit (emit/network) | Program | the package's files |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.emit.network import NetworkInput, Package, emit_network
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.plan.letters import Tensor, lay_out
from convgen.program.network import FLOATS, Program
from convgen.program.rows import PlacedRow
from convgen.spec.aten.describe import Described, describe
from convgen.spec.graph import Graph
from convgen.spec.names import did_you_mean

LETTERS = {1: ("N",), 2: ("N", "C"), 3: ("N", "C", "W"), 4: ("N", "C", "H", "W"), 5: ("N", "C", "D", "H", "W")}
OF_NUMBERS = {1: ("N",), 2: ("N", "W"), 3: ("N", "H", "W"), 4: ("N", "D", "H", "W")}  # of labels: no channels


@dataclass(frozen=True)
class CompiledNetwork:
    """A network with every decision made.

    Attributes:
        other: the same for another number of samples.
    """

    graph: Graph
    described: Described
    program: Program
    other: Program
    algorithm: str | None
    target: str = "cpu"
    command: str = ""

    @property
    def dtype(self) -> str:
        """Of what is computed: the first parameter's or input's of floats."""
        values = (*self.graph.parameters, *self.graph.inputs)
        return next((v.dtype for v in values if v.dtype in FLOATS), "float32")

    def package(self, *, constants: bool = False) -> Package:
        """The generated files."""
        g = self.graph
        init = {v.name: v.init for v in (*g.parameters, *g.buffers)} | {v.name: "constant" for v in g.constants}
        init |= {n: "seed" for n, v in self.program.values.items() if v.kind == "buffer" and n not in init}
        return emit_network(
            NetworkInput(
                program=self.program,
                other=self.other,
                batch=g.batch,
                other_batch=other_batch(g),
                dtype=self.dtype,
                device=self.target,
                sums="ordered",
                modes=g.modes,
                inputs=tuple(v.name for v in g.inputs),
                init=init,
                aliases=g.aliases,
                source=g.source,
                command=self.command,
                constants=constants,
            )
        )


def other_batch(graph: Graph) -> int:
    return 2 * graph.batch + 1


def compile_network(graph: Graph, grid: Grid, algorithm: str | None = None, *, command: str = "") -> CompiledNetwork:
    """Lay out a network by the letters of a grid.

    Args:
        algorithm: a named one; by default the one with the grid's letters; auto: of those with these letters the one
            that sends fewest bytes in a step of training.
    Raises:
        InputError: no such algorithm, an operator that can't be run, or an axis that no dimension carries.
    """
    if algorithm not in (None, "auto", *ALGORITHMS):
        names = ("auto", *ALGORITHMS)
        hint = did_you_mean(str(algorithm), names, ", ".join(names))
        raise InputError(f"there is no algorithm {algorithm}", hint=hint)
    both = sorted({v.name for v in graph.inputs} & {name for name, _ in graph.outputs})
    if both:
        fact = f"{graph.name}: {both[0]} is an input and an output; scatter and gather know them by their names"
        raise InputError(fact, hint="another key in the mapping that forward returns")
    described = describe(graph.at(graph.batch))
    if algorithm == "auto":
        letters = {a for a, n in grid.axes if n > 1}
        named = ["integrated"] if "F" in letters and letters <= set(ALGORITHMS["integrated"].letters) else []
        several = [(name, _program(graph, described, grid, name)) for name in (None, *named)]
        algorithm, program = min(several, key=lambda one: sent_in_all(one[1]))
    else:
        program = _program(graph, described, grid, algorithm)
    again = describe(graph.at(other_batch(graph)))
    other = program_like(program, again)
    return CompiledNetwork(graph, described, program, other, algorithm, command=command)


def sent_in_all(program: Program) -> int:
    """Bytes that all ranks send in a step of training."""
    return sum(sum(step["bytes_sent_per_rank"]) for steps in volume(program).values() for step in steps)


def _program(graph: Graph, described: Described, grid: Grid, algorithm: str | None) -> Program:
    inputs = {v.name for v in graph.inputs}
    tensors = [
        Tensor(t.name, t.shape, t.dtype, t.kind, _letters(t.shape, t.floats) if t.name in inputs else ())
        for t in described.tensors.values()
    ]
    return lay_out(graph.name, tensors, described.rows, graph.updates, graph.outputs, grid, algorithm)


def _letters(shape: tuple[int, ...], floats: bool) -> tuple[str, ...]:
    found = (LETTERS if floats else OF_NUMBERS).get(len(shape), ())
    return found + ("",) * (len(shape) - len(found))


def program_like(program: Program, described: Described) -> Program:
    """The same layout of a network of another number of samples."""
    rows = tuple(
        replace(row, bound=bound, derived=tuple((k, _derived(one, bound, k)) for k, one in row.derived))
        for row, bound in zip(program.rows, described.rows, strict=True)
    )
    values = {
        n: replace(v, shape=described.tensors[n].shape) if n in described.tensors else v
        for n, v in program.values.items()
    }
    return replace(program, rows=rows, values=values)


def _derived(one: PlacedRow, bound: Bound, k: int) -> PlacedRow:
    name = bound.operation.signatures[0].inputs[k].name
    operation = bound.operation.gradients[name].operation
    return replace(one, bound=replace(one.bound, operation=operation))
