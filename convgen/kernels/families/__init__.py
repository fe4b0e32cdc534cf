"""Families of local kernels: each says which problems it can, its configurations, and a default one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from convgen.kernels.config import Config
from convgen.kernels.families import aten, box, depthwise, gemm, packed, pointer
from convgen.kernels.families.cpu import arranged, product, unfolded
from convgen.kernels.problem import Problem
from convgen.spec.target import Target


class Family(Protocol):
    """A module of this folder."""

    @property
    def NAME(self) -> str: ...
    def refusal(self, problem: Problem, target: Target) -> str | None: ...
    def configs(self, problem: Problem, target: Target) -> Iterator[Config]: ...
    def default(self, problem: Problem, target: Target) -> Config: ...


# In the order of preference of an untuned problem. The pointer family takes every problem; boxes come behind it, since
# building their descriptors delays a launch, and ATen, since only a measurement can say that it is faster.
FAMILIES: tuple[Family, ...] = (depthwise, gemm, packed, pointer, box, aten)
CPU_FAMILIES: tuple[Family, ...] = (aten, arranged, product, unfolded)


def families(target: Target) -> tuple[Family, ...]:
    """What there is for a target, in the order of preference of an untuned problem."""
    return CPU_FAMILIES if target.is_cpu else FAMILIES


def family(name: str, target: Target) -> Family | None:
    """The target's family of this name."""
    return next((f for f in families(target) if name == f.NAME), None)
