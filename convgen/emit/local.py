"""The part of a GPU's module that convolves: kernels, and for each phase the function that calls its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.emit.steps import LayoutNames, Lines
from convgen.kernels.add import add_source
from convgen.kernels.choose import describe
from convgen.kernels.config import alignment
from convgen.kernels.pack import copy_name, copy_source
from convgen.kernels.source import Kernel, launch_source, reads_boxes
from convgen.operations.convolution import READS
from convgen.operations.layer import convolution
from convgen.program.nodes import Compute, Convert, Schedule, is_convolution


@dataclass(frozen=True, slots=True)
class Convolution:
    """A phase's function: its operands' names, and how its result is allocated.

    Its kernel is a convolution's, for which x is the fine activation and y the coarse one, also in a transposed layer.
    """

    name: str
    phase: str  # the kernel's
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]  # the inputs in the kernel's order
    operands: tuple[str, str, str]  # the names of the kernel's x, w and y
    summary: str
    allocate: str
    layouts: tuple[str, str, str]
    x_parts: int
    y_parts: int
    rim: str
    surrounded: str  # the operand that has a rim
    sliced: tuple[str, ...]  # operands that are views of a larger tensor
    aligned: tuple[str, ...]  # tensors that the kernel expects to begin at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class LocalKernels:
    """The text of a layer's kernels that the module's templates print; empty for a CPU."""

    launch: str = ""
    kernels: tuple[str, ...] = ()
    convolutions: tuple[Convolution, ...] = ()
    rims: bool = False
    copied: tuple[str, ...] = ()
    copy_kernels: str = ""
    copy_choice: str = ""
    add_kernel: str = ""


def local_kernels(
    schedule: Schedule, names: LayoutNames, lines: Lines, kernels: Sequence[Kernel], sums: str
) -> LocalKernels:
    """The sources of kernels for a GPU's module; `sums` is the layer's option."""
    if not kernels:
        return LocalKernels()
    dtype = kernels[0].problem.dtype
    steps = [s for _, s in schedule.steps() if is_convolution(s)]
    copied = copied_tensors(schedule)
    ranks = sorted({copy_dims(t, len(kernels[0].problem.dims)) for t in copied})
    by_rank = ", ".join(f"{n}: {copy_name(n)}" for n in ranks)
    choice = copy_name(ranks[0]) if len(ranks) == 1 else f"{{{by_rank}}}[len(extents) + 1]"
    return LocalKernels(
        launch=launch_source(kernels),
        kernels=tuple(k.source().rstrip("\n") for k in kernels),
        convolutions=tuple(_convolution(s, names, lines, k) for s, k in zip(steps, kernels, strict=True)),
        rims=any(s.own for s in steps),
        copied=copied,
        copy_kernels="\n\n".join(copy_source(n) for n in ranks).rstrip("\n"),
        copy_choice=choice if ranks else "",
        add_kernel=add_source(dtype) if summed_steps(schedule, sums, dtype) else "",
    )


def copied_tensors(schedule: Schedule) -> tuple[str, ...]:
    """Tensors that some conversion may have to pack or unpack."""
    forms, found = schedule.forms(), set[str]()
    for _, step in schedule.steps():
        if isinstance(step, Convert) and step.kind not in ("slice", "all_reduce"):
            unpacked = step.kind == "all_gather" and step.form == "parts"
            packed = step.kind == "reduce_scatter" and forms.get(step.source) == "parts"
            if not unpacked and not packed:
                found.add(step.type.tensor)
    return tuple(sorted(found))


def summed_steps(schedule: Schedule, sums: str, dtype: str) -> tuple[tuple[str, Convert], ...]:
    """The conversions whose addends a rank adds itself, in rank order, with their phases.

    Two addends in the type in which they are added give the same sum in any order, so the backend reduces them.
    """

    def adds(step: Convert) -> bool:
        wide = dtype not in ("bfloat16", "float16")
        return step.kind == "reduce_scatter" or (
            step.kind == "all_reduce" and (schedule.grid.over(step.over) > 2 or not wide)
        )

    if sums != "ordered":
        return ()
    return tuple((phase, s) for phase, s in schedule.steps() if isinstance(s, Convert) and adds(s))


def copy_dims(tensor: str, spatial: int) -> int:
    """The number of dimensions of a copy of a tensor's boxes: w's taps are one dimension."""
    return {"w": 3, "bias": 1}.get(tensor, 2 + spatial)


def _convolution(step: Compute, names: LayoutNames, lines: Lines, kernel: Kernel) -> Convolution:
    conv, phase = lines.conv, kernel.problem.phase
    types = {lines.types[v].tensor: lines.types[v] for v in step.inputs} | {step.type.tensor: step.type}
    result, bias = names.of(step.type), ("bias",) if kernel.problem.bias else ()
    row = convolution(conv, step.phase)
    called = zip(row.tensors, (*row.reads, "out"), strict=True)
    of_kernel = {conv.direct_tensor(t): name for t, name in called}
    inputs, arguments = row.reads + bias, tuple(of_kernel[t] for t in READS[phase]) + bias
    rims = [lines.sources[v] for v in step.inputs if lines.forms.get(v) == "rim"]
    flat = f"{inputs[0]}.new_empty(math.prod(here.shape({result})))"
    return Convolution(
        name=step.operation,
        phase=phase,
        inputs=inputs,
        arguments=arguments,
        operands=(of_kernel["x"], of_kernel["w"], of_kernel["y"]),
        summary=describe(kernel.problem),
        allocate=flat if step.form == "parts" else f"here.empty({result}, {inputs[0]})",
        layouts=(names.of(types[conv.fine]), names.of(types["w"]), names.of(types[conv.coarse])),
        x_parts=kernel.problem.x_parts,
        y_parts=kernel.problem.y_parts,
        rim=lines.rim(rims[0]) if rims else "",
        surrounded=of_kernel["y" if phase == "backward_data" else "x"],
        sliced=tuple(
            name
            for name, v in zip(inputs, step.inputs, strict=False)
            if v in lines.sources and lines.sources[v].kind == "slice"
        ),
        aligned=aligned_tensors(kernel, arguments),
    )


def aligned_tensors(kernel: Kernel, arguments: Sequence[str]) -> tuple[str, ...]:
    """The kernel's arguments that it expects to begin at a multiple of 16 bytes; `rim` is the buffer of a rim.

    The copy engine gets boxes of memory by their start. Where rows lie in a block and a rim, the kernel tells Triton
    what pointers are multiples of. Elsewhere it tells that of offsets, and Triton sees itself where a tensor begins.
    """
    if reads_boxes([kernel]):
        rim = ("rim",) if kernel.problem.rim is not None else ()
        return (*(name for name in arguments if name != "bias"), *rim)
    phase = kernel.problem.phase
    if kernel.problem.rim is not None and alignment(kernel.problems, "y" if phase == "backward_data" else "x") > 1:
        return (arguments[phase == "backward_filter"], "rim")
    return ()
