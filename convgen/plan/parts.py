"""A network whose layout is open, and the memory that a layout may take: the input of searches and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from convgen.algebra.layout import Axes
from convgen.cost.network import element_bytes
from convgen.operations.bound import Bound
from convgen.program.network import Program
from convgen.spec.graph import GivenRow
from convgen.spec.layer import DTYPE_BYTES

Keep = Literal["every", "needed"]
FLOAT32 = 4  # bytes of an element


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that has no layout yet. `kind` as a program's values have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    letters: tuple[str, ...] = ()  # of an input's dimensions; "" for none


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a plan may take, and how it is counted.

    Attributes:
        memory_bytes: bytes that a rank has; None: no bound.
        states: values that the optimizer keeps for each parameter: SGD 0, with momentum 1, Adam 2.
        keep: what stays for backward: what backward reads, counted row by row (cost/network_memory.py); or the output
            of every layer, each with an error signal of its size, as the papers' frameworks have it
            (cost/every_output.py).
        regather: whether a product may gather an operand again in backward rather than hold it.
    """

    memory_bytes: int | None = None
    states: int = 1
    keep: Keep = "needed"
    regather: bool = False

    def parameter_bytes(self, dtype: str) -> int:
        """Bytes for an element of a parameter: itself, its gradient and the optimizer's states. The papers' frameworks
        have a copy in float32 of a parameter of 16 bits, which the optimizer updates, and states in float32 too.

        Example:
            >>> Room(states=2).parameter_bytes("bfloat16"), Room(states=2, keep="every").parameter_bytes("bfloat16")
            (8, 16)
        """
        size = DTYPE_BYTES.get(dtype) or element_bytes(dtype)
        if self.keep == "needed" or size >= FLOAT32:
            return size * (2 + self.states)
        return 2 * size + FLOAT32 * (1 + self.states)


ANY = Room()


class Parts(NamedTuple):
    """A network without a layout.

    Attributes:
        tensors: all that rows read and make.
        updates: (buffer, value that it becomes after a step of training).
        outputs: (name, value).
        fixed: by value, how it is stored, where that is given.
        parted: the network whose statistics are by parts as a program splits them ([SP] III-B), and whether what is
            normalised shall stay stored so; None: statistics are not by parts.
        given: rows that a file lays out (given.py).
        reduce_dtype, autocast: as a program's.
        of_inputs: whether a step makes inputs' gradients, too.
    """

    name: str
    tensors: Sequence[Tensor]
    rows: Sequence[Bound]
    updates: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    fixed: Mapping[str, tuple[Axes, ...]] = MappingProxyType({})
    parted: Callable[[Program, bool], Parts] | None = None
    given: tuple[GivenRow, ...] = ()
    reduce_dtype: str = ""
    autocast: str = ""
    of_inputs: bool = False

    def extents(self, letter: str) -> list[int]:
        """Of inputs' dimensions that carry a letter."""
        return [n for t in self.tensors for one, n in zip(t.letters, t.shape, strict=False) if one == letter]
