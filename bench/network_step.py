"""A network's step of training beside torch's own, in one run: on one rank beside the module, on N=2 beside DDP.

    python bench/network_step.py [--model resnet18] [--batch 4] [--size 224] [--rounds 15]

Prints medians of interleaved rounds and their ratios; bytes as VOLUME has them, and those of DDP's gradients, which are
all-reduced: 2 (g-1)/g of their size.
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

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package
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


def step(model: Any, x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - start


def rank_of(rank: int, ranks: int, args: argparse.Namespace, folder: str, port: int) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    module = model_of(args.model)
    x = torch.randn(args.batch, 3, args.size, args.size)
    net = load_package(Path(folder) / f"on{ranks}")
    mesh = net.init_mesh("cpu")
    ours = net.Network(mesh)
    ours.load_full(module.state_dict())
    theirs: Any = module if ranks == 1 else torch.nn.parallel.DistributedDataParallel(module)
    mine = net.scatter("x", x, mesh)
    block = x if ranks == 1 else x.chunk(ranks)[rank].contiguous()
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(args.rounds + 2):
        for which, model, given in (("theirs", theirs, block), ("ours", ours, mine)):
            dist.barrier()
            took = step(model, given)
            if turn > 1:
                times[which].append(took)
    if rank == 0:
        ours_s, theirs_s = (statistics.median(times[k]) for k in ("ours", "theirs"))
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["theirs"], strict=True))
        least = min(times["ours"]) / min(times["theirs"])
        what = "the module" if ranks == 1 else "DDP (statistics of a rank's own samples)"
        print(f"{ranks} rank{'s' * (ranks > 1)}: {ours_s * 1e3:.1f} ms, {what} {theirs_s * 1e3:.1f} ms")
        print(f"  ratio {ratio:.3f}, of minima {least:.3f}")
        if ranks > 1:
            sent = sum(s["bytes_sent_per_rank"][0] for steps in net.VOLUME.values() for s in steps)
            size = sum(p.numel() for p in module.parameters()) * 4
            print(f"  a rank sends {sent:,} bytes a step; DDP's gradients alone {2 * size * (ranks - 1) // ranks:,}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()
    graph, tensors = graph_of(model_of(args.model), (torch.zeros(args.batch, 3, args.size, args.size),), name="net")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            package = Path(folder) / f"on{ranks}"
            package.mkdir()
            for name, content in files_of(compile_network(graph, Grid((("N", ranks),))), tensors).items():
                path = package / name
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            port = 29500 + ranks + int(time.time()) % 1000
            mp.spawn(rank_of, args=(ranks, args, folder, port), nprocs=ranks)


if __name__ == "__main__":
    main()
