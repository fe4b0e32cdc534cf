"""A network's step of training beside torch's own, in one run: on one rank beside the module, on N=2 beside DDP.

    python bench/network_step.py [--model resnet18] [--batch 4] [--size 224] [--rounds 15]

Prints medians of interleaved rounds and their ratios, and processor time, of all threads of a rank; bytes as VOLUME has
them, and those of DDP's gradients, which are all-reduced: 2 (g-1)/g of their size. DDP's batch norms are of a rank's
own samples, as those of `--statistics local`; global ones, which are the default and equal one process, are more work
(torch's own, SyncBatchNorm, wants a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from options import options

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package, write_package
from convgen.spec.exported import graph_of


def model_of(name: str) -> torch.nn.Module:
    from convgen.spec.torchvision_ops import declare_operators

    try:
        import torchvision
    except RuntimeError:
        declare_operators()
        import torchvision
    torch.manual_seed(0)
    return getattr(torchvision.models, name)(num_classes=10)


def step(model: Any, x: torch.Tensor) -> tuple[float, float]:
    """Seconds, and those of processors."""
    model.zero_grad()
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    model(x).square().mean().backward()
    return time.perf_counter() - start, time.process_time() - busy


def rank_of(rank: int, ranks: int, args: argparse.Namespace, folder: str, port: int) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    module = model_of(args.model)
    x = torch.randn(args.batch, 3, args.size, args.size)
    theirs: Any = module if ranks == 1 else torch.nn.parallel.DistributedDataParallel(module)
    block = x if ranks == 1 else x.chunk(ranks)[rank].contiguous()
    models: dict[str, tuple[Any, torch.Tensor]] = {"theirs": (theirs, block)}
    volumes: dict[str, int] = {}
    for kind in args.statistics[: 1 if ranks == 1 else None]:
        net = load_package(Path(folder) / f"{kind}{ranks}")
        mesh = net.init_mesh("cpu")
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        models[kind] = model, net.scatter("x", x, mesh)
        volumes[kind] = sum(s["bytes_sent_per_rank"][0] for steps in net.VOLUME.values() for s in steps)
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in models}
    for turn in range(args.rounds + 2):
        for which, (model, given) in models.items():
            took = step(model, given)
            if turn > 1:
                times[which].append(took)
    if rank == 0:
        what = "the module" if ranks == 1 else "DDP"
        print(
            f"{ranks} rank{'s' * (ranks > 1)}   ms: median  least  processors   "
            f"ratio to {what}: median  least  processors"
        )
        walls, busy = ({k: [t[i] for t in v] for k, v in times.items()} for i in (0, 1))
        for which in models:
            a, b = walls[which], walls["theirs"]
            ratios = statistics.median(x / y for x, y in zip(a, b, strict=True)), min(a) / min(b)
            of_busy = min(busy[which]) / min(busy["theirs"])
            name = what if which == "theirs" else f"{which} statistics" if ranks > 1 else "convgen"
            print(
                f"  {name:18}{statistics.median(a) * 1e3:7.1f}{min(a) * 1e3:7.1f}{min(busy[which]) * 1e3:9.1f}"
                + (f"{ratios[0]:32.3f}{ratios[1]:7.3f}{of_busy:9.3f}" if which != "theirs" else ""),
                flush=True,
            )
        if ranks > 1:
            size = sum(p.numel() for p in module.parameters()) * 4
            sent = ", ".join(f"{n:,} with {k} statistics" for k, n in volumes.items())
            print(f"  a rank sends bytes a step: {sent}; DDP's gradients alone {2 * size * (ranks - 1) // ranks:,}")
    dist.destroy_process_group()


def main() -> None:
    args = options(
        __doc__, model="resnet18", batch=4, size=224, rounds=15, threads=1, statistics=["global", "local"], ranks=[1, 2]
    )
    graph, tensors = graph_of(model_of(args.model), (torch.zeros(args.batch, 3, args.size, args.size),), name="net")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            for kind in args.statistics:
                compiled = compile_network(graph, Grid((("N", ranks),)), statistics=kind)
                write_package(Path(folder) / f"{kind}{ranks}", files_of(compiled, tensors), "the folder")
            port = 29500 + ranks + int(time.time()) % 1000
            mp.spawn(rank_of, args=(ranks, args, folder, port), nprocs=ranks)


if __name__ == "__main__":
    main()
