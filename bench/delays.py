"""Random networks with random delays: no deadlock, no number that depends on who is late, whatever the order of passes.

    python bench/delays.py [--networks 200] [--processes 20] [--first 0]

Each network has random branches, a random grid, random roles and storage of every row and value, and goes through the
passes that let things travel meanwhile, with random options, in a random order. The verifier passes it. Then a step of
training runs on virtual ranks without delays; on virtual ranks that are late by up to 20 ms before collectives and
starts, each by chance; and on the in-order fake of torch.distributed, where every rank runs what it has posted strictly
in its order, on one stream, with delays as well. Of the first `--processes` networks also in processes, over gloo.
All find the same numbers to the last bit.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from options import options

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from delayed_networks import check


def main() -> None:
    asked = options(__doc__, networks=200, processes=20, first=0)
    torch.set_num_threads(1)
    travelled, began = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for n in range(asked.networks):
            travelled += check(asked.first + n, Path(folder), processes=n < asked.processes)
            if n % 10 == 9 or n + 1 == asked.networks:
                print(f"{n + 1} networks, {time.monotonic() - began:.0f} s, started: {dict(travelled)}", flush=True)
    print(f"no deadlock, and one result each: {asked.networks} networks, {asked.processes} of them in processes too")


if __name__ == "__main__":
    main()
