"""What a user writes about one layer, as frozen data (README, A layer file). No reading here: see reader.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.spec.source import Source, locate
from convgen.spec.target import CPU, MemoryFormat, Target

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")
DTYPE_BYTES = {"float64": 8, "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2}
ALGORITHM_NAMES = ("auto", *ALGORITHMS)
ROLE_NAMES = ("N", "C", "F", "G", "D", "H", "W", "none")

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a layer. `kernels`: (phase, local kernel as text) for phases that name one. `core_groups`, of a rank,
    and `plan`, how a phase's plan is chosen, are for target sw26010.
    """

    hold_x: Literal["gathered", "stored"] = "gathered"
    sums: Literal["ordered", "native"] = "ordered"
    kernels: tuple[tuple[str, str], ...] = ()
    core_groups: int = 1
    plan: Literal["model", "trial"] = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Grid axes that block-distribute each dimension, outermost first; layouts of dx, dy, dw and bias follow.

    x: (N, C, spatial...), w: (F, C), or (C, F) of a transposed convolution, y: (N, F, spatial...).
    """

    x: tuple[Axes, ...]
    w: tuple[Axes, ...]
    y: tuple[Axes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, a convolution or a transposed one, and how it is laid out.

    Validated on its own, not yet against the grid.

    `roles[phase]` maps axes to roles in the order written, for the phases given; exactly one of `algorithm` and
    `distribution` is set. `usual_format`: the memory format is the target's usual one, as the file names none.
    """

    name: str
    conv: Conv
    dtype: str = "float32"
    memory_format: MemoryFormat = "contiguous"
    grid: Grid
    algorithm: str | None = "auto"
    distribution: Distribution | None = None
    roles: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    target: Target = CPU
    machine: str | None = None
    options: Options = Options()
    source: Source = field(default=Source(), compare=False)
    usual_format: bool = field(default=False, compare=False)

    def made_for(self, target: Target) -> Layer:
        """The layer for another target, in the memory format that its file names, or else that target's usual one."""
        lines = {path: line for path, line in self.source.lines.items() if path != ("target",)}
        made = replace(self, target=target, source=replace(self.source, lines=lines))
        if not self.usual_format:
            return made
        return replace(made, memory_format=target.memory_format(len(self.conv.spatial)))

    def known_target(self) -> Target:
        """The target, if kernels are made and tuned for it. Raises InputError: they are not; says the target's line,
        where the file has one."""
        try:
            return self.target.known()
        except InputError as error:
            raise locate(error, self.source) if ("target",) in self.source.lines else error from None

    @property
    def kind(self) -> str:
        return self.conv.name

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
