"""What a generated module on one rank costs over torch.nn.functional: the same layer, forward and backward.

    python bench/overhead.py [--runs 40] [--repeats 5]

Interleaved call by call in one process; the ratio of each pair, its median a repeat, and the median of those.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from convgen.compiler import compile_layer
from convgen.spec.reader import layer_from_dict
from convgen.verify.program import load_module
from convgen.verify.virtual import VirtualTransport, World

LAYER = {
    "name": "overhead_layer", "layer": "conv2d", "input": [8, 64, 56, 56], "out_channels": 64, "kernel_size": 3,
    "padding": 1, "grid": {"N": 1, "C": 1}, "algorithm": "stationary-x",
}  # fmt: skip


def seconds(run: object) -> float:
    start = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{LAYER['name']}.py"
        path.write_text(compile_layer(layer_from_dict(LAYER)).module())
        layer = load_module(path)

        def program(end: VirtualTransport) -> None:
            torch.set_num_threads(threads)
            mesh = layer.init_mesh(transport=end)
            x = torch.randn(8, 64, 56, 56, requires_grad=True)
            w = torch.randn(64, 64, 3, 3, requires_grad=True)
            dy = torch.randn(8, 64, 56, 56)

            def ours() -> None:
                x.grad = w.grad = None
                layer.conv(x, w, mesh=mesh).backward(dy)

            def torchs() -> None:
                x.grad = w.grad = None
                torch.nn.functional.conv2d(x, w, padding=1).backward(dy)

            for _ in range(5):
                ours(), torchs()
            medians: list[float] = []
            for repeat in range(options.repeats):
                pairs = [(seconds(ours), seconds(torchs)) for _ in range(options.runs)]
                medians.append(statistics.median(a / b for a, b in pairs))
                a, b = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
                print(f"repeat {repeat}: module {a:.2f} ms, torch.nn.functional {b:.2f} ms, ratio {medians[-1]:.4f}")
            print(f"median ratio {statistics.median(medians):.4f} on {threads} threads, torch {torch.__version__}")

        World(1).run(program)


if __name__ == "__main__":
    main()
