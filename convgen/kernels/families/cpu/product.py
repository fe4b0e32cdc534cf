"""1x1 as matrix products: of all pixels at once, or sample by sample where a sample's rows are channels."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.kernels.config import Config
from convgen.kernels.families import aten
from convgen.kernels.problem import Problem
from convgen.kernels.work import CpuWork
from convgen.spec.target import Target

NAME = "product"
TEMPLATE, HELPERS, RATE = "cpu_product.py.jinja", ("rows",), 0.8


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if not problem.is_pointwise or problem.groups > 1:
        return "taps, strides, padding or groups"
    return aten.refusal(problem, target)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """One product, or one a sample, whose sum over samples would round twice in 16-bit types."""
    yield Config(NAME, (("whole", 1),), warps=0, stages=0)
    if problem.phase != "backward_filter" or problem.element_bytes > 2:
        yield Config(NAME, (("whole", 0),), warps=0, stages=0)


def default(problem: Problem, target: Target) -> Config:
    return Config(NAME, (("whole", 1),), warps=0, stages=0)


def printed(problem: Problem, config: Config) -> Config:
    """The configuration that the template is told."""
    return config


def work(problem: Problem, config: Config) -> CpuWork:
    """The work of the products, and of the copies around them."""
    whole = bool(config.tile["whole"])
    copied = sum(problem.elements[o] for o in ("x", "y")) if whole != problem.channels_last else 0
    return CpuWork(problem.flops, 2 if whole else 1 + problem.batch / 8, 2 * copied * problem.element_bytes)
