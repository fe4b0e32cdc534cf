"""Peak memory of a training step a rank: measured, beside what a program says; and a network that only two ranks train.

    python bench/networks_memory.py [--only unet] [--limit MIB] [--again] [--autocast]

Each run is a fresh process a rank, on one thread, of a package whose inputs are blocks; its optimizer is SGD with
momentum. The peak is the system's in the third step, above what the process has between steps, and to that is added
what a network has then, parameters, momentum, buffers and its input: what Python, kernels and threads need is not the
network's. Beside it what cost/network_memory.py says of the program, part by part. Then a network in processes whose
address space is limited to between what one rank and what each of two needs: one runs out of memory, two train.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from networks_training import ResNet18
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import convgen
from convgen.algebra.grid import Grid
from convgen.cost.network_memory import network_memory
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.spec.text import parse_grid
from examples.vae_decoder import Decoder

MIB = 2**20
TRIES = 8  # steps until one is undisturbed
CHANNELS = 32


class Stages(nn.Module):
    """Convolutions that keep all rows: activations are nearly all of its memory."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        rows: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)]
        for _ in range(depth):
            rows += [nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)]
        self.body, self.head = nn.Sequential(*rows), nn.Linear(CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Skips(nn.Module):
    """A U-Net of two levels, whose upper activations wait for the way back."""

    def __init__(self, c: int = 24) -> None:
        super().__init__()

        def twice(channels: int, filters: int) -> nn.Module:
            convs = nn.Conv2d(channels, filters, 3, padding=1), nn.Conv2d(filters, filters, 3, padding=1)
            return nn.Sequential(convs[0], nn.BatchNorm2d(filters), nn.ReLU(), convs[1], nn.ReLU())

        self.one, self.two, self.three = twice(3, c), twice(c, 2 * c), twice(2 * c, 4 * c)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.back2, self.back1, self.last = twice(4 * c, 2 * c), twice(2 * c, c), nn.Conv2d(c, 2, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y = self.two(self.pool(x))
        z = self.up2(self.three(self.pool(y)))
        y = self.up1(self.back2(torch.cat([z, y], 1)))
        return self.last(self.back1(torch.cat([y, x], 1)))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "stages": (Stages, (8, 3, 96, 96)),
    "resnet18": (ResNet18, (16, 3, 128, 128)),
    "unet": (Skips, (4, 3, 128, 128)),
    "decoder": (Decoder, (2, 4, 24, 24)),
}
AGAIN = {"resnet18": ("layer1", "layer2"), "unet": ("one", "two", "back1", "back2"), "stages": (), "decoder": ()}
GRIDS = ("N=1", "N=2", "H=2", "C=2", "N=2,H=2", "H=4")


def now(key: str) -> float:
    """A number of /proc/self/status in MiB: VmSize is address space, VmHWM the most that was resident."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = NETWORKS[options.only]
    rank, ranks, store = options.rank.split(",", 2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    again = options.recompute
    module = make()
    (argument,) = inspect.signature(module.forward).parameters
    low = "bfloat16" if options.autocast else None
    net = convgen.from_torch(
        module, (torch.zeros(shape),), options.grid, autocast=low, recompute=again, name=options.only
    )
    under = torch.autocast("cpu", torch.bfloat16, enabled=options.autocast)

    def call(model: Any, x: Tensor, batch: int | None = None) -> Tensor:
        with under:
            return model(x, batch=batch)

    mesh = net.init_mesh("cpu")
    few = net.NET.grid.get("N", 1)  # samples of a step that shows what kernels, threads and groups need at all
    small = net.scatter(argument, torch.randn(few, *shape[1:]), mesh)
    learn(net.Network(mesh), lambda m: call(m, small, few), 1)
    space = settled("VmSize")
    if options.limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(space + options.limit) * MIB, resource.RLIM_INFINITY))
    try:
        model = net.Network(mesh)
        x = net.scatter(argument, torch.randn(shape), mesh)
        learn(model, lambda m: call(m, x), 2)
        model.momentum.zero_grad()
        rest = settled("RssAnon") - held(model, x)
        files, most, losses = files_kept(lambda: learn(model, lambda m: call(m, x), 1))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        print(json.dumps({"error": str(error)[:90]}), flush=True)
        os._exit(0)
    print(json.dumps({"peak": most - files - rest, "losses": losses}), flush=True)
    os._exit(0)


def settled(key: str) -> float:
    """A number of the process when what is free is the system's again: else it is taken again, and is not seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return now(key)


def held(model: Any, x: Tensor) -> float:
    """MiB of what a network has between steps: parameters, momentum, buffers, and its input."""
    states = [v for state in model.momentum.state.values() for v in state.values() if isinstance(v, Tensor)]
    blocks = [t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *model.buffers(), *states)]
    return sum(t.numel() * t.element_size() for t in (*blocks, x)) / MIB


def files_kept(step: Callable[[], list[float]]) -> tuple[float, float, list[float]]:
    """(what is resident of files, the most that was resident in all, the losses) of the first of some steps during
    which the system took no pages of files: the peak that it keeps is of both, and programs' own pages come and go."""
    losses = list[float]()
    for _ in range(TRIES):
        files = now("RssFile") + now("RssShmem")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        losses += step()
        if abs(now("RssFile") + now("RssShmem") - files) <= 1:
            return files, now("VmHWM"), losses
    raise SystemExit("the system takes pages of files in every step: less on this machine, please")


def learn(model: Any, call: Any, steps: int) -> list[float]:
    """Steps of training; the loss of a block is enough here."""
    if not hasattr(model, "momentum"):
        model.momentum = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    losses = list[float]()
    for _ in range(steps):
        model.momentum.zero_grad()
        loss = call(model).square().mean()
        loss.backward()
        model.momentum.step()
        losses.append(float(loss.detach()))
    return losses


def run(
    name: str, grid: str, limit: int = 0, recompute: Sequence[str] = (), *, autocast: bool = False
) -> list[dict[str, Any]]:
    ranks = math.prod(parse_grid(grid).values())
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, __file__, "--only", name, "--grid", grid, "--limit", str(limit)]
        base += ["--recompute", *recompute] if recompute else []
        base += ["--autocast"] * autocast
        commands = [[*base, "--rank", f"{r},{ranks},{folder}/store"] for r in range(ranks)]
        # Two arenas, and large blocks back to the system at once: else the peak is that of glibc's own keeping.
        env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
        children = [subprocess.Popen(c, stdout=subprocess.PIPE, env=env, text=True) for c in commands]
        return [json.loads(child.communicate(timeout=600)[0].splitlines()[-1]) for child in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of stages, resnet18, unet, decoder")
    parser.add_argument("--grids", nargs="*", default=GRIDS)
    parser.add_argument("--limit", type=int, default=0, help="MiB of address space beside what is taken before")
    parser.add_argument("--again", action="store_true", help="with blocks that backward computes again")
    parser.add_argument("--autocast", action="store_true", help="in float32 under autocast of bfloat16")
    parser.add_argument("--recompute", nargs="*", default=(), help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--grid", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    heads = ("parameters", "optimizer", "gradients", "saved", "passing", "said", "measured")
    print(
        f"MiB on the fullest rank\n{'network':10}{'grid':9}"
        + "".join(f"{h:>11}" for h in heads)
        + "  said / measured  activations of one rank's"
    )
    peaks: dict[tuple[str, str], float] = {}
    for name, (make, shape) in NETWORKS.items():
        if options.only not in name:
            continue
        active: dict[str, float] = {}
        graph, _ = graph_of(make(), (torch.zeros(shape),), name=name)
        for grid in options.grids:
            axes = tuple(parse_grid(grid).items())
            again = AGAIN[name] if options.again else ()
            low = "bfloat16" if options.autocast else ""
            said = network_memory(compile_network(graph, Grid(axes), autocast=low, again=again).program)
            of_ranks = run(name, grid, recompute=again, autocast=options.autocast)
            peaks[name, grid] = measured = max(one["peak"] for one in of_ranks)
            parts = [getattr(said, h) / MIB for h in heads[:5]]
            active[grid] = measured - parts[0] - parts[1]  # beside parameters and momentum
            share = f"{active[grid] / active['N=1']:14.2f}" if "N=1" in active else ""
            print(
                f"{name:10}{grid:9}" + "".join(f"{p:11.1f}" for p in (*parts, said.peak / MIB)) + f"{measured:11.0f}"
                f"{said.peak / MIB / measured:9.2f}{share}",
                flush=True,
            )
    if ("stages", "H=2") in peaks and ("stages", "N=1") in peaks:
        limit = options.limit or int(peaks["stages", "N=1"] + peaks["stages", "H=2"]) // 2
        for grid in ("N=1", "H=2"):
            print(f"stages within {limit} MiB more, {grid}: {run('stages', grid, limit)[0]}", flush=True)


if __name__ == "__main__":
    main()
