"""Files as input: mutations of every format, by lines and by fields, against what a command promises.

    python bench/fuzz_files.py --minutes 10 [--format graph] [--seed 0]        # minutes of each format

A run ends with exit 0, or with exit 2 and a line; no traceback, nothing written beside -o, no more than a minute and
4 GiB. Each is a process of its own with these limits, whose home, temporary folder and working folder are scratch, and
that tells which files it opens to write, which processes it starts and whether a file's text ran. What breaks the
promise is printed with its seed; `--draws n` takes as many of each format, however long that takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from changed_files import FORMATS, fuzz, givens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="of each format")
    parser.add_argument("--draws", type=int, help="of each format, instead of minutes")
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        known = givens(Path(folder) / "given")
        for name in options.format or FORMATS:
            start, left = time.monotonic(), iter(range(options.draws or 0))
            end = start + 60 * options.minutes

            def more(left: Any = left, end: float = end) -> bool:
                return next(left, None) is not None if options.draws else time.monotonic() < end

            counts = fuzz(name, known[name], more, options.seed, Path(folder) / "work")
            total += counts
            each = ", ".join(f"{counts[what]} {what}" for what in ("taken", "refused", "wrong"))
            print(f"{name}: {counts.total()} runs in {time.monotonic() - start:.0f} s: {each}", flush=True)
    raise SystemExit(1 if total["wrong"] else 0)


if __name__ == "__main__":
    main()
