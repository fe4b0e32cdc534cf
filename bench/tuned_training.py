"""What tuning gains in training on a CPU: tuned and untuned modules over torch.nn.functional, forward and backward.

    python bench/tuned_training.py [--rounds 40] [--cache DIR] [--kernels]

Tunes four layers on one thread into a folder (a temporary one, or DIR, where what is measured already is not measured
again), and runs each tuned, untuned and by conv2d in turn, operands requiring gradients as in training. Prints the CPU
time of a forward and a backward pass over conv2d's, medians over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from convgen.compiler import Compiled, compile_layer
from convgen.spec.reader import layer_from_dict
from convgen.tune.apply import with_measured
from convgen.verify.program import load_module
from convgen.verify.virtual import VirtualTransport, World

LAYERS = {
    "k1_c22_f512": ([8, 22, 28, 28], 512, 1),
    "k1_c64_f43": ([8, 64, 28, 28], 43, 1),
    "k3_c37_f74": ([8, 37, 14, 14], 74, 3),
    "k3_c13_f9": ([8, 13, 28, 28], 9, 3),
}


def spec(name: str) -> dict[str, Any]:
    shape, filters, kernel = LAYERS[name]
    form = {"name": name, "layer": "conv2d", "input": shape, "out_channels": filters, "kernel_size": kernel}
    return {**form, "padding": kernel // 2, "grid": {"N": 1}, "algorithm": "sample"}


def tune(folder: Path) -> dict[str, Compiled]:
    """Each layer with the kernels that were measured for it here."""
    os.environ["CONVGEN_CACHE"] = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    files = [folder / f"{name}.yaml" for name in LAYERS]
    for name, file in zip(LAYERS, files, strict=True):
        YAML().dump(spec(name), file)
    command = [sys.executable, "-m", "convgen.cli", "tune", *map(str, files), "--threads", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made, _ = with_measured([compile_layer(layer_from_dict(spec(name))) for name in LAYERS])
    return dict(zip(LAYERS, made, strict=True))


def step(compiled: Compiled, name: str, end: VirtualTransport) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The module's convolution, from its own file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(compiled.module().replace(compiled.layer.name, name))
        layer = load_module(path)
    mesh = layer.init_mesh(transport=end)
    return lambda x, w: layer.conv(x, w, mesh=mesh)


def race(name: str, tuned: Compiled, rounds: int, end: VirtualTransport) -> dict[str, float]:
    """CPU time over conv2d's."""
    torch.set_num_threads(1)
    shape, filters, kernel = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).requires_grad_()
    w = torch.randn(filters, shape[1], kernel, kernel, generator=generator).requires_grad_()
    dy = torch.randn(shape[0], filters, *shape[2:], generator=generator)
    runs = {
        "tuned": step(tuned, f"{name}_tuned", end),
        "untuned": step(compile_layer(layer_from_dict(spec(name))), f"{name}_plain", end),
        "conv2d": lambda x, w: torch.nn.functional.conv2d(x, w, padding=kernel // 2),
    }

    def seconds(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        x.grad = w.grad = None
        start = time.thread_time()
        for _ in range(4):
            run(x, w).backward(dy)
        return time.thread_time() - start

    for run in runs.values():
        seconds(run)
    orders = islice(cycle(permutations(runs)), rounds)  # none is always behind the same one
    laps = [{n: seconds(runs[n]) for n in order} for order in orders]
    return {n: statistics.median(lap[n] / lap["conv2d"] for lap in laps) for n in ("tuned", "untuned")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cache", type=Path, help="folder of the database; a temporary one by default")
    parser.add_argument("--kernels", action="store_true", help="say which kernels were found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.cache or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = tune(folder)
        print("| layer | tuned / conv2d | untuned / conv2d | tuned / untuned |\n|---|---|---|---|")
        for name, compiled in found.items():
            over = World(1).run(lambda end, n=name, c=compiled: race(n, c, options.rounds, end))[0]
            ratio = over["tuned"] / over["untuned"]
            print(f"| {name} | {over['tuned']:.2f} | {over['untuned']:.2f} | {ratio:.2f} |", flush=True)
            for phase, kernel in compiled.layer.options.kernels if options.kernels else ():
                print(f"    {phase}: {kernel}")
        print(f"CPU time of one thread, torch {torch.__version__}")


if __name__ == "__main__":
    main()
