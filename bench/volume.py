"""Training on volumes that one process can't hold: losses, memory and bytes read of four ranks under an address limit.

    python bench/volume.py [--extent 64] [--steps 20] [--grid D=2,H=2]

examples/volume.py's network in float64, on files that it writes chunk by chunk. Three runs in fresh processes:

| run | address space beside what imports, threads and groups take | shows |
|---|---|---|
| the plain module in one process | as much as it wants | losses |
| the same | half of what one process and what a rank needs, by the program | it runs out of memory |
| a process a rank | the same half | losses, memory, bytes read |

Memory is measured as bench/networks_memory.py does, in a step behind the last; said of AdamW's two states.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from networks_memory import MIB, files_kept, held, settled

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convgen.algebra.grid import Grid
from convgen.cost.network_memory import network_memory
from convgen.data import Batches
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.spec.text import parse_grid
from examples.volume import Training, begun, example, learning, original, source, write_volumes


def losses_of_one(folder: Path, width: int, levels: int, steps: int) -> list[float]:
    """Of the plain module, on the same samples in the same order as ranks have them."""
    module, arrays = original(width, levels).double(), source(folder, "train")
    batches, losses = Batches(arrays["label"].shape[0], 1, shuffle=True), list[float]()
    optimizer, scheduler = learning(module.parameters(), steps)
    while len(losses) < steps:
        for samples in batches:
            volume, label = (torch.from_numpy(a[samples[0] : samples[0] + 1]) for a in arrays.values())
            optimizer.zero_grad()
            loss = module(volume.double(), label.long())
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        batches.set_epoch(batches.epoch + 1)
    return losses


def run_of_one(options: argparse.Namespace) -> dict[str, Any]:
    losses_of_one(options.folder / "small", options.width, options.levels, 1)  # shows what kernels take at all
    limit(options.limit)
    return {"losses": losses_of_one(options.folder / "large", options.width, options.levels, options.steps)}


def run_of_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of the steps, bytes read in one and those of its regions; the peak of one more, in MiB."""
    epochs = options.steps // 4  # of four samples
    files = options.folder / "small", options.folder / "large"
    small, training = (
        begun(original(options.width, options.levels).double(), f, options.grid, 1, epochs) for f in files
    )
    next(small.steps(1))  # shows what kernels, threads and groups take at all
    limit(options.limit)
    losses = [loss for _, _, loss in training.steps(epochs)]
    training.optimizer.zero_grad()
    training.model.momentum = training.optimizer
    region, read = bytes_of_regions(training), training.loader.blocks.bytes_read / len(losses)
    another = training.steps(1000)
    batch = torch.empty(region // 4, dtype=torch.float64)  # about what a step has of its inputs
    rest = settled("RssAnon") - held(training.model, batch)
    files, most, _ = files_kept(lambda: [next(another)[2]])
    return {"losses": losses, "peak": most - files - rest, "read": read, "region": region}


def bytes_of_regions(training: Training) -> int:
    """What this rank's regions of a sample take in files: float32 with halo, and whole numbers of a byte."""
    volume, label = (training.net.region(n, training.mesh, halo=n == "volume") for n in ("volume", "label"))
    return 4 * prod(s.stop - s.start for s in volume) + prod(s.stop - s.start for s in label)


def limit(mib: int) -> None:
    """Let this process have so many MiB more of address space than it has."""
    if mib:
        resource.setrlimit(resource.RLIMIT_AS, (int(settled("VmSize") + mib) * MIB, resource.RLIM_INFINITY))


def run_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    try:
        if options.rank == "one":
            found = run_of_one(options)
        else:
            rank, ranks, store = options.rank.split(",", 2)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
            found = run_of_rank(options)
            dist.barrier()
    except (RuntimeError, MemoryError) as error:
        found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:150]}
    print(json.dumps(found), flush=True)
    os._exit(0)


def run(options: argparse.Namespace, folder: Path, ranks: list[str], mib: int) -> list[dict[str, Any]]:
    base = [sys.executable, __file__, "--folder", str(folder), "--limit", str(mib)]
    for name in ("extent", "steps", "grid", "width", "levels"):
        base += [f"--{name}", str(getattr(options, name))]
    # Two arenas, and large blocks back to the system at once: else the peak is that of glibc's own keeping.
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
    children = [subprocess.Popen([*base, "--rank", r], stdout=subprocess.PIPE, env=env, text=True) for r in ranks]
    return [json.loads(child.communicate(timeout=1800)[0].splitlines()[-1]) for child in children]


def said(options: argparse.Namespace, folder: Path, grid: str) -> float:
    """MiB of the fullest rank, by the program."""
    module = original(options.width, options.levels).double()
    volume, label = source(folder, "train").values()
    given = example(volume, 1, torch.float64), example(label, 1, torch.int64)
    graph, _ = graph_of(module, given, name="volume")
    program = compile_network(graph, Grid(tuple(parse_grid(grid).items()))).program
    return network_memory(program, optimizer_states=2).peak / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extent", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="a multiple of the four samples")
    parser.add_argument("--grid", default="D=2,H=2")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--levels", type=int, default=2)
    for hidden in ("--rank", "--folder", "--limit"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, type={"--folder": Path, "--limit": int}.get(hidden, str))
    options = parser.parse_args()
    if options.rank:
        run_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        write_volumes(files / "small", 8, 4)
        write_volumes(files / "large", options.extent, options.extent // 2)
        one, rank = (said(options, files / "large", grid) for grid in ("N=1", options.grid))
        mib, ranks = int(one + rank) // 2, prod(parse_grid(options.grid).values())
        print(f"by the program one process needs {one:.0f} MiB, a rank of {options.grid} {rank:.0f}", flush=True)
        (wanted,) = run(options, files, ["one"], 0)
        (fails,) = run(options, files, ["one"], mib)
        print(f"one process within {mib} MiB more: {fails.get('error', 'has room')}", flush=True)
        found = run(options, files, [f"{r},{ranks},{folder}/store" for r in range(ranks)], mib)
    errors = {one["error"] for one in found if "error" in one}
    if errors:
        raise SystemExit(f"{ranks} ranks within {mib} MiB more: {'; '.join(errors)}")
    off = max(abs(a / b - 1) for each in found for a, b in zip(each["losses"], wanted["losses"], strict=True))
    print(f"{ranks} ranks within {mib} MiB more: {options.steps} steps, losses at most {off:.0e} from one process's")
    peak = max(each["peak"] for each in found)
    print(f"peak of the fullest rank: {peak:.0f} MiB, {peak / rank:.2f} of what the program says")
    for what, name in (("bytes that ranks read a step", "read"), ("bytes of their regions", "region")):
        print(f"{what}: {', '.join(f'{each[name]:,.0f}' for each in found)}")


if __name__ == "__main__":
    main()
