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

from convgen.algebra.grid import Grid
from convgen.emit.network import NetworkInput, Package, emit_network
from convgen.operations.bound import Bound
from convgen.plan.letters import Tensor, lay_out
from convgen.program.network import Program
from convgen.program.rows import PlacedRow
from convgen.spec.aten.describe import Described, describe
from convgen.spec.graph import Graph

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

    def package(self, *, constants: bool = False) -> Package:
        """The generated files."""
        g = self.graph
        init = {v.name: v.init for v in (*g.parameters, *g.buffers)} | {v.name: "given" for v in g.constants}
        init |= {n: "seed" for n, v in self.program.values.items() if v.kind == "buffer" and n not in init}
        return emit_network(
            NetworkInput(
                program=self.program,
                other=self.other,
                batch=g.batch,
                other_batch=other_batch(g),
                dtype=next(
                    (v.dtype for v in (*g.parameters, *g.inputs) if v.dtype.startswith(("float", "b"))), "float32"
                ),
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
        algorithm: a named one; by default the one with the grid's letters.
    Raises:
        InputError: an operator that can't be run, or an axis that no dimension carries.
    """
    described = describe(graph.at(graph.batch))
    program = _program(graph, described, grid, algorithm)
    again = describe(graph.at(other_batch(graph)))
    other = program_like(program, again)
    return CompiledNetwork(graph, described, program, other, algorithm, command=command)


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
