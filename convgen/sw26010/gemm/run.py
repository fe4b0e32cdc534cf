"""GEMM on the mesh: plan, print, run.

Source: [SW] 4.1. The paper's text swaps the buses; A goes along rows and B along columns, as its formula
C(i, j) += sum_t A(i, t) B(t, j) needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.program import gemm_program
from convgen.sw26010.machine.core_group import SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts, check_account
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram, as_matrix
from convgen.sw26010.machine.mesh import Event, VectorMesh
from convgen.sw26010.machine.printing import load_program

Level = Literal["messages", "exact", "fast"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class GemmRun:
    """C, and what it took. `stalls`: how often a CPE had to wait, where messages are emulated one by one."""

    c: Array
    plan: GemmPlan
    counts: Counts
    ldm_bytes: int
    events: tuple[Event, ...] = ()
    stalls: int = 0


def run_gemm(
    plan: GemmPlan,
    a: Any,
    b: Any,
    c: Any = None,
    *,
    level: Level = "fast",
    group: CoreGroup = SW26010,
    log: bool = False,
) -> GemmRun:
    """C + A B, or A B, computed by the emulated mesh.

    Args:
        a, b, c: matrices [M, K], [K, N], [M, N] as mathematics has them, a and b of all images one below the other;
            converted to the plan's dtype. `c` is needed when the plan accumulates, refused when not.
        level: message by message; the mesh at once in the order of the messages (`exact`, the same bits); or
            the mesh at once with a matrix product a tile.
        log: keep the events (not message by message).
    Returns:
        C [M, N] in the plan's dtype and the events of the run.
    Raises:
        InputError: shapes that don't match the plan.
        MeshFault: the program broke a rule; LdmOverflow when its buffers don't fit; AccountFault when its events are
            not the closed form's.
    """
    if plan.accumulate == (c is None):
        raise InputError(
            f"the plan {'adds to' if plan.accumulate else 'writes'} C, and C is {'not ' * (c is None)}given"
        )
    shapes = {"A": (plan.images * plan.m, plan.k), "B": (plan.images * plan.k, plan.n), "C": (plan.m, plan.n)}
    given = {"A": a, "B": b, "C": np.zeros(shapes["C"]) if c is None else c}
    turned = {"A": plan.a_transposed, "B": plan.b_transposed, "C": False}
    memory: dict[str, Array] = {}
    for name, value in given.items():
        matrix = as_matrix(name, value, plan.dtype)
        if matrix.shape != shapes[name]:
            raise InputError(f"{name} is {list(matrix.shape)}, the plan has {list(shapes[name])}")
        images = matrix.reshape(1 if name == "C" else plan.images, -1, matrix.shape[1])
        lies = np.ascontiguousarray(images if turned[name] else images.swapaxes(1, 2))
        memory[name] = lies if len(lies) > 1 else lies[0]
    operands = [Dram(name, array) for name, array in memory.items()]
    program = load_program(gemm_program(plan, messages=level == "messages"))
    c_out = memory["C"].T
    if level == "messages":
        mesh = MessageMesh(group)
        counts = mesh.run(program, *operands)
        check_account("GEMM", counts, gemm_counts(plan))
        return GemmRun(c_out, plan, counts, mesh.ldm_bytes, stalls=mesh.stalls)
    vector = VectorMesh(group, exact=level == "exact", log=log)
    counts = vector.run(program, *operands)
    check_account("GEMM", counts, gemm_counts(plan))
    return GemmRun(c_out, plan, counts, vector.ldm_bytes, tuple(vector.events))
