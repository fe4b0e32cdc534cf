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
        backward: for each operand the tasks of its gradient; none where that is the result's gradient as it is.
        shared: tasks that come before those of `backward` if any gradient is wanted.
        compute: takes a function that runs a task, and the operands; gives the results, and what backward reads.
        gradients: takes a function that runs a task, which operands want a gradient, what backward reads, and the
            results' gradients; gives the operands' gradients.
        takes: whether the mesh computes these operands; else the management core does.
    """

    forward: tuple[Task, ...]
    backward: tuple[tuple[Task, ...], ...]
    compute: Callable[..., Made]
    gradients: Callable[..., tuple[Array | None, ...]]
    shared: tuple[Task, ...] = ()
    takes: Callable[..., bool] = _any
