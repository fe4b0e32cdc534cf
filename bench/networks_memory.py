"""Peak memory of a training step by ranks, and a network that only two ranks can train.

    python bench/networks_memory.py [--batch 8] [--size 96] [--limit MIB]

Each run is a fresh process a rank, on one thread. Its peak is that of the system, less what it was before the network's
first step (torch itself is some hundred MiB). Then the same network in processes whose address space is limited to
between what one rank and what each of two needs: one process runs out of memory, two train.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import convgen

MIB = 2**20
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


def now(key: str) -> int:
    """A number of /proc/self/status in MiB: VmSize is address space, VmHWM the most that was resident."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, x = Stages(), torch.randn(options.batch, 3, options.size, options.size)
    model: Any
    if options.grid:
        rank, ranks, store = options.rank.split(",", 2)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
        )
        model = convgen.parallelize(module, (x,), options.grid)
    else:
        model = module
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    step(x[:1] if not options.grid else x[: 2 * options.ranks])  # what kernels and groups need at all
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, space = now("VmRSS"), now("VmSize")
    if options.limit:
        resource.setrlimit(resource.RLIMIT_AS, (space * MIB + options.limit * MIB, resource.RLIM_INFINITY))
    try:
        losses = [step(x) for _ in range(3)]
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        print(json.dumps({"error": str(error)[:90]}), flush=True)
        os._exit(0)
    print(json.dumps({"peak": now("VmHWM") - before, "losses": losses}), flush=True)
    os._exit(0)


def run(grid: str, ranks: int, options: argparse.Namespace, limit: int = 0) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, __file__, "--batch", str(options.batch), "--size", str(options.size)]
        commands = [
            [
                *base,
                "--rank",
                f"{r},{ranks},{folder}/store",
                "--grid",
                grid,
                "--limit",
                str(limit),
                "--ranks",
                str(ranks),
            ]
            for r in range(ranks)
        ]
        # Two arenas, and large blocks back to the system at once: else the peak is that of glibc's own keeping.
        env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
        children = [subprocess.Popen(c, stdout=subprocess.PIPE, env=env, text=True) for c in commands]
        return [json.loads(child.communicate(timeout=600)[0].splitlines()[-1]) for child in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--limit", type=int, default=0, help="MiB of address space beside what is taken before")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--grid", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    peaks: dict[str, int] = {}
    for name, grid, ranks in (
        ("module", "", 1),
        ("N=1", "N=1", 1),
        ("H=2", "H=2", 2),
        ("N=4", "N=4", 4),
        ("H=4", "H=4", 4),
    ):
        peaks[name] = max(one["peak"] for one in run(grid, ranks, options))
        print(f"{name:8s} {peaks[name]:6d} MiB a rank, {peaks[name] / peaks['module']:.2f} of the module", flush=True)
    limit = options.limit or (peaks["module"] + peaks["H=2"]) // 2
    for name, grid, ranks in (("module", "", 1), ("N=1", "N=1", 1), ("H=2", "H=2", 2)):
        found = run(grid, ranks, options, limit)
        print(f"within {limit} MiB more: {name:8s} {found[0]}", flush=True)


if __name__ == "__main__":
    main()
