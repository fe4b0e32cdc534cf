"""A core group of an emulated SW26010: it runs rows of a network, and keeps an account of what it did.

A package for target sw26010 imports this file and, beside it, nodes.py and sums.py; nothing else of convgen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.network.account import Account
from convgen.sw26010.network.mesh_row import MeshRow, Run
from convgen.sw26010.network.rows import FREE, mesh_row
from convgen.sw26010.network.tasks import LoopTask, OperationTask, Task, update_task
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.target.local import one_at_a_time

Array = NDArray[Any]


class CoreGroup:
    """One rank of a network.

    Attributes:
        account: what it did since it was last cleared.
        synchronised: how often it has waited for the others of its node.
    """

    def __init__(self) -> None:
        self.account, self.synchronised = Account(), 0
        self._rows: dict[Any, MeshRow | None] = {}

    def row(self, operation: Any, way: int, at: Any, dtype: str) -> MeshRow | None:
        """A rank's part of a row on the mesh; None: the management core computes it."""
        key = operation, way, tuple(at.blocks.items()), at.inside, dtype
        if key not in self._rows:
            self._rows[key] = mesh_row(operation, way, at, dtype)
        return self._rows[key]

    def compute(self, label: str, row: MeshRow, *operands: Array) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        """A row's results, and what its gradients read."""
        return row.compute(self._runner(label, "forward"), *operands)

    def gradients(
        self, label: str, row: MeshRow, wanted: Sequence[bool], kept: Sequence[Array | None], *dys: Array
    ) -> tuple[Array | None, ...]:
        """Of a row's operands; None in the place of those that aren't wanted."""
        found = row.gradients(self._runner(label, "backward"), wanted, kept, *dys)
        return tuple(g if w else None for g, w in zip(found, wanted, strict=True))

    def loop(self, label: str, part: str, operation: str, *tensors: Array) -> None:
        """The management core has gone over these tensors."""
        if operation not in FREE:
            task = LoopTask(operation, sum(t.nbytes for t in tensors))
            self.account.add(label, part, task, task.run(*tensors)[1])

    def add(self, label: str, a: Array, b: Array) -> Array:
        """The sum of two gradients of one value, of one type."""
        dtype: Dtype = "float32" if a.dtype == np.float32 else "float64"
        return self.run(label, "backward", OperationTask(Stream("add", a.size, dtype)), a, b)

    def update(self, name: str, settings: tuple[float, float, float], *vectors: Array) -> tuple[Array, ...]:
        """A parameter after a step of SGD, and its momentum, if there is any.

        Args:
            settings: learning rate, momentum, decay.
            vectors: the parameter, its momentum and its gradient, flat.
        """
        dtype: Dtype = "float32" if vectors[0].dtype == np.float32 else "float64"
        made: Any = self.run(name, "update", update_task(vectors[0].size, settings, dtype), *vectors)
        return made if settings[1] else (made,)

    def run(self, label: str, part: str, task: Task, *operands: Array) -> Any:
        """A task's results, the only one or all of them."""
        with one_at_a_time:
            made, counts = task.run(*operands)
        self.account.add(label, part, task, counts)
        return made[0] if len(made) == 1 else made

    def _runner(self, label: str, part: str) -> Run:
        return partial(self.run, label, part)
