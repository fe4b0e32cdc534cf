"""The sum of the core groups' filter gradients: core group 0 adds up what the others left in the shared memory.

Source: [SW] 5.1, Algorithm 1, lines 7 and 8, and the text below it ("CG 0 sums them together").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import CPES, LANES, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.printing import load_program, print_program
from convgen.sw26010.machine.rates import Rates

MOST_PIECE = 2048  # elements: two pieces of 16 KB in LDM
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sum:
    """`groups` vectors of `elements`, added in double in the order of the groups, rounded once to `dtype`."""

    groups: int
    elements: int
    dtype: Dtype

    @property
    def piece(self) -> int:
        """Elements that a CPE takes at once: its 64th, in whole registers, as far as LDM goes."""
        share = -(-self.elements // CPES)
        return min(MOST_PIECE, -(-share // LANES) * LANES)

    @property
    def ldm_bytes(self) -> int:
        return 2 * 8 * self.piece


def sum_program(task: Sum) -> str:
    """Text of the program that one CPE runs."""
    return print_program(
        "sum",
        {
            "header": (f"Printed by convgen {__version__} (sw26010 sum).",),
            "groups": task.groups, "elements": task.elements, "piece": task.piece,
            "floats": task.dtype == "float32",
        },
    )  # fmt: skip


def run_sum(task: Sum, parts: Any, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """The sum [ELEMENTS] of `parts` [GROUPS, ELEMENTS], and what the mesh did.

    Raises:
        InputError: parts of another shape.
    """
    given = np.array(parts, dtype=task.dtype, order="C")
    if given.shape != (task.groups, task.elements):
        raise InputError(f"the parts are {list(given.shape)}, the sum is of {[task.groups, task.elements]}")
    result = np.zeros((1, task.elements), task.dtype)
    counts = MessageMesh(group).run(load_program(sum_program(task)), Dram("PARTS", given), Dram("SUM", result))
    return result[0], counts


def sum_counts(task: Sum) -> Counts:
    """Events of a run, by closed form. Cycles are of the CPE that has the first piece."""
    counts = Counts()
    sizes, pieces = tiles_bytes((1, 1), (task.elements, task.piece), 4 if task.dtype == "float32" else 8)
    for block, size in sizes.items():
        counts.add_get(block, task.groups * size, 0)
        counts.add_put(block, size, 0)
    counts.get_ops, counts.put_ops = task.groups * pieces, pieces
    vectors = task.piece // LANES
    counts.vadd = (task.groups - 1) * pieces * vectors
    counts.cycles = (task.groups - 1) * -(-pieces // CPES) * vectors
    if task.dtype == "float32":
        counts.convert = (task.groups + 1) * pieces * vectors
    return counts


def sum_seconds(task: Sum, rates: Rates) -> float:
    """Every transfer is waited for; adding is hidden in none of them, and takes a cycle a register."""
    counts = sum_counts(task)
    rounds = -(-counts.put_ops // CPES) * (task.groups + 1)
    moved = rates.transfer_s(counts.get) + rates.transfer_s(counts.put)
    return moved + rounds * rates.dma_round_s + counts.cycles / rates.group.clock_hz
