"""Regions of random networks in numbers: of every value all ranks' regions against slicing the whole tensor.

    python bench/regions.py [--networks 500] [--first 0]

Each network has a random grid, on which some axes have shares, random storage of every value and random roles of every
row; its ranks are virtual. Wrong is a network where a value's regions do not tile it, one differs from what `scatter`
gives, or `block` reads another number of elements (tests/test_regions.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from test_regions import check_regions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    given = parser.parse_args()
    start, wrong, values = perf_counter(), [], 0
    for number in range(given.first, given.first + given.networks):
        with tempfile.TemporaryDirectory(prefix="convgen-regions-") as folder:
            try:
                values += check_regions(Path(folder), number)
            except AssertionError as error:
                wrong.append(number)
                print(f"network {number}: {error}")
    took = perf_counter() - start
    print(f"{given.networks} networks, {values} values: {len(wrong)} wrong ({took:.0f} s)")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
