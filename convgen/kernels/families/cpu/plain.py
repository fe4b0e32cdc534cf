"""ATen's plain call on a CPU: the layer's own arrangement, and the choice where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.kernels.config import Config
from convgen.kernels.families import aten
from convgen.kernels.families.cpu import arranged
from convgen.kernels.problem import Problem
from convgen.kernels.work import CpuWork
from convgen.spec.target import Target

NAME = aten.NAME
TEMPLATE, HELPERS, RATE = arranged.TEMPLATE, arranged.HELPERS, arranged.RATE


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    return aten.refusal(problem, target)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    yield default(problem, target)


def default(problem: Problem, target: Target) -> Config:
    return aten.default(problem, target)


def printed(problem: Problem, config: Config) -> Config:
    """The configuration that the template is told."""
    return arranged.plain(problem)


def work(problem: Problem, config: Config) -> CpuWork:
    """The work of the call."""
    return arranged.called(problem, {})
