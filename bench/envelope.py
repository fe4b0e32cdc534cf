"""What the message costs that every call begins with: steps with it and without it (CONVGEN_AGREE=0), in turn.

    python bench/envelope.py [--ranks 2] [--rounds 100] [--steps 10] [--split N]
    python bench/envelope.py --sockets --split H     # steps whose short tensors go by sockets, and by gloo (TOLD = 0)

A tiny layer, a tiny network and small_resnet on processes of this machine; medians over rounds of the longest rank's
milliseconds of forward and backward, by the clock and of its processor, and the median of the differences of
neighbouring rounds with the middle half of them. A round is several steps, one behind the other as in training. The
order of the two changes from round to round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import options

import convgen
from convgen.compiler import compile_layer
from convgen.packages import runtime_of
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


Taken = tuple[float, float]  # milliseconds by the clock, and of the processor


def measured(
    step: Callable[[], None], rounds: int, steps: int, turn: Callable[[bool], None]
) -> tuple[list[Taken], list[Taken]]:
    """Of a step of the longest rank, with what is measured and without.

    Args:
        turn: on or off.
    """
    taken: dict[bool, list[Taken]] = {True: [], False: []}
    for i in range(rounds + 10):
        for on in (True, False) if i % 2 else (False, True):
            turn(on)
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            ends = time.perf_counter(), time.process_time()
            longest = torch.tensor([(b - a) / steps * 1e3 for a, b in zip(start, ends, strict=True)])
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if i >= 10:
                taken[on].append((float(longest[0]), float(longest[1])))
    return taken[True], taken[False]


def turns(modules: Sequence[Any], sockets: bool) -> Callable[[bool], None]:
    """Of what is measured: the message of calls, or sockets between ranks for short tensors."""
    told = [module.TOLD for module in modules]

    def turn(on: bool) -> None:
        if not sockets:
            os.environ["CONVGEN_AGREE"] = str(int(on))
        else:
            for module, short in zip(modules, told, strict=True):
                module.TOLD = short if on else 0

    return turn


def main() -> None:
    args = options(
        __doc__, ranks=2, rounds=100, steps=(10, "of a round"), split=("N", "the grid's axis"), sockets=False
    )
    grid = {args.split: args.ranks}
    spec = {"name": "tiny_layer", "layer": "conv2d", "input": [4, 4, 8, 8], "out_channels": 4, "kernel_size": 3}
    spec |= {"padding": 1, "grid": grid, "algorithm": "sample" if args.split == "N" else "spatial"}
    made = compile_layer(layer_from_dict(spec, "bench"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny_layer.py"
        path.write_text(made.module(), encoding="utf-8")
        examples = {
            "tiny network": (tiny(), torch.randn(4, 4, 8, 8)),
            "small_resnet": (small_resnet(), torch.randn(8, 3, 32, 32)),
        }
        packages = {name: (convgen.from_torch(m, (x,), grid), x) for name, (m, x) in examples.items()}

        def program(rank: int) -> dict[str, tuple[list[Taken], list[Taken]]]:
            torch.set_num_threads(1)
            layer = load_module(path)
            turn = turns([layer, *(runtime_of(package) for package, _ in packages.values())], args.sockets)
            steps = {"tiny layer": layer_step(layer)}
            steps |= {name: network_step(package, x) for name, (package, x) in packages.items()}
            return {name: measured(step, args.rounds, args.steps, turn) for name, step in steps.items()}

        found = spawn(program, args.ranks, 3600.0)[0]
    print(f"grid {args.split}={args.ranks}, {args.rounds} rounds of {args.steps} steps")
    what = "sockets" if args.sockets else "the message"
    print(f"a step with {what} and without, ms; difference, us (middle half)")
    for name, (on, off) in found.items():
        for k, by in enumerate(("by the clock", "processor")):
            differences = sorted((a[k] - b[k]) * 1e3 for a, b in zip(on, off, strict=True))
            low, middle, high = (differences[len(differences) * q // 4] for q in (1, 2, 3))
            both = " ".join(f"{statistics.median(one[k] for one in those):8.2f}" for those in (on, off))
            print(f"{name:<14} {by:<12} {both} {middle:8.0f} ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
