"""Layers for the tests of torch's tools around a module, compiled once a session, and processes to run them on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from generate import algorithm_problem
from modules import Case, make
from torch import Tensor

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.verify.processes import spawn
from convgen.verify.program import global_tensors

ROWS = (Spatial("H", 7, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1))
EVEN = Conv(4, 6, 8, ROWS, bias=True)
RAGGED = Conv(4, 5, 7, ROWS, bias=True)
GROUPED = Conv(4, 6, 9, ROWS, groups=3, bias=True)


def hash_of(*what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:6]


@cache
def layer(algorithm: str, grid: str, conv: Conv = EVEN, **changes: Any) -> Case:
    """A float64 layer of a named algorithm on a grid such as "N2 C2"."""
    axes = tuple((one[0], int(one[1:])) for one in grid.split())
    name = f"tools_{algorithm}_{grid}_{hash_of(conv, changes)}".replace("-", "_").replace(" ", "_")
    case = make(
        algorithm_problem(algorithm, conv, Grid(axes)), name, random.Random(name),
        **{"memory_format": "contiguous", "dtype": "float64", **changes},
    )  # fmt: skip
    case.module  # noqa: B018  before any fork
    return case


def single(case: Case, seed: int = 0) -> torch.nn.Module:
    """torch's own layer, as the module's Conv starts from the same seed."""
    conv = case.layer.conv
    torch.manual_seed(seed)
    kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[len(conv.spatial) - 1]
    return kind(
        conv.channels, conv.filters, [s.kernel for s in conv.spatial], stride=[s.stride for s in conv.spatial],
        padding=[s.pad_lo for s in conv.spatial], dilation=[s.dilation for s in conv.spatial],
        groups=conv.groups, bias=conv.bias, dtype=case.dtype,
    )  # fmt: skip


def on_processes(program: Callable[[int], Any], ranks: int) -> list[Any]:
    """Results of `program(rank)`; whatever a rank raises fails the test."""
    return spawn(program, ranks, 240.0)


def x_and_dy(case: Case) -> tuple[Tensor, Tensor]:
    given = global_tensors(case.layer)
    return given["x"], given["dy"]


def backward_whole(module: torch.nn.Module, case: Case) -> None:
    """Gradients of one device's layer."""
    x, dy = x_and_dy(case)
    module(x).backward(dy)


def backward_ours(module: torch.nn.Module, case: Case, mesh: Any) -> None:
    """The same gradients of the ranks' layer."""
    x, dy = x_and_dy(case)
    module(case.module.scatter("x", x, mesh)).backward(case.module.scatter("dy", dy, mesh))
