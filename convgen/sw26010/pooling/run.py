"""Pooling over tiles that don't overlap: K rows of an image to a CPE, by DMA as long as LDM allows.

Source: [SW] 4.4: K rows at a time, several where they fit; where K rows don't fit, strips of columns by strided DMA.
Rows and columns beyond the last whole window are left out; their gradient is zero. Backward, the maximum of a window
is found again in x, and the first of equal ones gets the gradient, as in PyTorch; the paper doesn't say.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.machine.core_group import CPES, SLOT_BYTES, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import DTYPES, Dram
from convgen.sw26010.machine.printing import load_program, print_program

POOL_LDM_BYTES = 60 * 1024
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of x [N, C, H, W] by K x K windows, stride K.

    Raises:
        InputError: no whole window, or another dtype.
    """

    n: int
    c: int
    h: int
    w: int
    kernel: int
    kind: Literal["max", "average"] = "max"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if min(self.n, self.c, self.kernel) < 1 or min(self.h, self.w) < self.kernel or self.dtype not in DTYPES:
            fact = f"cannot pool {self.n} x {self.c} x {self.h} x {self.w} of {self.dtype} by {self.kernel}"
            raise InputError(fact, hint=f"a kernel up to {min(self.h, self.w)}, of float32 or float64")
        if SLOT_BYTES * (self.kernel**2 + 1) > POOL_LDM_BYTES:
            hint = f"a kernel up to {isqrt(POOL_LDM_BYTES // SLOT_BYTES - 1)}"
            raise InputError(f"a window of {self.kernel} x {self.kernel} does not fit into LDM", hint=hint)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.c, self.h // self.kernel, self.w // self.kernel

    @property
    def strip(self) -> int:
        """Windows of a row that LDM holds at once: all of them where K rows fit."""
        return min(self.w // self.kernel, POOL_LDM_BYTES // (SLOT_BYTES * (self.kernel**2 + 1)))

    @property
    def together(self) -> int:
        """Rows of windows that a CPE takes at once: 1 where rows are cut into strips or left out below."""
        if self.strip < self.w // self.kernel or self.h % self.kernel:
            return 1
        row_bytes = SLOT_BYTES * self.strip * (self.kernel**2 + 1)
        rows = self.n * self.c * (self.h // self.kernel)
        return max(1, min(POOL_LDM_BYTES // row_bytes, rows // CPES))


def pooling_program(pooling: Pooling) -> str:
    """Text of the program that one CPE runs."""
    cut = pooling.strip < pooling.w // pooling.kernel
    return print_program(
        "pooling",
        {
            "header": (f"Printed by convgen {__version__} (sw26010 pooling).",),
            "title": pooling.kind.capitalize(),
            "strips": "Rows don't fit into LDM: they come in strips, by strided DMA." if cut else "Rows come whole.",
            "planes": pooling.n * pooling.c, "h": pooling.h, "w": pooling.w, "kernel": pooling.kernel,
            "together": pooling.together, "strip": pooling.strip,
            "floats": pooling.dtype == "float32",
            "instruction": f"pool_{pooling.kind}",
        },
    )  # fmt: skip


def pooling_backward_program(pooling: Pooling) -> str:
    """Text of the program that one CPE runs for the gradient."""
    finds = pooling.kind == "max"
    cut = pooling.strip < pooling.w // pooling.kernel
    what = {
        "max": "A CPE finds the largest of each\nwindow again: it gets the window's gradient, the others zero.",
        "average": "Every element of\na window gets the K^2th of its gradient.",
    }[pooling.kind]
    return print_program(
        "pooling_backward",
        {
            "header": (f"Printed by convgen {__version__} (sw26010 pooling).",),
            "title": pooling.kind.capitalize(), "finds": finds, "what": what,
            "strips": "Rows don't fit into LDM: they come in strips, by strided DMA." if cut else "Rows come whole.",
            "planes": pooling.n * pooling.c, "h": pooling.h, "w": pooling.w, "kernel": pooling.kernel,
            "together": pooling.together, "strip": pooling.strip,
            "floats": pooling.dtype == "float32",
            "instruction": f"spread_{pooling.kind}",
            "columns_left": pooling.w % pooling.kernel > 0, "rows_left": pooling.h % pooling.kernel > 0,
        },
    )  # fmt: skip


def run_pooling_backward(pooling: Pooling, dy: Any, x: Any = None, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """dx [N, C, H, W], and what the mesh did.

    Args:
        dy: [N, C, H // K, W // K].
        x: what was pooled; the maximum needs it, the average does not.
    Raises:
        InputError: a tensor of another shape or dtype, or x missing or superfluous.
    """
    if (x is None) == (pooling.kind == "max"):
        raise InputError(f"{pooling.kind} pooling backward {'needs' if x is None else 'does not need'} x")
    shape = (pooling.n, pooling.c, pooling.h, pooling.w)
    given = [("dY", dy, pooling.out_shape)] if x is None else [("X", x, shape), ("dY", dy, pooling.out_shape)]
    operands: list[Dram] = []
    for name, value, wanted in given:
        tensor = np.ascontiguousarray(value)
        if tensor.shape != wanted or tensor.dtype.name != pooling.dtype:
            found = f"{list(tensor.shape)} of {tensor.dtype.name}"
            raise InputError(f"{name} is {found}, not {list(wanted)} of {pooling.dtype}")
        operands.append(Dram(name, tensor.reshape(-1, wanted[3])))
    dx = np.full(shape, np.nan, pooling.dtype)  # the program has to write all of it
    operands.append(Dram("dX", dx.reshape(-1, pooling.w)))
    return dx, MessageMesh(group).run(load_program(pooling_backward_program(pooling)), *operands)


def run_pooling(pooling: Pooling, x: Any, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """y [N, C, H // K, W // K], and what the mesh did.

    Raises:
        InputError: x has another shape or dtype.
    """
    source = np.ascontiguousarray(x)
    wanted = (pooling.n, pooling.c, pooling.h, pooling.w)
    if source.shape != wanted or source.dtype.name != pooling.dtype:
        raise InputError(f"x is {list(source.shape)} of {source.dtype.name}, not {list(wanted)} of {pooling.dtype}")
    y = np.zeros(pooling.out_shape, pooling.dtype)
    operands = (Dram("X", source.reshape(-1, pooling.w)), Dram("Y", y.reshape(-1, pooling.out_shape[3])))
    counts = MessageMesh(group).run(load_program(pooling_program(pooling)), *operands)
    return y, counts
