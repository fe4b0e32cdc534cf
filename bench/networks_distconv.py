"""A training step beside LBANN's DistConv on 2 processes, of a stack of layers that it gets right; time and bytes.

    python bench/networks_distconv.py --distconv CHECKOUT [--size 128] [--batch 2] [--rounds 15]

CHECKOUT is a folder with the package `distconv` of github.com/LBANN/DistConv, which no package index has: the papers'
authors' library on DTensor, which splits rows alone. The stack is convolutions with same padding (7x7, 3x3, stride 2,
1x1) and rectifiers: its batch and group norms, pooling and whole networks are wrong without an error. Both train in the
same two processes in turn, one thread each; gradients are compared before anything is timed. Bytes are what
leaves all ranks: convgen's as VOLUME has them, DistConv's counted at torch.distributed's messages, and its gradients'
all-reduce by a ring as for DDP, 2 (g-1)/g of their size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from options import options
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package, write_package
from convgen.spec.exported import graph_of


def stack(channels: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    c = channels
    return nn.Sequential(
        nn.Conv2d(3, c, 7, padding=3), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, 2 * c, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(2 * c, c, 1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1),
    )  # fmt: skip


class Messages:
    """Bytes of messages that this rank has sent."""

    def __init__(self) -> None:
        self.sent, self._plain = 0, dist.batch_isend_irecv

    def __call__(self, ops: list[Any]) -> Any:
        self.sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return self._plain(ops) if ops else []


def rank_of(rank: int, ranks: int, asked: argparse.Namespace, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, asked.distconv)
    from distconv import DCTensor, DistConvDDP, ParallelStrategy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    module, x = stack(), torch.randn(asked.batch, 3, asked.size, asked.size)
    dist.broadcast(x, 0)
    net = load_package(Path(folder) / "net")
    mesh = net.init_mesh("cpu")
    ours = net.Network(mesh)
    ours.load_full(module.state_dict())
    mine = net.scatter("input", x, mesh)
    strategy = ParallelStrategy(num_shards=ranks, shard_dim=2, device_type="cpu")
    theirs = DistConvDDP(stack(), parallel_strategy=strategy)
    block = DCTensor.distribute(x, strategy)._tensor

    def step_of_ours() -> Tensor:
        ours.zero_grad()
        y = ours(mine)
        y.square().sum().backward()
        return y

    def step_of_theirs() -> Tensor:
        theirs.zero_grad()
        y = theirs(DCTensor.from_shard(block, strategy))
        y.square().sum().backward()
        return y

    messages = Messages()
    dist.batch_isend_irecv = messages
    step_of_theirs()
    dist.batch_isend_irecv = messages._plain
    step_of_ours()
    module(x).square().sum().backward()
    found = ours.full_gradients()
    for name, p in module.named_parameters():
        other = theirs.module.get_parameter(name).grad
        assert p.grad is not None and other is not None
        for which, g in (("convgen", found[name]), ("DistConv", other)):
            off = float((g - p.grad).abs().max() / p.grad.abs().max())
            assert off < 1e-3, f"{which}: the gradient of {name} is {off:.1e} off"
    times: dict[str, list[float]] = {"convgen": [], "DistConv": []}
    for turn in range(asked.rounds + 2):
        for which, step in (("DistConv", step_of_theirs), ("convgen", step_of_ours)):
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn > 1:
                times[which].append(time.perf_counter() - start)
    halos = torch.tensor(messages.sent)
    dist.all_reduce(halos)
    if rank == 0:
        a, b = (statistics.median(times[k]) * 1e3 for k in ("convgen", "DistConv"))
        least = min(times["convgen"]) / min(times["DistConv"])
        print(f"{ranks} ranks: {a:.1f} ms, DistConv {b:.1f} ms: ratio {a / b:.3f}, of minima {least:.3f}")
        size = sum(p.numel() for p in module.parameters()) * 4
        sent = sum(sum(s["bytes_sent_per_rank"]) for steps in net.VOLUME.values() for s in steps)
        others = int(halos) + 2 * size * (ranks - 1)
        print(f"  all ranks send {sent:,} bytes a step; DistConv {others:,}, of which halos {int(halos):,}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    asked, ranks = options(__doc__, distconv=("", "a checkout; needed"), batch=2, size=128, rounds=15), 2
    if not asked.distconv:
        raise SystemExit("--distconv CHECKOUT is needed: a folder with distconv of github.com/LBANN/DistConv")
    shape = (asked.batch, 3, asked.size, asked.size)
    graph, tensors = graph_of(stack(), (torch.zeros(shape),), name="net")
    with tempfile.TemporaryDirectory() as folder:
        package = files_of(compile_network(graph, Grid((("H", ranks),))), tensors)
        write_package(Path(folder) / "net", package, "the folder")
        mp.spawn(rank_of, args=(ranks, asked, folder, 29500 + int(time.time()) % 1000), nprocs=ranks)


if __name__ == "__main__":
    main()
