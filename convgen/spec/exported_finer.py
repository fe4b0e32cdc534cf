"""Operators that would run whole, decomposed into smaller ones, where torch knows how."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from convgen.operations.calls import operator_of
from convgen.spec.aten.describe import describe
from convgen.spec.graph import Graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Beside composite operators, whose gradients are those of their parts: linear ones, whose gradient can't differ either.
LINEAR = frozenset(
    {
        "addbmm", "addmv", "affine_grid_generator", "block_diag", "count_nonzero", "diag_embed", "diagonal_scatter",
        "linalg_cross", "roll", "rot90", "trace",
    }
)  # fmt: skip


def run_whole(graph: Graph) -> tuple[str, ...]:
    """Names of the operators that no row describes, one for each such call."""
    return tuple(graph.calls[n].op for n in describe(graph.at()).whole)


def finer(program: ExportedProgram, operators: Sequence[str]) -> ExportedProgram | None:
    """The program with these operators decomposed; None where torch has no decomposition of any."""
    import torch

    decompositions: Any = import_module("torch._decomp")
    known: dict[Any, Any] = {**decompositions.decomposition_table, **torch.export.default_decompositions()}
    found = [operator_of(op) for op in dict.fromkeys(operators)]
    table = {
        op: known[op] for op in found if op in known and (op._can_decompose() or op.overloadpacket.__name__ in LINEAR)
    }
    if not table:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cast("ExportedProgram", cast("Any", program).run_decompositions(table))
