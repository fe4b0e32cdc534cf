"""Layers and helpers for the tests of ranks that fail: holding a rank back, watching it, telling its error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from generate import algorithm_problem
from modules import Case, make
from torch import Tensor

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.spec.layer import Options

GUARD_S = 1800.0  # of a whole test
NEVER_S = 3000.0  # a time-out that nobody may wait for
ROWS = (Spatial("H", 9, kernel=3, pad_lo=2, pad_hi=2, dilation=2), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1))
CONV = Conv(2, 4, 6, ROWS, bias=True)
CALLS = (
    "all_gather_single", "all_gather_into_tensor", "all_gather", "all_reduce", "all_to_all_single", "reduce_scatter",
    "batch_isend_irecv", "isend", "irecv", "send", "recv", "broadcast", "barrier",
)  # fmt: skip
SEND, SHORT = "send of a group", "send by a socket"


def fault_layer(name: str, algorithm: str, grid: dict[str, int], conv: Conv = CONV, **changes: Any) -> Case:
    problem = algorithm_problem(algorithm, conv, Grid(tuple(grid.items())))
    options = {"dtype": "float64", "memory_format": "contiguous", "options": Options(), **changes}
    return make(problem, name, random.Random(name), **options)


def blocks(module: ModuleType, given: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    return {name: module.scatter(name, value, mesh) for name, value in given.items()}


def told(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def hold(until: Path) -> None:
    """Stay away until another rank has said that it is over."""
    while not until.exists():
        time.sleep(0.01)


def watch(runtime: Any) -> list[tuple[str, str]]:
    """What this process hands to torch.distributed and to sockets from now on: the calls, and their tensors' types.

    Args:
        runtime: a module's or a package's.
    """
    seen: list[tuple[str, str]] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            given = args[0] if args else None
            given = args[1][0] if name == SEND else args[2] if name == SHORT else given
            seen.append((name, str(given.dtype) if isinstance(given, Tensor) else ""))
            return call(*args, **options)

        return run

    for name in CALLS:
        if hasattr(dist, name):
            setattr(dist, name, watched(name, getattr(dist, name)))
    dist.ProcessGroup.send = watched(SEND, dist.ProcessGroup.send)  # type: ignore[method-assign]
    runtime.Meeting.send = watched(SHORT, runtime.Meeting.send)
    return seen


def _keep(made: list[Any], begin: Callable[[float], Any], timeout: float) -> None:
    made.append(begin(timeout))


def ready(begin: Callable[[float], Any], rank: int, folder: Path) -> Any:
    """begin(timeout) with the shortest time-out, from 0.5 s, that all ranks manage on a machine as busy as this one."""
    timeout, ranks = 0.5, dist.get_world_size()
    while True:
        made: list[Any] = []
        error = told(partial(_keep, made, begin, timeout))
        fine = torch.tensor(int(error == "went on"))
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if fine.item():
            return made[0]
        assert timeout < 300, error
        timeout *= 4
        # Groups that one rank has and another failed to make would part their names: begin again with none.
        dist.destroy_process_group()
        store, limit = f"file://{folder / f'within {timeout}'}", timedelta(seconds=GUARD_S)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)


def limit_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
