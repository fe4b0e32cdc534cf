"""The bet in numbers: random operations on random grids, with free roles and storage, against one device.

    python bench/bet.py [--cases 1000] [kind ...]

A table of kinds: cases, and how many were wrong in a result, in a gradient by torch's vjp of local code, or in a
gradient that is a row of its own; last random networks of such rows, a fifth as many. The oracle executes signatures by
brute force (tests/brute.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from operation_cases import CASES, check
from random_networks import a_network

NETWORKS = "networks"


def one(kind: str, draw: Random) -> None:
    if kind == NETWORKS:
        a_network(draw).check()
    else:
        check(draw, *CASES[kind](draw))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="of operations; all by default")
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", default="bet")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'operation':<30}{'cases':>7}{'wrong':>7}{'seconds':>9}")
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
