"""The least time of a launch: an almost empty kernel with as many programs as a convolution has."""

from __future__ import annotations

import math

import torch

from convgen.kernels.config import ceil_div
from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.tune.clock import Call
from convgen.tune.operands import result_of, shapes

FLOOR = """import triton
import triton.language as tl


@triton.jit
def floor_copy(source, target):
    i = tl.program_id(0) % 256 * 128 + tl.arange(0, 128)
    tl.store(target + i, tl.load(source + i))
"""


def floor_launch(device: str, programs: int) -> Call:
    """The launch of an almost empty kernel with so many programs."""
    kernel = load_text(FLOOR).floor_copy
    source, target = (torch.zeros(256 * 128, device=device) for _ in range(2))
    return lambda: kernel[(programs,)](source, target, num_warps=4)


def grid_class(p: Problem) -> int:
    """How many programs the launch floor for a problem has: tiles of 128x64 elements of its result, rounded up to a
    power of four."""
    name, _ = result_of(p)
    programs = ceil_div(math.prod(shapes(p)[name]), 128 * 64)
    return 4 ** max(2, math.ceil(math.log(max(programs, 1), 4) - 1e-9))  # 1e-9: a power of four stays one
