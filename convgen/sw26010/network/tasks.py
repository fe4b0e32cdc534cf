"""What a core group does for a row: programs of the mesh, and loops of the management core.

A task runs on arrays and counts; `counts` are the same events by closed form, and `seconds` their price in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.gemm.cost import gemm_seconds, search_blocks
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.plan import Dtype, GemmPlan
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import Operation, operation_seconds, run_operation
from convgen.sw26010.target.local import Processor
from convgen.sw26010.target.plan import LocalProblem
from convgen.sw26010.target.volume import plan_rank, predicted_rank

Array = NDArray[Any]


class Task(Protocol):
    """Something that a core group does at once. Frozen: equal tasks count the same."""

    @property
    def kind(self) -> str:
        """The name under which reports add it up."""
        ...

    @property
    def counts(self) -> Counts: ...

    @property
    def seconds(self) -> float: ...

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        """Results, and what was counted. Raises MeshFault: the program broke a rule."""
        ...


@dataclass(frozen=True)
class ConvolutionTask:
    """A phase of a convolution, by the plan that the cost model finds faster ([SW] 4.2, 6.1).

    Operands as `Processor.convolve` takes them.
    """

    problem: LocalProblem
    kind = "convolution"

    @cached_property
    def _account(self) -> dict[str, Any]:
        return predicted_rank(plan_rank(self.problem, 1))

    @property
    def counts(self) -> Counts:
        return _counts_of(self._account)

    @property
    def seconds(self) -> float:
        return self._account["seconds"]

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        processor, (first, second) = Processor(), operands
        made = processor.convolve(self.problem, first, second)
        return (made,), _counts_of(processor.report[self.problem.phase])


def _counts_of(account: dict[str, Any]) -> Counts:
    """An account's events (target/plan.py)."""
    names = ("putr", "putc", "getr", "getc", "vmad", "vadd", "convert", "shuffle", "cycles")
    get, put = ({int(b): n for b, n in account[f"{way}_bytes_by_block"].items()} for way in ("get", "put"))
    counts = Counts(**{name: account[name] for name in names}, get=get, put=put)
    counts.get_ops, counts.put_ops = account["get_operations"], account["put_operations"]
    return counts


@dataclass(frozen=True)
class ProductTask:
    """C[rows, columns] = A B of matrices in memory row by row, by the blocked GEMM ([SW] 4.1).

    Vectors run along C's columns, which lie together: the mesh computes C^T = B^T A^T of column-major matrices.

    Args:
        turned: for A and for B, whether memory has the transpose: A as [inner, rows], B as [columns, inner].
    """

    rows: int
    columns: int
    inner: int
    turned: tuple[bool, bool]
    dtype: Dtype
    kind = "inner product"

    @cached_property
    def plan(self) -> GemmPlan:
        """The fastest blocks by the model."""
        a, b = self.turned
        smallest = GemmPlan(
            m=self.columns, n=self.rows, k=self.inner, bm=32, bn=8, bk=8, dtype=self.dtype, accumulate=False,
            a_transposed=b, b_transposed=a,
        )  # fmt: skip
        return search_blocks(smallest, taken_rates(), 32)

    @property
    def counts(self) -> Counts:
        return gemm_counts(self.plan)

    @property
    def seconds(self) -> float:
        return gemm_seconds(self.plan, taken_rates())

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        a, b = (t.T if turned else t for t, turned in zip(operands, self.turned, strict=True))
        done = run_gemm(self.plan, b.T, a.T)
        return (np.ascontiguousarray(done.c.T),), done.counts


@dataclass(frozen=True)
class OperationTask:
    """An operation of convgen/sw26010/operations."""

    operation: Operation
    kind: str = "element by element"

    @property
    def counts(self) -> Counts:
        return self.operation.cost()

    @property
    def seconds(self) -> float:
        return operation_seconds(self.operation, taken_rates())

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        made, counts = run_operation(self.operation, *operands)
        return tuple(made[place.name] for place in self.operation.writes), counts


@dataclass(frozen=True)
class LoopTask:
    """A loop of the management core over whole tensors: what has no program of the mesh.

    Its bytes take their time at the 9.9 GB/s of [SW] Principle 2. The task computes nothing: who runs it does, and says
    how many bytes that takes.
    """

    name: str
    bytes: int
    kind = "management core"

    @property
    def counts(self) -> Counts:
        return Counts(loops=1, loop_bytes=self.bytes)

    @property
    def seconds(self) -> float:
        return self.bytes / taken_rates().group.copy_bytes_per_s

    def run(self, *operands: Array) -> tuple[tuple[Array, ...], Counts]:
        return (), Counts(loops=1, loop_bytes=sum(t.nbytes for t in operands))


def update_task(elements: int, settings: tuple[float, float, float], dtype: Dtype) -> OperationTask:
    """A step of SGD: learning rate, momentum and decay."""
    rate, momentum, decay = settings
    stream = Stream("momentum", elements, dtype, (rate, momentum, decay))
    plain = Stream("sgd", elements, dtype, (rate, decay))
    return OperationTask(stream if momentum else plain, "update")
