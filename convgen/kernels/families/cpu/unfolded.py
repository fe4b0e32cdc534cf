"""The windows of x written out as a matrix (im2col), a product with w; two dimensions, some samples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.families import aten
from convgen.kernels.problem import Problem
from convgen.kernels.work import CpuWork
from convgen.operations.convolution import MAKES
from convgen.spec.target import Target

NAME = "unfolded"
TEMPLATE, HELPERS, RATE = "cpu_unfolded.py.jinja", ("pieces",), 0.7


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if len(problem.dims) != 2 or problem.groups > 1:
        return f"{len(problem.dims)} dimensions and {problem.groups} groups; two and one"
    if problem.element_bytes == 2:
        return "16-bit types, whose windows would be summed in them"
    return aten.refusal(problem, target)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: different numbers of samples whose windows are written at a time."""
    for samples in (1, 2, 4, 8, 16, 32, 64):
        if samples == 1 or samples <= problem.batch:
            yield Config(NAME, (("samples", samples),), warps=0, stages=0)


def default(problem: Problem, target: Target) -> Config:
    return Config(NAME, (("samples", 1),), warps=0, stages=0)


def printed(problem: Problem, config: Config) -> Config:
    """The configuration that the template is told."""
    return config


def work(problem: Problem, config: Config) -> CpuWork:
    """The work of the products, and of the windows that are written for them."""
    samples = config.tile["samples"]
    windows = problem.batch * problem.channels * problem.taps * prod(d.y for d in problem.dims)
    held = samples * windows // problem.batch * problem.element_bytes
    slow = 1.0 if held < 2**20 else 1.5  # slower beyond a core's cache
    copied = 3 * slow * windows + 2 * problem.elements[MAKES[problem.phase]]
    return CpuWork(problem.flops, 3 * ceil_div(problem.batch, samples), copied * problem.element_bytes)
