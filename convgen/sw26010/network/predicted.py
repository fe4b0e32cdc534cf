"""What a rank's core group will run in a training step, row by row, from the compiled program: the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from convgen.algebra.blocks import span
from convgen.algebra.index_sets import volume
from convgen.errors import InternalError
from convgen.operations.autocast import usual_types
from convgen.operations.row import At, made_here, read_here
from convgen.program.flow import Start
from convgen.program.lower import lower
from convgen.program.network import Moved, Program, label
from convgen.program.rows import PlacedRow, at_rank, index_sets
from convgen.program.steps import NOTHING, Step
from convgen.spec.graph import FLOATS
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.network.account import Parts
from convgen.sw26010.network.nodes import nodes_of
from convgen.sw26010.network.rows import FREE, mesh_row
from convgen.sw26010.network.sums import LABEL, PART, sum_tasks
from convgen.sw26010.network.tasks import LoopTask, OperationTask, Task, update_task
from convgen.sw26010.operations.stream import Stream

Settings = tuple[float, float, float]


def predicted_parts(
    program: Program, rank: int, modes: Sequence[str], *, of_inputs: bool = False, sgd: Settings | None = None
) -> Parts:
    """Tasks by row and part, as an account has them after a step of training.

    Args:
        of_inputs: whether inputs want gradients, too.
        sgd: learning rate, momentum and decay of an update of all parameters; None without one.
    """
    return _Predicted(program, rank).parts(modes, of_inputs=of_inputs, sgd=sgd)


class _Predicted:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        known = next((v.dtype for v in program.values.values() if v.dtype in FLOATS), "float32")
        self.dtype: Dtype = "float64" if known == "float64" else "float32"
        self.rows: dict[str, PlacedRow] = {label(row): row for row in program.rows}
        for row in program.rows:
            names = row.signature.inputs
            self.rows |= {f"{label(row)}.d{names[k].name}": one for k, one in row.derived}

    def parts(self, modes: Sequence[str], *, of_inputs: bool, sgd: Settings | None) -> Parts:
        found: Parts = {}
        lowered = lower(self.program, of_inputs=of_inputs, modes=modes)
        for step in (*lowered.forward, *lowered.backward):
            if step.when is not None and not step.when[1]:
                continue  # of evaluation
            for part, tasks in self._of_step(step):
                if tasks:
                    found.setdefault((LABEL if part == PART else step.key, part), []).extend(tasks)
        wanted = {step.key for step in lowered.backward if step.kind == "gradient"}
        for name, value in self.program.values.items() if sgd else ():
            is_renewed = value.kind == "parameter" and name in wanted
            if is_renewed and value.dtype in FLOATS and sgd and (elements := self._stored(name)):
                found[name, "update"] = [update_task(elements, sgd, self.dtype)]
        return found

    def _of_step(self, step: Step) -> list[tuple[str, list[Task]]]:
        match step.kind:
            case "forward":
                return [("forward", self._forward(self.rows[step.key]))]
            case "vjp":
                return [("backward", self._backward(self.rows[step.key], step))]
            case "add":
                elements = self._stored(step.key.removesuffix(".grad"))
                return [("backward", [OperationTask(Stream("add", elements, self.dtype))] if elements else [])]
            case "interior" | "boundary" | "chunk" | "vjp_interior" | "vjp_boundary" | "vjp_chunk":
                raise InternalError(f"{step.key} is computed in pieces, which no closed form counts")
            case "store" | "back" | "fetch" | "given" | "start_bucket":
                return [(PART, self._sum(step))]
            case _:
                return []

    def _sum(self, step: Step) -> list[Task]:
        """Tasks of a step that sums over ranks. Whatever else moves is the transport's, which has no tasks."""
        moved = step.flow.moved if isinstance(step.flow, Start) else (step.flow,)
        kinds = [m for m in moved if isinstance(m, Moved) and m.conversion.kind == "all_reduce"]
        if not kinds or not self._is_float(step):
            return []
        grid, over = self.program.grid, kinds[0].conversion.over
        held = (volume(index_sets(m.placed.signature, grid).held(m.conversion.src))[self.rank] for m in kinds)
        elements = sum(int(n) for n in held)
        nodes = nodes_of(grid.sizes).split(grid.group(self.rank, over))
        return sum_tasks(nodes, self.rank, elements, self.dtype) if elements else []

    def _is_float(self, step: Step) -> bool:
        flow = step.flow
        return not isinstance(flow, Moved) or self.program.dtype_of(flow) in FLOATS

    def _forward(self, row: PlacedRow) -> list[Task]:
        at = at_rank(row, self.program.grid, self.rank)
        if self._is_nothing(row, at):
            return []
        operation = row.bound.operation
        known = mesh_row(operation, row.way, at, self.dtype) if self._reads_floats(row) else None
        if known is not None:
            return list(known.forward)
        name = type(operation).__name__
        bytes_ = self._read(row, at) + self._made(row, at)
        return [] if name in FREE else [LoopTask(name, bytes_)]

    def _backward(self, row: PlacedRow, step: Step) -> list[Task]:
        at = at_rank(row, self.program.grid, self.rank)
        if self._is_nothing(row, at):
            return []
        operation, wanted = row.bound.operation, [made != NOTHING for made in step.makes]
        known = mesh_row(operation, row.way, at, self.dtype)
        if known is not None:
            own = [task for tasks, asked in zip(known.backward, wanted, strict=False) if asked for task in tasks]
            return [*known.shared, *own]
        name, size = type(operation).__name__, np.dtype(self.dtype).itemsize
        given = zip(row.signature.results, step.reads[1:], strict=True)
        dys = sum(prod(made_here(at, r)) * size for r, slot in given if slot != NOTHING)
        found = sum(prod(read_here(at, k)) * size for k, asked in enumerate(wanted) if asked)
        return [] if name in FREE else [LoopTask(name, dys + found)]

    def _is_nothing(self, row: PlacedRow, at: At) -> bool:
        """As the runtime has it: a rank without elements computes nothing."""
        read = (prod(read_here(at, k)) for k in range(len(row.signature.inputs)))
        made = (prod(made_here(at, r)) for r in row.signature.results)
        return not (row.signature.runs_empty or (all(read) and all(made)))

    def _reads_floats(self, row: PlacedRow) -> bool:
        """Whether an operand is of floats: a row of whole numbers alone is a loop. Gradients are of floats."""
        kinds = (self.program.values[name].dtype for name in row.bound.reads if name in self.program.values)
        return any(name not in self.program.values for name in row.bound.reads) or any(kind in FLOATS for kind in kinds)

    def _size(self, name: str, usual: str) -> int:
        value = self.program.values.get(name)
        return np.dtype(value.dtype if value is not None else usual).itemsize

    def _read(self, row: PlacedRow, at: At) -> int:
        return sum(prod(read_here(at, k)) * self._size(v, self.dtype) for k, v in enumerate(row.bound.reads))

    def _made(self, row: PlacedRow, at: At) -> int:
        results = row.signature.results
        usual = usual_types(results, [self.dtype])
        named = zip(results, row.bound.makes, usual, strict=True)
        return sum(prod(made_here(at, r)) * self._size(v, kind) for r, v, kind in named)

    def _stored(self, name: str) -> int:
        """Elements of a value that the rank stores."""
        value, grid = self.program.values[name], self.program.grid
        at, sizes = grid.at(self.rank), grid.sizes
        blocks = (
            span(n, 1, tuple(sizes[a] for a in axes), tuple(at[a] for a in axes), 0)
            for n, axes in zip(value.shape, value.stored, strict=True)
        )
        return prod(hi - lo for lo, hi in blocks)
