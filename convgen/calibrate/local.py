# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (parts of torch have no types)
"""Local work, all ranks at once, each with the threads that it has: copies, matrix products, a convolution."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from convgen.calibrate.race import Case, race, settle
from convgen.calibrate.team import Team
from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.spec.layer import DTYPES
from convgen.tune.baseline import accuracy
from convgen.tune.device import this_cpu

LONG_S = 25e-3  # a matrix product that takes so long shows the rate
PRODUCTS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes, more than a rank's share of the caches
SAMPLES = {"cpu": 4, "cuda": 64}
CONVOLUTION = "3x3, 64 to 64 channels of 56x56"
CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Local:
    """What a rank's device reaches while all ranks are busy.

    Attributes:
        flops_per_s: of matrix products, by dtype; those that time sufficed for, float32 always.
        convolution_flops_per_s: of CONVOLUTION in float32, forward.
        bytes_per_s: of a copy, whose bytes read and bytes written both count.
        memory_bytes: of the device, or a rank's share of the node's.
        threads: of a rank; 0 on a GPU.
    """

    device: str
    threads: int
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    convolution_flops_per_s: float


def measure_local(team: Team, ranks_per_node: int, seconds: float) -> Local:
    """What all ranks' devices reach at once; the slowest rank counts."""
    deadline = time.perf_counter() + 0.6 * seconds
    kind = team.device.type
    source = torch.zeros(COPIED[kind] // 4, device=team.device)
    target = torch.empty_like(source)
    n, image = SAMPLES[kind], (64, 56, 56)
    x, w = torch.randn((n, *image), device=team.device), torch.randn((64, 64, 3, 3), device=team.device)
    conv = torch.nn.functional.conv2d
    cases = [
        Case("copy", COPIED[kind], lambda: target.copy_(source)),
        Case("convolution", 2 * n * 64 * 64 * 9 * 56 * 56, lambda: conv(x, w, padding=1)),
    ]
    with torch.inference_mode(), accuracy("float32"):
        ready = [settle(team, [case], LONG_S) for case in cases]
        ready.append(settle(team, [_product(team, "float32", size) for size in PRODUCTS[kind]], LONG_S))
        for dtype in DTYPES:
            wanted = dtype != "float32" and (dtype != "tfloat32" or kind == "cuda")
            if wanted and team.agree(time.perf_counter() < deadline):
                ready.append(settle(team, [_product(team, dtype, size) for size in PRODUCTS[kind]], LONG_S))
        timings = {t.label: t for t in race(team, ready, 0.4 * seconds)}

    def rate(label: str) -> float:
        return timings[label].size / timings[label].seconds

    return Local(
        device=" and ".join(sorted(set(team.gather(_name(team))))),
        threads=torch.get_num_threads() if kind == "cpu" else 0,
        memory_bytes=min(team.gather(_memory_bytes(team, ranks_per_node))),
        bytes_per_s=2 * rate("copy"),
        flops_per_s={d: 2 * timings[d].size ** 3 / timings[d].seconds for d in DTYPES if d in timings},
        convolution_flops_per_s=rate("convolution"),
    )


def _product(team: Team, dtype: str, size: int) -> Case:
    """A product of two square matrices; they are made when it first runs."""
    made: list[torch.Tensor] = []

    def run() -> None:
        if not made:
            made.extend(torch.randn((size, size), device=team.device).to(TORCH_DTYPES[dtype]) for _ in range(2))
            made.append(torch.empty_like(made[0]))
        with accuracy(dtype):
            torch.mm(made[0], made[1], out=made[2])

    return Case(dtype, size, run)


def _name(team: Team) -> str:
    return this_cpu(torch.get_num_threads()).name if team.device.type == "cpu" else torch.cuda.get_device_name()


def _memory_bytes(team: Team, ranks_per_node: int) -> float:
    """The GPU's bytes; or a rank's share of the node's, or of those that this process's control group may have."""
    if team.device.type == "cuda":
        return float(torch.cuda.get_device_properties(team.device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such group, or `max`
        total = min(total, int(CGROUP.read_text()))
    return total / ranks_per_node
