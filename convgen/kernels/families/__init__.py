"""Families of local kernels: each file is a whole family; this one puts them in order.

A new family is a file here, its template in templates/kernels, and a word in one of the two rows below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from convgen.kernels.config import Config
from convgen.kernels.families import aten, box, converted, depthwise, gemm, packed, pointer, stem, tiled, widened
from convgen.kernels.families.cpu import arranged, plain, product, unfolded
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words
from convgen.kernels.work import CpuWork, Work
from convgen.spec.target import Target


class Family(Protocol):
    """A file of this folder: which problems the family can do, its configurations, the default first, and its
    template."""

    @property
    def NAME(self) -> str: ...
    @property
    def TEMPLATE(self) -> str: ...
    def refusal(self, problem: Problem, target: Target) -> str | None: ...
    def configs(self, problem: Problem, target: Target) -> Iterator[Config]: ...
    def default(self, problem: Problem, target: Target) -> Config: ...


class GpuFamily(Family, Protocol):
    """Triton kernels. Their template is told `words`; `work` is what the tuner's model asks, None where none can say.

    NEEDS: of what launches share, boxes (descriptors for the copy engine) or aten (ATen's calls).
    SINGLE_CHANNELS: groups have one channel, and channels are numbered through all groups.
    conditions: what `refusal` asks of extents that are not empty, as Python of a launch's Sizes `s` and of its `rim`,
        of as many boxes as the problem has at most.
    """

    @property
    def NEEDS(self) -> tuple[str, ...]: ...
    @property
    def SINGLE_CHANNELS(self) -> bool: ...
    def conditions(self, problem: Problem) -> list[str]: ...
    def words(self, problem: Problem) -> type[Words]: ...
    def work(self, problem: Problem, config: Config) -> Work | None: ...


class CpuFamily(Family, Protocol):
    """Arrangements of ATen's calls. HELPERS: functions that they share. RATE: of a product's flops that is reached."""

    @property
    def HELPERS(self) -> tuple[str, ...]: ...
    @property
    def RATE(self) -> float: ...
    def printed(self, problem: Problem, config: Config) -> Config: ...
    def work(self, problem: Problem, config: Config) -> CpuWork: ...


# In the order of preference of an untuned problem. The pointer family takes every problem; ATen comes last, since only
# a measurement can say that it is faster.
FAMILIES: tuple[GpuFamily, ...] = (depthwise, gemm, stem, packed, box, widened, tiled, converted, pointer, aten)
CPU_FAMILIES: tuple[CpuFamily, ...] = (plain, arranged, product, unfolded)
_GPU = {made.NAME: made for made in FAMILIES}
_CPU = {made.NAME: made for made in CPU_FAMILIES}


def families(target: Target) -> tuple[Family, ...]:
    """A target's families, in the order of preference of an untuned problem."""
    return CPU_FAMILIES if target.is_cpu else FAMILIES


def family(name: str, target: Target) -> Family | None:
    """The target's family of this name."""
    return (_CPU if target.is_cpu else _GPU).get(name)


def of_gpu(config: Config) -> GpuFamily:
    """The family that a configuration of a GPU's kernel names."""
    return _GPU[config.family]


def of_cpu(config: Config) -> CpuFamily:
    """The family that a configuration of a CPU's kernel names."""
    return _CPU[config.family]
