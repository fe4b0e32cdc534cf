"""Which kernel convolves in each phase of a layer: a family and a configuration that serve every rank."""

from __future__ import annotations

from math import prod

import numpy as np

from convgen.algebra.space import Box, Space
from convgen.algebra.windows import edge_padding
from convgen.kernels.config import Config, largest
from convgen.kernels.families import FAMILIES
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel
from convgen.kernels.target import Target, parse_target
from convgen.schedule.forms import boxes, parts
from convgen.schedule.nodes import Convert, Convolve, Schedule, Step
from convgen.spec.layer import Layer


def choose_kernels(layer: Layer, schedule: Schedule, space: Space) -> tuple[Kernel, ...]:
    """A kernel for each convolution, in the order of the schedule."""
    target = parse_target(layer.target)
    steps = [s for _, s in schedule.steps() if isinstance(s, Convolve)]
    return tuple(choose(local_problems(layer, schedule, space, step), target) for step in steps)


def choose(problems: tuple[Problem, ...], target: Target) -> Kernel:
    """The first family, in the order of FAMILIES, that can all ranks' problems; sized for the one with most to do."""
    for family in FAMILIES:
        if all(family.refusal(p, target) is None for p in problems):
            config: Config = family.default(largest(problems), target)
            return Kernel(problems, config, target)
    raise AssertionError("the pointer family or ATen takes every problem")


def local_problems(layer: Layer, schedule: Schedule, space: Space, step: Convolve) -> tuple[Problem, ...]:
    """What each rank convolves in a step."""
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
        _problem(
            layer, step, {t: box[rank] for t, box in frames.items()}, counts, None if rims is None else int(rims[rank])
        )
        for rank in range(space.grid.ranks)
    )


def _parts(schedule: Schedule, space: Space, value: str, made: dict[str, Step]) -> int:
    """In how many parts a value comes."""
    types, step = schedule.types(), made[value]
    if isinstance(step, Convert):
        cut, over = types[step.source], step.over
    else:
        (reader,) = (s for s in made.values() if isinstance(s, Convert) and s.source == value)
        cut, over = reader.type, reader.over
    assert parts(space, types[value], cut, over)
    return space.grid.over(over)


def _problem(layer: Layer, step: Convolve, frames: dict[str, Box], counts: dict[str, int], rim: int | None) -> Problem:
    extent = {t: np.maximum(box[:, 1] - box[:, 0], 0) for t, box in frames.items()}
    conv = layer.conv
    groups = max(1, int(extent["x"][1]) // max(1, int(extent["w"][1]))) if conv.groups > 1 else 1
    if conv.groups > 1 and not extent["x"][1]:  # a rank without a group: w's channels say nothing
        extent["w"] = np.zeros_like(extent["w"])
    dims: list[LocalDim] = []
    for i, s in enumerate(conv.spatial):
        x, y = frames["x"][2 + i], frames["y"][2 + i]
        below, _ = edge_padding(s, int(x[0]), int(x[1]), int(y[0]), int(y[1]))
        rows_x, rows_y = int(extent["x"][2 + i]), int(extent["y"][2 + i])
        dims.append(LocalDim(s.name, rows_x, rows_y, s.kernel, s.stride, s.dilation, int(below)))
    return Problem(
        phase=step.phase,
        batch=int(extent["x"][0]),
        channels=int(extent["w"][1]) // counts["x"],
        filters=int(extent["w"][0]) // groups // counts["y"],
        groups=groups,
        dims=tuple(dims),
        dtype=layer.dtype,
        memory_format=layer.memory_format,
        bias="bias" in step.inputs,
        x_parts=counts["x"],
        y_parts=counts["y"],
        rim=rim,
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
