"""bench/kernels.py on a device that is not there: slow, failing, hanging and dying, each at the same candidates.

    python bench/first_hour.py --dry-run

Everything is bench/kernels.py's own (problems, results, what is left out and why, going on) but the device: its clock's
times are drawn from the candidates' names, nothing is compiled, and what a candidate does is drawn from its name too.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_measure
import kernels

import convgen.tune.clock
import convgen.tune.gpu
from convgen.kernels.problem import Problem

SLOW_S = 0.05
FACTS = {"device": "a fake one", "driver": "0", "cuda": "0", "torch": "0", "triton": "0", "cudnn": "0"}


class LostError(RuntimeError):
    """What a launch raises when its device is gone."""


class FakeClock:
    """A device that is there until a candidate takes it along."""

    device = "cpu"

    def __init__(self) -> None:
        self.lost = False

    def alive(self) -> bool:
        return not self.lost

    def tidy(self) -> None: ...

    def sync(self) -> None: ...


def fate(key: str, label: str) -> int:
    """0 to 999, by name."""
    return int.from_bytes(hashlib.sha256(f"{key} {label}".encode()).digest()[:4]) % 1000


def measure(
    p: Problem, key: str, found: Sequence[Any], left_out: dict[str, str], clock: FakeClock, marker: Path
) -> dict[str, Any]:
    """In the place of kernel_measure.measure: candidates meet their fates while they are marked."""
    left_out = dict(left_out)
    made: dict[str, Any] = {}
    aten: dict[str, Any] = {}
    for label in ("ATen convolution", *(c.label for c in found)):
        if label in left_out:
            continue
        try:
            with kernel_measure.marked(marker, key, label, clock):  # type: ignore[arg-type]
                befall(fate(key, label), clock)
        except kernel_measure.DeviceLost:
            raise
        except Exception as failure:
            left_out[label] = kernel_measure.cause(failure)
            continue
        record = {"us": 1.0 + fate(key, label) / 100, "raced": True, "family": label.split()[0], "error": 0.0}
        (aten if label.startswith("ATen ") else made)[label] = record
    return {"floor": {"us": 1.0}, "aten": aten, "kernels": made, "left_out": left_out}


def befall(drawn: int, clock: FakeClock) -> None:
    """Slow, wrong, lost, hanging, or the end of the process."""
    if drawn < 930:
        time.sleep(SLOW_S if drawn < 50 else 0)
    elif drawn < 995:
        raise ValueError("a wrong result")
    elif drawn < 997:
        clock.lost = True
        raise LostError("an illegal memory access was encountered")
    elif drawn < 998:
        time.sleep(3600)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kernels.check_device = lambda: None
    kernel_measure.measure = measure  # type: ignore[assignment]
    kernel_measure.Compilers = lambda jobs: SimpleNamespace(  # type: ignore[assignment,misc]
        submit=lambda key, found: None, failures=lambda key: {}, close=lambda: None
    )
    convgen.tune.clock.CudaClock = FakeClock  # type: ignore[assignment,misc]
    convgen.tune.clock.ceilings = lambda clock: {  # type: ignore[assignment]
        "flops_per_s": dict.fromkeys(kernels.DTYPES, 1e14), "float32_ieee_flops_per_s": 1e13, "bytes_per_s": 1e12
    }  # fmt: skip
    convgen.tune.gpu.gpu_facts = lambda: FACTS  # type: ignore[assignment]
    convgen.tune.gpu.this_gpu = lambda: SimpleNamespace(name="a fake one", target="cuda:sm_90")  # type: ignore[assignment]
    kernels.main(sys.argv[1:])


if __name__ == "__main__":
    main()
