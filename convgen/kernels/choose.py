"""Which kernel convolves in each phase of a layer: a family and a configuration that serve every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from types import MappingProxyType

import numpy as np

from convgen.algebra.conv import Conv
from convgen.algebra.index_sets import Box
from convgen.algebra.space import Space
from convgen.algebra.windows import edge_padding
from convgen.errors import InputError
from convgen.kernels.box_tiles import is_paired, parts_together
from convgen.kernels.config import Config, largest, parse_config
from convgen.kernels.estimate import data_sheet, estimated_s
from convgen.kernels.families import FAMILIES, Family, families, family, of_gpu, stem, widened
from convgen.kernels.families.box import by_sample
from convgen.kernels.inner import ArrangedWords
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.rates import RATES
from convgen.kernels.source import Kernel
from convgen.program.forms import boxes, parts
from convgen.program.nodes import Compute, Convert, Phase, Schedule, Step, is_convolution
from convgen.spec.layer import Layer
from convgen.spec.target import Target


def choose_kernels(layer: Layer, schedule: Schedule, space: Space) -> tuple[Kernel, ...]:
    """A kernel for each convolution, in the order of the schedule: the layer's own choice, or the default.

    Raises:
        InputError: a kernel that the layer names can't do what a rank has to.
    """
    target, pinned = layer.known_target(), dict(layer.options.kernels)
    steps = [s for _, s in schedule.steps() if is_convolution(s)]
    made: list[Kernel] = []
    for step in steps:
        problems = local_problems(layer, schedule, space, step)
        text = pinned.get(step.phase)
        made.append(choose(problems, target) if text is None else _pinned(text, step.phase, problems, target))
    return tuple(made)


def choose(problems: tuple[Problem, ...], target: Target) -> Kernel:
    """A kernel of the first family that can do all ranks' problems; its sizes are for the rank with most to do, if they
    serve the others, too.

    The least estimated time decides where channels are not last, where elements have 4 bytes, and where filters or
    channels are few: whether it pays to make channels last, to copy by 4 bytes what must lie by the summed index, or to
    make blocks of pixels, depends on how much there is to convolve. On a CPU the kernel is ATen's plain call, also
    where a rank has nothing to do.
    """
    if target.is_cpu:
        return Kernel(problems, Config("aten", warps=0, stages=0), target)
    problem = largest(problems)
    able = [made for made in FAMILIES if all(made.refusal(p, target) is None for p in problems)]
    first, config = next((made, c) for made in able if (c := _default(made, problems, target)) is not None)
    if target.arch not in RATES or problem.dtype == "float64":
        return Kernel(problems, config, target)
    rest = able[able.index(first) + 1 :]
    if problem.channels_last and problem.element_bytes != 4:
        rest = [made for made in rest if first is stem or made is widened]
    found = [config, *(c for made in rest if (c := _default(made, problems, target)) is not None)]
    if len(found) == 1:
        return Kernel(problems, config, target)
    device = data_sheet(target, problem.dtype)

    def seconds(config: Config) -> float:
        done = of_gpu(config).work(problem, config)
        return estimated_s(problem, config, done, target, device) if done else inf

    return Kernel(problems, min(found, key=seconds), target)


def _default(made: Family, problems: Sequence[Problem], target: Target) -> Config | None:
    """A family's default for the rank with most to do; if it does not serve all ranks, another rank's that does."""
    for p in dict.fromkeys((largest(problems), *problems)):
        config = made.default(p, target)
        if misfit(config, config, problems, target) is None:
            return config
    return None


def _pinned(text: str, phase: str, problems: tuple[Problem, ...], target: Target) -> Kernel:
    """The kernel that a layer names by its text."""
    path = ("options", "kernels", phase)
    try:
        config = parse_config(text)
    except InputError as error:
        raise InputError(error.fact, path, hint=error.hint) from None
    made = family(config.family, target)
    if made is None:
        known = ", ".join(f.NAME for f in families(target))
        raise InputError(f"{config.family} is no family of kernels for {target}", path, hint=f"one of {known}")
    problem = largest(problems)
    busy = [p for p in problems if p.flops] or [problem]
    for p in busy if target.is_cpu else problems:  # where a rank has nothing to do a CPU's module calls no kernel
        if (why := made.refusal(p, target)) is not None:
            fact = f"{config.family} can't {phase} here: {why}"
            raise InputError(fact, path, hint="another family, or no word on this phase")
    example = made.default(problem, target)
    if (why := misfit(config, example, busy, target)) is not None:
        usual = _default(made, busy, target)
        hint = "another family, or no word on this phase" if usual is None else f"e.g. {usual}"
        raise InputError(f"{text!r} is no kernel of {config.family}: {why}", path, hint=hint)
    return Kernel(problems, config, target)


def misfit(config: Config, example: Config, problems: Sequence[Problem], target: Target) -> str | None:
    """Words for what is wrong with a configuration's numbers; None if nothing is.

    Args:
        example: the family's default for these problems, one a rank.
    """
    if target.is_cpu:
        return _cpu_misfit(config, example, problems)
    if config.family == "aten":
        return None if set(config.tile) <= {"last"} else "it wants nothing, or last=0 or last=1"
    if set(config.tile) != set(example.tile):
        return f"it wants {', '.join(example.tile)}"
    numbers = {**config.tile, "warps": config.warps}
    if bad := [n for n, v in numbers.items() if v < 1 or v & (v - 1)]:
        return f"{bad[0]}={numbers[bad[0]]} is no power of two"
    if config.warps > 32 or not 1 <= config.stages <= 8 or config.split < 1:
        return "at most 32 warps, 1 to 8 stages, a split of 1 or more"
    return _boxes_misfit(config, problems) if "TN" in config.tile else None


def _boxes_misfit(config: Config, problems: Sequence[Problem]) -> str | None:
    """Words for the rank whose channels, or filters, boxes of this size can't cut; None if there is none."""
    words = [of_gpu(config).words(p)(p) for p in dict.fromkeys(problems)]
    inner = [w.inner if isinstance(w, ArrangedWords) else w.problem for w in words]
    for p in inner:
        pairs = p.phase != "backward_data" and is_paired(p.dims[-1])
        if pairs and p.channels % config.tile["BC"]:
            return f"BC={config.tile['BC']} does not divide {p.channels} channels, behind which the next row's lie"
        if config.tile["TN"] > 1 and by_sample(p):
            return f"TN={config.tile['TN']}, where the next part's samples lie behind a part's: TN=1"
    if len({parts_together(p, config) for p in inner}) > 1:
        filters = " and ".join(str(n) for n in sorted({p.filters for p in inner}))
        return f"BF={config.tile['BF']} holds other numbers of parts of {filters} filters"
    return None


def _cpu_misfit(config: Config, example: Config, problems: Sequence[Problem]) -> str | None:
    """Words for what is wrong with numbers that arrange ATen's calls; None if nothing is."""
    usual = example.tile
    if config.tile.keys() != usual.keys() or config.warps or config.stages or config.split != 1:
        return f"it wants {', '.join(usual) or 'no numbers'}"
    fixed: dict[str, str] = {}  # numbers that must have their usual value, and why
    if any(p.groups > 1 for p in problems):
        fixed |= dict.fromkeys(("C", "F", "cut"), "groups' channels lie side by side")
    if problems[0].phase == "backward_filter" and problems[0].element_bytes == 2:
        fixed |= dict.fromkeys(("samples", "whole"), "sums of pieces would round twice")
    if len(problems[0].dims) == 1:
        fixed["last"] = "one dimension has one memory format"
    for name, value in config.tile.items():
        if value > 1 if name in ("last", "whole") else not value and usual[name]:
            return f"{name}={value}"
        if name in fixed and value != usual[name]:
            return f"{name}={value}, where {fixed[name]}"
    return None


def local_problems(layer: Layer, schedule: Schedule, space: Space, step: Compute) -> tuple[Problem, ...]:
    """The local problem of each rank in a step."""
    types, forms = schedule.types(), schedule.forms()
    made: dict[str, Step] = {s.result: s for _, s in schedule.steps()}
    operands = {types[v].tensor: types[v] for v in step.inputs} | {step.type.tensor: step.type}
    frames = {t: space.frame(operands[t]) for t in ("x", "w", "y")}
    counts = {"x": 1, "y": 1}
    rims = np.zeros(space.grid.ranks, dtype=np.int64) if step.own else None
    for value in (*step.inputs, step.result):
        form, source = forms.get(value), made.get(value)
        if form == "rim" and isinstance(source, Convert):
            found = boxes(space, types[source.source], source.type, source.over)
            assert found is not None
            rims = found
        elif form == "parts":
            counts[types[value].tensor] = _parts(schedule, space, value, made)
    return tuple(
        replace(
            plain_problem(
                layer.conv,
                step.phase,
                {t: box[rank] for t, box in frames.items()},
                layer.dtype,
                layer.memory_format,
                counts,
            ),
            bias="bias" in step.inputs,
            rim=None if rims is None else int(rims[rank]),
        )
        for rank in range(space.grid.ranks)
    )


def _parts(schedule: Schedule, space: Space, value: str, made: dict[str, Step]) -> int:
    """The number of parts, along channels, in which a value comes."""
    types, step = schedule.types(), made[value]
    if isinstance(step, Convert):
        cut, over = types[step.source], step.over
    else:
        (reader,) = (s for s in made.values() if isinstance(s, Convert) and s.source == value)
        cut, over = reader.type, reader.over
    assert parts(space, types[value], cut, over)
    return space.grid.over(over)


def plain_problem(
    conv: Conv,
    phase: Phase,
    frames: Mapping[str, Box],
    dtype: str,
    memory_format: str,
    parts: Mapping[str, int] = MappingProxyType({"x": 1, "y": 1}),
) -> Problem:
    """The problem of a rank with these frames of x, w and y in a phase, without bias and rim.

    A transposed convolution's problem is that of the convolution of the same sum, whose x its forward makes.

    Args:
        parts: in how many parts the channels of x and the filters of y come.
    """
    phase = conv.direct_phase(phase)
    frames = {conv.direct_tensor(t): box for t, box in frames.items()}
    parts = {conv.direct_tensor(t): count for t, count in parts.items()}
    extent = {t: np.maximum(box[:, 1] - box[:, 0], 0) for t, box in frames.items()}
    groups = max(1, int(extent["x"][1]) // max(1, int(extent["w"][1]))) if conv.groups > 1 else 1
    if conv.groups > 1 and not extent["x"][1]:  # a rank without a group: its frame of w has no channels to count
        extent["w"] = np.zeros_like(extent["w"])
    dims: list[LocalDim] = []
    for i, s in enumerate(conv.spatial):
        x, y = frames["x"][2 + i], frames["y"][2 + i]
        below, _ = edge_padding(s.taps, int(x[0]), int(x[1]), int(y[0]), int(y[1]))
        rows_x, rows_y = int(extent["x"][2 + i]), int(extent["y"][2 + i])
        dims.append(LocalDim(s.name, rows_x, rows_y, s.kernel, s.stride, s.dilation, int(below)))
    return Problem(
        phase=phase,
        batch=int(extent["x"][0]),
        channels=int(extent["w"][1]) // parts["x"],
        filters=int(extent["w"][0]) // groups // parts["y"],
        groups=groups,
        dims=tuple(dims),
        dtype=dtype,
        memory_format=memory_format,
        x_parts=parts["x"],
        y_parts=parts["y"],
    )


def describe(problem: Problem) -> str:
    """One line: N C F rows K S d P, groups, parts and rim."""
    rows = "x".join(f"{d.x}" for d in problem.dims)
    outs = "x".join(f"{d.y}" for d in problem.dims)
    taps = "x".join(f"{d.kernel}" for d in problem.dims)
    words = [f"N={problem.batch} C={problem.channels * problem.x_parts} F={problem.filters * problem.y_parts}"]
    words += [f"x {rows} y {outs} K={taps}"]
    words += [f"S={max(d.stride for d in problem.dims)}"] if prod(d.stride for d in problem.dims) > 1 else []
    words += [f"groups={problem.groups}"] if problem.groups > 1 else []
    words += [f"x in {problem.x_parts} parts"] if problem.x_parts > 1 else []
    words += [f"y in {problem.y_parts} parts"] if problem.y_parts > 1 else []
    words += ["halo in boxes"] if problem.rim is not None else []
    return " ".join([*words, problem.dtype, problem.memory_format])
