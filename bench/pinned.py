"""convgen on one core: the one that this process's rank has in bench/overlap.py. Its arguments are convgen's."""

from __future__ import annotations

import os

from convgen.cli import main

if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    main()
