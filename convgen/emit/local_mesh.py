"""The part of an SW26010's module that convolves: the plans of every rank, and a function for each phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from convgen.algebra.space import Space
from convgen.emit.literals import literal
from convgen.emit.steps import LayoutNames, Lines
from convgen.errors import InputError, Note
from convgen.kernels.choose import local_problems
from convgen.kernels.problem import Problem
from convgen.operations.layer import VALUE_MADE, VALUES_READ
from convgen.program.nodes import Compute, Schedule, is_convolution
from convgen.spec.layer import Layer
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.target.plan import LocalProblem
from convgen.sw26010.target.volume import AnyPlan, plan_rank, predicted_rank

MeshPlans = dict[str, list[tuple[tuple[int, ...], AnyPlan]]]


@dataclass(frozen=True, slots=True)
class MeshConvolution:
    """A phase's function: its operands' names, and the layouts of x, w, y and of its result."""

    phase: str
    inputs: tuple[str, ...]
    summary: str
    layouts: tuple[str, str, str, str]
    bias: bool


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """What the module's templates print of the mesh; empty for other targets."""

    convolutions: tuple[MeshConvolution, ...] = ()
    plans: str = "{}"


def local_mesh(layer: Layer, schedule: Schedule, space: Space, names: LayoutNames, lines: Lines) -> LocalMesh:
    """The mesh's part of an SW26010's module. Raises InputError: the mesh's plans can't do the layer."""
    if not layer.target.is_mesh:
        return LocalMesh()
    plans = mesh_plans(layer, schedule, space)
    records = {
        phase: [{"ranks": list(ranks), **predicted_rank(plan)} for ranks, plan in found]
        for phase, found in plans.items()
    }
    steps = [s for _, s in schedule.steps() if is_convolution(s)]
    return LocalMesh(tuple(_convolution(s, names, lines) for s in steps), literal(records))


def mesh_plans(layer: Layer, schedule: Schedule, space: Space) -> MeshPlans:
    """By phase, the ranks that share a local problem, with its plan; ranks with nothing to convolve are left out.

    Raises:
        InputError: a dtype that the mesh doesn't compute, a transposed convolution, or rows that LDM can't hold.
    """
    _check(layer)
    found: MeshPlans = {}
    for _, step in schedule.steps():
        if is_convolution(step):
            ranks: dict[LocalProblem, list[int]] = {}
            for rank, problem in enumerate(local_problems(layer, schedule, space, step)):
                if all(problem.elements.values()):
                    ranks.setdefault(_local(problem), []).append(rank)
            found[step.phase] = [(tuple(r), _plan(layer, p)) for p, r in ranks.items()]
    return found


def _check(layer: Layer) -> None:
    about = (Note("layer", f"{layer.name}: {layer.kind} {layer.dtype} for target sw26010"),)
    if layer.dtype not in layer.target.dtypes:
        fact = f"the mesh computes float32 and float64, not {layer.dtype}"
        raise InputError(fact, ("dtype",), about, "dtype: float32, or target: cpu")
    if layer.conv.transposed:
        fact = f"the mesh's plans are for convolutions, {layer.kind} is a transposed one"
        raise InputError(fact, ("layer",), about, "target: cpu, or a GPU's")


def _plan(layer: Layer, problem: LocalProblem) -> AnyPlan:
    try:
        return plan_rank(problem, layer.options.core_groups)
    except InputError as error:
        w = layer.conv.spatial[-1].name
        hint = f"more ranks along {w}, an image of fewer columns, or target: cpu"
        raise InputError(error.fact, ("input",), error.notes, hint) from None


def _local(problem: Problem) -> LocalProblem:
    axes = [Axis(d.x, d.y, d.kernel, d.stride, d.below, d.dilation) for d in problem.dims]
    rows, columns = axes[-2:] if len(axes) > 1 else (Axis(1, 1, 1), axes[0])
    depth = axes[0] if len(axes) == 3 else None
    p = problem
    dtype = cast(Dtype, p.dtype)
    return LocalProblem(p.phase, p.batch, p.channels, p.filters, p.groups, rows, columns, dtype, depth)


def _convolution(step: Compute, names: LayoutNames, lines: Lines) -> MeshConvolution:
    types: dict[str, Any] = {lines.types[v].tensor: lines.types[v] for v in step.inputs} | {step.type.tensor: step.type}
    inputs = VALUES_READ[step.phase]
    bias = len(step.inputs) > 2
    result = VALUE_MADE[step.phase]
    x, w, y = (names.of(types[t]) for t in ("x", "w", "y"))
    return MeshConvolution(
        phase=step.phase,
        inputs=(*inputs, "bias") if bias else inputs,
        summary=f"{' and '.join(inputs)} -> {result}{', with its bias' if bias else ''}",
        layouts=(x, w, y, names.of(step.type)),
        bias=bias,
    )
