"""Softmax and cross entropy of scores with labels, and their gradient.

A CPE has a sample's scores in LDM. Labels are numbers of memory's precision, as Caffe has them.
Source: [SW] Principles 2 and 4; the paper has no program of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import InputError
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import (
    HEADER,
    TASK_LDM_BYTES,
    Place,
    broadcasts,
    busiest,
    check_extents,
    itemsize,
    vectors,
)

MOST_CLASSES = TASK_LDM_BYTES // SLOT_BYTES - 4 * LANES


@dataclass(frozen=True, slots=True)
class SoftmaxLoss:
    """Forward makes p [N, CLASSES] and loss [1, 2] of x [N, CLASSES] and labels [N, 1]. The loss is in double: the sum
    over samples, and how many count; the management core divides. Backward makes dx of p, labels and dloss [1, 1], the
    sum's gradient.

    Args:
        ignore: the label of samples that don't count.
    Raises:
        InputError: an extent below 1, another dtype, or classes that don't fit into LDM.
    """

    n: int
    classes: int
    dtype: Dtype = "float32"
    ignore: int = -100
    backward: bool = False

    def __post_init__(self) -> None:
        check_extents("SoftmaxLoss", (self.n, self.classes), self.dtype)
        if self.classes > MOST_CLASSES:
            raise InputError(f"{self.classes} scores don't fit into LDM", hint=f"up to {MOST_CLASSES} classes")

    @property
    def reads(self) -> tuple[Place, ...]:
        scores = Place("p" if self.backward else "x", (self.n, self.classes), self.dtype)
        labels = Place("labels", (self.n, 1), self.dtype)
        return (scores, labels, Place("dloss", (1, 1), "float64")) if self.backward else (scores, labels)

    @property
    def writes(self) -> tuple[Place, ...]:
        if self.backward:
            return (Place("dx", (self.n, self.classes), self.dtype),)
        return Place("p", (self.n, self.classes), self.dtype), Place("loss", (1, 2), "float64")

    def program(self) -> str:
        return print_program(
            "softmax_loss",
            {
                "header": HEADER, "n": self.n, "classes": self.classes, "backward": self.backward,
                "floats": self.dtype == "float32", "ignore": self.ignore,
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        counts, size = Counts(), itemsize(self.dtype)
        line, across = self.classes * size, vectors(self.classes)
        counts.add_get(line, self.n * line, self.n)
        counts.add_get(size, self.n * size, self.n)
        counts.add_put(line, self.n * line, self.n)
        if self.dtype == "float32":
            counts.convert = self.n * (2 * across + 1)
        if self.backward:
            counts.add_get(SLOT_BYTES, self.n * SLOT_BYTES, self.n)
            counts.vadd = self.n * (across + 1)
            return counts
        counts.vmax = self.n * across
        counts.functions = self.n * (self.classes + 2)
        counts.vadd = 3 * self.n * across + 2 * MESH * CPES  # a register of each CPE of the row, and of the column
        counts.add_put(2 * SLOT_BYTES, 2 * SLOT_BYTES)
        counts.add(broadcasts(rows=CPES, columns=CPES))
        return counts

    @property
    def rounds(self) -> int:
        return 2 * busiest(self.n) + (not self.backward)
