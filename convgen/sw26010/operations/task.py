"""What all operations have: tensors in memory, a printed program, and its events by closed form.

A run is compared with the closed form, so a program that leaves out a transfer, a register or a piece ends in an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts, check_account
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import DTYPES, Dram
from convgen.sw26010.machine.printing import load_program
from convgen.sw26010.machine.rates import Rates

TASK_LDM_BYTES = 60 * 1024  # the rest is the program's stack
HEADER = (f"Printed by convgen {__version__} (sw26010).",)
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in memory: its shape, and in `view` the shape that the program's DMA sees, if that is another."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    view: tuple[int, ...] = ()


class Operation(Protocol):
    """An operation of one core group, of one size and direction."""

    @property
    def reads(self) -> tuple[Place, ...]:
        """What memory must hold."""
        ...

    @property
    def writes(self) -> tuple[Place, ...]:
        """What it makes. A tensor of a name that it reads, too, is overwritten."""
        ...

    def program(self) -> str:
        """Text of the program that one CPE runs."""
        ...

    def cost(self) -> Counts:
        """Events of a run, by closed form."""
        ...

    @property
    def rounds(self) -> int:
        """Transfers that the busiest CPE waits for; those that come together count as one."""
        ...


def run_operation(operation: Operation, *operands: Any, group: CoreGroup = SW26010) -> tuple[dict[str, Array], Counts]:
    """What the operation writes, by name, and what the mesh did.

    Args:
        operands: of the shapes that it reads; the last axis may come as several, as pixels do.
    Raises:
        InputError: another number of operands, or another shape. MeshFault: the program broke a rule.
    """
    reads, what = operation.reads, type(operation).__name__
    if len(operands) != len(reads):
        raise InputError(f"{what} reads {', '.join(place.name for place in reads)}; {len(operands)} operands are given")
    memory = {place.name: _given(what, place, operand) for place, operand in zip(reads, operands, strict=True)}
    places = {place.name: place for place in (*reads, *operation.writes)}
    memory |= {name: np.zeros(place.shape, place.dtype) for name, place in places.items() if name not in memory}
    drams = [Dram(name.upper(), memory[name].reshape(place.view or place.shape)) for name, place in places.items()]
    counts = MessageMesh(group).run(load_program(operation.program()), *drams)
    check_account(what, counts, operation.cost())
    return {place.name: memory[place.name] for place in operation.writes}, counts


def _given(what: str, place: Place, operand: Any) -> Array:
    """The operand in memory. Raises InputError: another shape."""
    given = np.array(operand, dtype=place.dtype, order="C")
    last = len(place.shape) - 1
    if given.ndim < len(place.shape) or (*given.shape[:last], prod(given.shape[last:])) != place.shape:
        raise InputError(f"{place.name} is {list(given.shape)}, the {what} has {list(place.shape)}")
    return given.reshape(place.shape)


def operation_seconds(operation: Operation, rates: Rates) -> float:
    """Seconds of its DMA, with the rounds of the busiest CPE. Instructions and messages take less."""
    counts = operation.cost()
    return rates.transfer_s(counts.get) + rates.transfer_s(counts.put) + operation.rounds * rates.dma_round_s


def check_extents(what: str, extents: Sequence[int], dtype: str) -> None:
    """Raises InputError: an extent below 1, or a dtype that memory can't hold."""
    if min(extents) < 1 or dtype not in DTYPES:
        raise InputError(f"{what} of {' x '.join(map(str, extents))} {dtype}: extents from 1, of {' or '.join(DTYPES)}")


def itemsize(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 8


def busiest(items: int, cpes: int = CPES) -> int:
    """Items of the CPE that has most of those that are dealt out."""
    return -(-items // cpes)


def broadcasts(rows: int = 0, columns: int = 0) -> Counts:
    """Events of broadcasts: `rows` registers are sent along rows and `columns` along columns, to 7 CPEs each."""
    return Counts(putr=rows, getr=(MESH - 1) * rows, putc=columns, getc=(MESH - 1) * columns)


def vectors(elements: int) -> int:
    return -(-elements // LANES)
