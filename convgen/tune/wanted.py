"""The local problems to tune: those of compiled layers and networks, or of a layer that 1, 2, 4, ... ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from convgen.errors import InputError
from convgen.kernels.choose import local_problems
from convgen.kernels.config import largest
from convgen.kernels.partition import SPLITS, Split, local_problem, with_zero_rows
from convgen.kernels.problem import Problem
from convgen.program.nodes import PHASES, is_convolution
from convgen.spec.layer import Layer
from convgen.tune.key import key_of

if TYPE_CHECKING:
    from convgen.compiler import Compiled
    from convgen.network_compiler import CompiledNetwork


@dataclass(frozen=True, slots=True)
class Use:
    """The origin of a problem: a phase of a layer, or of a network's row, and how the layer is split, if not as its
    file says."""

    layer: str
    phase: str
    split: Split | None = None
    ways: int = 1

    def __str__(self) -> str:
        return f"{self.layer}.{self.phase}" + (f" {self.ways}-way by {self.split}" if self.split else "")


@dataclass
class Wanted:
    """A local problem, and its origins."""

    problem: Problem
    uses: list[Use] = field(default_factory=list[Use])

    @property
    def key(self) -> str:
        return key_of(self.problem)

    def __str__(self) -> str:
        return f"{self.uses[0]}" + (f" (+{len(self.uses) - 1})" if len(self.uses) > 1 else "")


def of_layers(compiled: Iterable[Compiled]) -> list[Wanted]:
    """The problems of the ranks with most to do; equal problems are one, and those without products are left out."""
    found: dict[str, Wanted] = {}
    for one in compiled:
        for _, step in one.schedule.steps():
            if is_convolution(step):
                problem = largest(local_problems(one.layer, one.schedule, one.space, step))
                if problem.flops:
                    _add(found, problem, Use(one.layer.name, step.phase))
    return list(found.values())


def of_networks(compiled: Iterable[CompiledNetwork]) -> list[Wanted]:
    """The problems of networks' rows for a GPU, without the steps behind a kernel's sum.

    Raises:
        InputError: a network is for a CPU, where there is nothing to tune.
    """
    found: dict[str, Wanted] = {}
    for one in compiled:
        if not one.target.is_gpu:
            fact = f"{one.graph.name}: for {one.target.text} a network's convolutions are ATen's, which nothing tunes"
            raise InputError(fact, hint="--target cuda:sm_90; or a layer's file")
        for file in one.kernels:
            for problems in file.problems:
                problem = replace(largest(problems), epilogue=(), moments="", before=None)
                for row, phase in file.uses:
                    if phase == problem.phase:
                        _add(found, problem, Use(row, phase))
    return list(found.values())


def of_partitions(layers: Sequence[Layer], ways: Sequence[int], splits: Sequence[Split] = SPLITS) -> list[Wanted]:
    """The problems of a rank when so many ranks share a layer, for each way to split it ([CF] Fig. 3), in the plot's
    order.

    Raises:
        InputError: no split of any layer leaves every rank something.
    """
    found: dict[str, Wanted] = {}
    for layer, split, phase in product(layers, splits, PHASES):
        for count in ways:
            problem = local_problem(layer.conv, split, count, phase, layer.dtype, layer.memory_format)
            if problem is not None and problem.flops:
                made = problem if layer.target.is_gpu else with_zero_rows(problem)
                _add(found, made, Use(layer.name, phase, split, count))
    if not found:
        raise InputError(
            f"--partitions {','.join(map(str, ways))}: {layers[0].name} has fewer channels, filters, samples and rows"
        )
    return list(found.values())


def _add(found: dict[str, Wanted], problem: Problem, use: Use) -> None:
    found.setdefault(key_of(problem), Wanted(problem)).uses.append(use)
