"""How long `convgen compile` takes as a whole process: a layer on a 2x2 grid, the same with `auto`, and ResNet-50.

    python bench/compile_time.py [--runs 5]

Medians over runs after a warm-up (which writes Python's bytecode); the wall time of the process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from options import options

ROOT = Path(__file__).resolve().parent.parent
LAYER = """\
name: res5a_branch2b
layer: conv2d
input: [8, 64, 14, 14]
out_channels: 96
kernel_size: 3
padding: 1
grid: {N: 2, C: 2}
algorithm: ALGORITHM
"""


def main() -> None:
    runs = options(__doc__, runs=5).runs
    with tempfile.TemporaryDirectory() as folder:
        for algorithm in ("stationary-x", "auto"):
            (Path(folder) / f"{algorithm}.yaml").write_text(LAYER.replace("ALGORITHM", algorithm))
        cases = {
            "a layer, stationary-x, 2x2": (["stationary-x.yaml"], 1.0),
            "a layer, auto, 2x2": (["auto.yaml"], 1.5),
            "ResNet-50's CSV, auto, 2x2": ([str(ROOT / "tuning/layers/resnet50.csv"), "--grid", "N=2,C=2"], 6.0),
        }
        for name, (arguments, goal) in cases.items():
            command = [sys.executable, "-m", "convgen.cli", "compile", *arguments, "-o", "out"]
            times: list[float] = []
            for run in range(runs + 1):
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
                if run:
                    times.append(time.perf_counter() - start)
            print(f"{name:<28} median {statistics.median(times):.2f} s (of {runs}; goal {goal} s)")


if __name__ == "__main__":
    main()
