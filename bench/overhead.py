"""What a generated module on one rank costs over torch: the same layer, forward and backward.

    python bench/overhead.py [--runs 40] [--repeats 5] [--threads 1]

conv is compared with torch.nn.functional.conv2d, Conv with torch.nn.Conv2d. Interleaved call by call in one process;
the ratio of each pair, its median a repeat, and the median of those: of the clock, and of the processor's time, which
other programs on the machine disturb less (and which counts what threads spin; so take one thread for it). A tiny layer
shows the microseconds of a call that no arithmetic hides. docs/torch.md has the command that keeps page faults out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from options import options

from convgen.compiler import compile_layer
from convgen.kernels.load import load_text
from convgen.spec.reader import layer_from_dict
from convgen.verify.virtual import VirtualTransport, World

SIZES = {"large": ([8, 64, 56, 56], 64), "tiny": ([1, 4, 4, 4], 4)}


def layer(size: str) -> dict[str, Any]:
    extents, filters = SIZES[size]
    return {
        "name": f"overhead_{size}", "layer": "conv2d", "input": extents, "out_channels": filters, "kernel_size": 3,
        "padding": 1, "grid": {"N": 1, "C": 1}, "algorithm": "stationary-x",
    }  # fmt: skip


def seconds(run: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


def calls(module: ModuleType, size: str, mesh: Any) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Of each way to call the layer: our forward and backward, and torch's."""
    extents, filters = SIZES[size]
    x = torch.randn(extents, requires_grad=True)
    w = torch.randn(filters, extents[1], 3, 3, requires_grad=True)
    dy = torch.randn(extents[0], filters, *extents[2:])

    def step(forward: Callable[[], torch.Tensor], weight: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            x.grad = weight.grad = None
            forward().backward(dy)

        return run

    theirs = torch.nn.Conv2d(extents[1], filters, 3, padding=1, bias=False)
    functional = step(lambda: torch.nn.functional.conv2d(x, w, padding=1), w)
    made = {"conv, plain blocks": (step(lambda: module.conv(x, w, mesh=mesh), w), functional)}
    for kind in ("dtensors", "blocks"):
        ours = module.Conv(mesh, parameters=kind)
        made[f"Conv, {kind}"] = step(lambda ours=ours: ours(x), ours.weight), step(lambda: theirs(x), theirs.weight)
    return made


def measure(size: str, runs: int, repeats: int, threads: int) -> None:
    module = load_text(compile_layer(layer_from_dict(layer(size))).module())

    def program(end: VirtualTransport) -> None:
        torch.set_num_threads(threads)
        for name, (ours, theirs) in calls(module, size, module.init_mesh(transport=end)).items():
            for _ in range(5):
                ours(), theirs()
            ratios: dict[int, list[float]] = {0: [], 1: []}
            extra: list[float] = []
            for _ in range(repeats):
                pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
                for which, of in ratios.items():
                    of.append(statistics.median(a[which] / b[which] for a, b in pairs))
                extra.append(statistics.median(a[1] - b[1] for a, b in pairs))
            clock, cpu = (statistics.median(ratios[which]) for which in (0, 1))
            spread = f"{min(ratios[1]):.3f} to {max(ratios[1]):.3f}"
            print(
                f"{size}  {name:19s} {clock:.4f} by the clock, {cpu:.4f} of the processor ({spread}), "
                f"{1e6 * statistics.median(extra):.0f} us more",
                flush=True,
            )

    World(1).run(program)


def main() -> None:
    asked = options(__doc__, runs=40, repeats=5, threads=torch.get_num_threads())
    print(f"median ratios to torch {torch.__version__} on {asked.threads} threads")
    measure("large", asked.runs, asked.repeats, asked.threads)
    measure("tiny", 10 * asked.runs, asked.repeats, asked.threads)


if __name__ == "__main__":
    main()
