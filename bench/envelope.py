"""What the message costs that every call begins with: steps with it and without it (CONVGEN_AGREE=0), in turn.

    python bench/envelope.py [--ranks 2] [--rounds 100] [--steps 10]

A tiny layer, a tiny network and small_resnet on processes of this machine; medians over rounds of the longest rank's
milliseconds of forward and backward by the clock, and the median of the differences of neighbouring rounds with the
middle half of them. A round is several steps, one behind the other as in training. The order of the two changes from
round to round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import options

import convgen
from convgen.compiler import compile_layer
from convgen.spec.reader import layer_from_dict
from convgen.verify.processes import spawn
from convgen.verify.program import load_module
from examples.resnet import small_resnet


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1))


def layer_step(module: Any) -> Callable[[], None]:
    mesh = module.init_mesh("cpu")
    m, x = module.Conv(mesh), module.scatter("x", torch.randn(4, 4, 8, 8), mesh)

    def step() -> None:
        m(x).sum().backward()
        m.zero_grad()

    return step


def network_step(package: Any, example: torch.Tensor) -> Callable[[], None]:
    mesh = package.init_mesh("cpu")
    model, x = package.Network(mesh), package.scatter(package.Network._inputs[0], example, mesh)

    def step() -> None:
        model(x, batch=len(example)).sum().backward()
        model.zero_grad()

    return step


def measured(step: Callable[[], None], rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step of the longest rank, with the message and without."""
    taken: dict[str, list[float]] = {"1": [], "0": []}
    for i in range(rounds + 10):
        for agree in ("1", "0") if i % 2 else ("0", "1"):
            os.environ["CONVGEN_AGREE"] = agree
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            longest = torch.tensor((time.perf_counter() - start) / steps)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if i >= 10:
                taken[agree].append(float(longest) * 1e3)
    return taken["1"], taken["0"]


def main() -> None:
    args = options(__doc__, ranks=2, rounds=100, steps=(10, "of a round"))
    grid = {"N": args.ranks}
    spec = {"name": "tiny_layer", "layer": "conv2d", "input": [4, 4, 8, 8], "out_channels": 4, "kernel_size": 3}
    made = compile_layer(layer_from_dict({**spec, "padding": 1, "grid": grid, "algorithm": "sample"}, "bench"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny_layer.py"
        path.write_text(made.module(), encoding="utf-8")
        examples = {
            "tiny network": (tiny(), torch.randn(4, 4, 8, 8)),
            "small_resnet": (small_resnet(), torch.randn(8, 3, 32, 32)),
        }
        packages = {name: (convgen.from_torch(m, (x,), grid), x) for name, (m, x) in examples.items()}

        def program(rank: int) -> dict[str, tuple[list[float], list[float]]]:
            torch.set_num_threads(1)
            steps = {"tiny layer": layer_step(load_module(path))}
            steps |= {name: network_step(package, x) for name, (package, x) in packages.items()}
            return {name: measured(step, args.rounds, args.steps) for name, step in steps.items()}

        found = spawn(program, args.ranks, 3600.0)[0]
    print(f"ranks {args.ranks}, {args.rounds} rounds of {args.steps} steps")
    print("a step with the message and without, ms; difference, us (middle half)")
    for name, (on, off) in found.items():
        differences = sorted((a - b) * 1e3 for a, b in zip(on, off, strict=True))
        low, middle, high = (differences[len(differences) * k // 4] for k in (1, 2, 3))
        both = " ".join(f"{statistics.median(those):8.2f}" for those in (on, off))
        print(f"{name:<14} {both} {middle:8.0f} ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
