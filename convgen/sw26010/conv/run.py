"""Convolution on the mesh: what a plan's programs compute.

Tensors come and go in the layout of the other layers, (N, C, H, W) and (F, C, K, K) ([SW] 4.3: the transformation
between it and (R, C, N, B) is a layer of its own, layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.program.nodes import Phase
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.explicit_plan import ExplicitPlan
from convgen.sw26010.conv.implicit_plan import ImplicitPlan
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.programs import columns_program, implicit_program
from convgen.sw26010.gemm.program import gemm_program
from convgen.sw26010.gemm.run import Level
from convgen.sw26010.machine.core_group import SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts, check_account
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.mesh import Event, VectorMesh
from convgen.sw26010.machine.printing import load_program

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ConvRun:
    """The result of a phase (y, dx or dw, in the plan's dtype), and what the mesh did.

    `events` are those of the multiplications, where they were logged; `moved` what im2col or col2im counts.
    """

    result: Array
    plan: ImplicitPlan | ExplicitPlan
    counts: Counts
    ldm_bytes: int
    events: tuple[Event, ...] = ()
    moved: Counts = field(default_factory=Counts)


def operand_shapes(problem: ConvProblem, phase: Phase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two tensors that a phase reads: x, w; dy, w; x, dy."""
    x = (problem.n, problem.c, problem.h, problem.w)
    w = (problem.f, problem.c, problem.rows.kernel, problem.columns.kernel)
    y = (problem.n, problem.f, problem.h_out, problem.w_out)
    return {"forward": (x, w), "backward_data": (y, w), "backward_filter": (x, y)}[phase]


def run_conv(
    plan: ImplicitPlan | ExplicitPlan,
    first: Any,
    second: Any,
    *,
    level: Level = "fast",
    group: CoreGroup = SW26010,
    log: bool = False,
) -> ConvRun:
    """One phase on the emulated mesh.

    Args:
        first, second: x [N, C, H, W] and w [F, C, K, K] forward; dy [N, F, H_out, W_out] and w backward-data; x and
            dy backward-filter. Converted to the plan's dtype.
        level, log: as in `run_gemm`.
    Raises:
        InputError: shapes that are not the plan's. MeshFault: the program broke a rule, or its events are not those of
            the closed form.
    """
    tensors: list[Array] = []
    for given, shape in zip((first, second), operand_shapes(plan.problem, plan.phase), strict=True):
        tensor = np.array(given, dtype=plan.dtype, order="C")
        if tensor.shape != shape:
            raise InputError(f"an operand of {plan.phase} is {list(tensor.shape)}, the plan has {list(shape)}")
        tensors.append(tensor)
    if isinstance(plan, ImplicitPlan):
        done = _run_implicit(plan, tensors[0], tensors[1], _mesh(level, group, log))
    else:
        done = _run_explicit(plan, tensors[0], tensors[1], _mesh(level, group, log), group)
    check_account(f"{plan.phase} of {plan.problem}", done.counts, conv_counts(plan))
    return done


def _mesh(level: Level, group: CoreGroup, log: bool) -> MessageMesh | VectorMesh:
    return MessageMesh(group) if level == "messages" else VectorMesh(group, exact=level == "exact", log=log)


def _events(mesh: MessageMesh | VectorMesh) -> tuple[Event, ...]:
    return tuple(mesh.events) if isinstance(mesh, VectorMesh) else ()


def _run_implicit(plan: ImplicitPlan, first: Array, second: Array, mesh: MessageMesh | VectorMesh) -> ConvRun:
    data, weights = implicit_operands(plan.phase, first, second)
    out = np.zeros(plan.out_shape, plan.dtype)
    operands = [Dram(name, np.ascontiguousarray(t)) for name, t in (("X", data), ("W", weights))]
    program = load_program(implicit_program(plan, messages=isinstance(mesh, MessageMesh)))
    counts = mesh.run(program, *operands, Dram("Y", out))
    return ConvRun(implicit_result(plan.phase, out), plan, counts, mesh.ldm_bytes, _events(mesh))


def implicit_operands(phase: Phase, first: Array, second: Array) -> tuple[Array, Array]:
    """Views in the implicit plan's layouts: data [rows, cols, ni, bb], filter [taps, taps, no, ni]."""
    if phase == "forward":
        return first.transpose(2, 3, 1, 0), second.transpose(2, 3, 0, 1)
    if phase == "backward_data":
        return first.transpose(2, 3, 1, 0), second.transpose(2, 3, 1, 0)
    return first.transpose(2, 3, 0, 1), second.transpose(2, 3, 1, 0)


def implicit_result(phase: Phase, out: Array) -> Array:
    """y and dx from (R, C, N, B) to (N, C, H, W), dw from (K, K, F, C) to (F, C, K, K)."""
    return np.ascontiguousarray(out.transpose(2, 3, 0, 1) if phase == "backward_filter" else out.transpose(3, 2, 0, 1))


def _run_explicit(
    plan: ExplicitPlan, first: Array, second: Array, gemm_mesh: MessageMesh | VectorMesh, group: CoreGroup
) -> ConvRun:
    problem, dtype = plan.problem, plan.dtype
    f, columns = problem.f, problem.taps * problem.c
    messages = isinstance(gemm_mesh, MessageMesh)
    move_mesh = MessageMesh(group) if messages else VectorMesh(group)
    kind = "col2im" if plan.phase == "backward_data" else "im2col"
    move = load_program(columns_program(kind, problem, dtype, messages=messages))
    shape = {
        "forward": (problem.n, f, problem.h_out, problem.w_out),
        "backward_data": (problem.n, problem.c, problem.h, problem.w),
        "backward_filter": (f, problem.c, problem.rows.kernel, problem.columns.kernel),
    }[plan.phase]
    result = np.zeros(shape, dtype)
    matrices = np.zeros((plan.gemm.images, *(plan.columns_shape if plan.moves else (columns, 1))), dtype)
    ldm, image = 0, 0
    for gemm in (gemm for gemm, times in plan.products for _ in range(times)):
        multiply = load_program(gemm_program(gemm, messages=messages))
        part = slice(image, image + gemm.images)
        if plan.phase == "backward_data":
            made = matrices if plan.moves else result[part]
            dy, w = _matrices("dY", first[part], f), Dram("W", second.reshape(f, columns))
            gemm_mesh.run(multiply, dy, w, _matrices("COLUMNS", made, columns))
            dx = Dram("dX", result[image].reshape(problem.c * problem.h, problem.w))
            if plan.moves:
                move_mesh.run(move, Dram("COLUMNS", matrices[0]), dx)
        else:
            for matrix, x in zip(matrices, first[part], strict=False) if plan.moves else ():
                move_mesh.run(move, Dram("X", x.reshape(-1, problem.w)), Dram("COLUMNS", matrix))
            as_gemm = _matrices("COLUMNS", matrices[: gemm.images] if plan.moves else first[part], columns)
            if plan.phase == "forward":
                gemm_mesh.run(multiply, as_gemm, Dram("W", second.reshape(f, columns)), _matrices("Y", result[part], f))
            else:
                dy, dw = _matrices("dY", second[part], f), Dram("dW", result.reshape(f, columns))
                gemm_mesh.run(multiply, as_gemm, dy, dw)
        ldm = max(ldm, gemm_mesh.ldm_bytes, move_mesh.ldm_bytes)
        image += gemm.images
    counts = Counts()
    counts.add(gemm_mesh.counts)
    counts.add(move_mesh.counts)
    return ConvRun(result, plan, counts, ldm, _events(gemm_mesh), move_mesh.counts)


def _matrices(name: str, images: Array, rows: int) -> Dram:
    """Images as matrices [IMAGES, rows, PIXELS], or the one that there is."""
    return Dram(name, images.reshape(rows, -1) if len(images) == 1 else images.reshape(len(images), rows, -1))
