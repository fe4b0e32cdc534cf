"""ATen's convolution (cuDNN, MIOpen, oneDNN) as a family like the others: a candidate when kernels are tuned.

It allocates its result, which is copied to where the kernel's should be; a module whose kernel it is pays for that.
"""

from __future__ import annotations

from collections.abc import Iterator

from convgen.kernels.config import Config
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words
from convgen.spec.target import Target

NAME = "aten"
TEMPLATE = "aten.py.jinja"
NEEDS = ("aten",)
SINGLE_CHANNELS = False


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.x_parts > 1 or problem.y_parts > 1 or problem.rim is not None:
        return "parts and rims"
    if problem.epilogue:
        return "an epilogue"
    if not (problem.elements["x"] and problem.elements["w"] and problem.elements["y"]):
        return "an empty operand"
    for d in problem.dims:
        above = (d.y - 1) * d.stride + d.dilation * (d.kernel - 1) + 1 - d.below - d.x
        if d.x + min(d.below, 0) + min(above, 0) < 1:
            return f"{d.name}: y reads none of x's rows"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: the layer's own memory format, and the other one with the copies that it takes."""
    yield default(problem, target)
    if len(problem.dims) > 1:
        yield Config(NAME, (("last", 1 - problem.channels_last),), warps=0, stages=0)


def default(problem: Problem, target: Target) -> Config:
    return Config(NAME, warps=0, stages=0)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: y reads a row of x."""
    found: list[str] = []
    for i, d in enumerate(problem.dims):
        above = f"(s.y[{i}] - 1) * {d.stride} + {d.dilation * (d.kernel - 1) + 1} - s.below[{i}] - s.x[{i}]"
        found.append(f"s.x[{i}] + min(s.below[{i}], 0) + min({above}, 0) > 0")
    return found


def words(problem: Problem) -> type[Words]:
    return Words


def work(problem: Problem, config: Config) -> None:
    """A library's own: nobody knows its steps."""
