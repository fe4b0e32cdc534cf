"""A rank's part of a row as tasks of its core group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from convgen.sw26010.network.tasks import Task

Array = NDArray[Any]
Run = Callable[..., Any]  # runs a task on operands, and counts: the only result, or all of them
Made = tuple[tuple[Array, ...], tuple[Array | None, ...]]  # results, and what backward reads


def _any(*operands: Array) -> bool:
    return True


@dataclass(frozen=True)
class MeshRow:
    """A rank's part of a row, on the mesh.

    Attributes:
        forward: its tasks, in order.
        backward: by operand, those of its gradient; none where it is the result's. `shared` come before them, where any
            is wanted.
        compute: results, and what backward reads, by a function that runs a task.
        gradients: of the operands that are wanted, of what was kept and of results' gradients.
        takes: whether it computes these operands; else the management core does.
    """

    forward: tuple[Task, ...]
    backward: tuple[tuple[Task, ...], ...]
    compute: Callable[..., Made]
    gradients: Callable[..., tuple[Array | None, ...]]
    shared: tuple[Task, ...] = ()
    takes: Callable[..., bool] = _any
