"""The bet in numbers: random operations on random grids, with free roles and storage, against one device.

    python bench/bet.py [--cases 1000] [kind ...]
    python bench/bet.py --lowered [--processes] [--cases 200] [kind ...]

A table of kinds: cases, and how many were wrong in a result, in a gradient by torch's vjp of local code, or in a
gradient that is a row of its own; last random networks of such rows, a fifth as many. The oracle executes signatures by
brute force (tests/brute.py).

With --lowered the operations go the way of networks: a package of many of them side by side, each with roles, storage
and rows of gradients by chance, runs on virtual ranks, or with --processes on two to four of torch.distributed's, and
is compared with their references (tests/operation_programs.py). Wrong are results and gradients of operands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from random import Random
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from operation_cases import CASES, check
from operation_programs import KINDS, wrong
from random_networks import a_network

from convgen.algebra.grid import Grid

NETWORKS = "networks"
TOGETHER = 25  # operations in a package


def one(kind: str, draw: Random) -> None:
    if kind == NETWORKS:
        a_network(draw).check()
    else:
        check(draw, *CASES[kind](draw))


def small_grid(draw: Random, most: int) -> Grid:
    sizes = draw.choice(
        [s for s in ((2,), (3,), (4,), (2, 2), (5,), (6,), (2, 3), (2, 4), (2, 2, 2)) if prod(s) <= most]
    )
    return Grid(tuple((f"a{k}", n) for k, n in enumerate(sizes)))


def lowered(kinds: Sequence[str], cases: int, seed: str, processes: bool) -> int:
    total = 0
    for kind in kinds:
        draw, found, start = Random(f"{seed} lowered {kind}"), list[str](), perf_counter()
        for first in range(0, cases, TOGETHER):
            grid = small_grid(draw, 4 if processes else 8)
            try:
                found += wrong(draw, [kind], min(TOGETHER, cases - first), grid, processes=processes)
            except Exception as error:
                found.append(f"{type(error).__name__} on {grid}: {error}")
        for text in found:
            print(f"    {text[:400]}", file=sys.stderr)
        total += len(found)
        print(f"{kind:<30}{cases:>7}{len(found):>7}{perf_counter() - start:>9.1f}", flush=True)
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="of operations; all by default")
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", default="bet")
    parser.add_argument("--lowered", action="store_true", help="packages of operations, on virtual ranks")
    parser.add_argument("--processes", action="store_true", help="these on processes")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'operation':<30}{'cases':>7}{'wrong':>7}{'seconds':>9}")
    if asked.lowered or asked.processes:
        torch.set_default_dtype(torch.float64)
        return int(lowered(asked.kinds or KINDS, asked.cases, asked.seed, asked.processes) > 0)
    total = 0
    for kind in asked.kinds or (*CASES, NETWORKS):
        draw, wrong, start = Random(f"{asked.seed} {kind}"), 0, perf_counter()
        cases = asked.cases // (5 if kind == NETWORKS else 1)
        for _ in range(cases):
            try:
                one(kind, draw)
            except Exception as error:
                wrong += 1
                print(f"    {type(error).__name__}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
        total += wrong
        print(f"{kind:<30}{cases:>7}{wrong:>7}{perf_counter() - start:>9.1f}", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
