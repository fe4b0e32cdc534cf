"""How long the emulator takes for a GEMM: the mesh at once, the same in the messages' order, message by message.

    python bench/sw26010.py [--runs 5]

Medians over runs after a warm-up, in this process. The limit is 0.5 s for 512 x 512 x 512 with the mesh at once.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from options import options

from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.run import Level, run_gemm

CASES: tuple[tuple[int, tuple[int, int, int], Level], ...] = (
    (512, (512, 512, 128), "fast"),
    (512, (512, 512, 128), "exact"),
    (64, (64, 64, 64), "messages"),
)


def seconds(size: int, blocks: tuple[int, int, int], level: Level, runs: int) -> list[float]:
    """Seconds of each run of C += A B."""
    bm, bn, bk = blocks
    plan = GemmPlan(m=size, n=size, k=size, bm=bm, bn=bn, bk=bk)
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((size, size)) for _ in range(3))
    run_gemm(plan, a, b, c, level=level)
    taken: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        run_gemm(plan, a, b, c, level=level)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    runs = options(__doc__, runs=5).runs
    print(f"{'size':>6}  {'level':<9}  {'median':>9}  {'slowest':>9}")
    for size, blocks, level in CASES:
        taken = seconds(size, blocks, level, runs)
        print(f"{size:>4}^3  {level:<9}  {statistics.median(taken):>7.3f} s  {max(taken):>7.3f} s")


if __name__ == "__main__":
    main()
