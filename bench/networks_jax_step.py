"""Step times beside XLA's partitioner on the same graph, in the same processes: networks of networks_jax.py.

    pip install jax==0.10.2 [diffusers]   # beside convgen and torch, in an environment of its own
    python bench/networks_jax_step.py [--only decoder] [--rounds 9] [--letters HC]

Two processes, each pinned to a core of its own, run in turn convgen's package over gloo and XLA's program over its own
gloo collectives; a third, on as many cores as both, runs the module itself with as many threads. Medians of rounds in
random order, of the slower rank; "forward" is the loss, "training" the loss and the gradients of all parameters. Losses
are compared. XLA's step has no running statistics. Where channels are split XLA is told every layout, as in
networks_jax.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jax.sharding import NamedSharding
from networks_jax import LETTERS, NETWORKS, Scored, loss_of, split_of, splitting
from options import options
from torch import nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package, write_package
from convgen.program.network import Program
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph

Steps = dict[tuple[str, str], Callable[[], float]]  # by system and pass: what runs it and gives the loss
PASSES = ("forward", "training")


def autoencoder() -> nn.Module:
    """diffusers' own decoder, in small."""
    from convgen.spec.torchvision_ops import declare_operators

    with contextlib.suppress(RuntimeError):
        declare_operators()
    from diffusers import AutoencoderKL

    up, down = ("UpDecoderBlock2D",) * 4, ("DownEncoderBlock2D",) * 4
    return AutoencoderKL(
        block_out_channels=(32, 64, 64, 64), layers_per_block=1, norm_num_groups=8, latent_channels=4,
        down_block_types=down, up_block_types=up,
    ).decoder  # fmt: skip


CASES = {**NETWORKS, "AutoencoderKL": (autoencoder, (2, 4, 16, 16))}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The network with its loss, and an input; the same in every process."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    return Scored(make()), torch.randn(shape, generator=torch.Generator().manual_seed(1))


def torch_steps(model: Any, x: torch.Tensor) -> Steps:
    def forward() -> float:
        with torch.no_grad():
            return float(model(x))

    def training() -> float:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return float(loss.detach())

    return {("", "forward"): forward, ("", "training"): training}


def jax_steps(graph: Graph, program: Program, letter: str, state: dict[str, Any], x: np.ndarray) -> Steps:
    """XLA's, over all processes."""
    whole, split = graph.at(graph.batch), splitting(jax.devices())

    def spread(value: np.ndarray, sharding: NamedSharding) -> Any:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    named = {v.name: state[v.name] for v in whole.parameters}
    learnt = {n: spread(value, split(value.shape, split_of(program, n))) for n, value in named.items()}
    image = spread(x, split(x.shape, LETTERS.index(letter)))
    buffers = {v.name: np.zeros(v.shape, np.float32) for v in whole.buffers}
    loss = loss_of(whole, program, split, buffers, letter == "C")
    kept = {n: t.sharding for n, t in learnt.items()}
    both = jax.jit(jax.value_and_grad(loss), out_shardings=(None, kept))
    alone = jax.jit(loss)

    def forward() -> float:
        return float(jax.block_until_ready(alone(learnt, image)))

    def training() -> float:
        found = jax.block_until_ready(both(learnt, image))
        return float(found[0])

    return {("XLA", "forward"): forward, ("XLA", "training"): training}


def rank_main(rank: int, ranks: int, name: str, letter: str, folder: str, ports: tuple[int, int], end: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=ranks)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{ports[1]}", ranks, rank)
    model, x = made(name)
    state = {n: t.detach().numpy() for n, t in model.state_dict().items()}
    graph, _ = graph_of(model, (torch.zeros(x.shape),), name="net")
    program = compile_network(graph, Grid(((letter, ranks),))).program
    net = load_package(Path(folder) / "net")
    mesh = net.init_mesh("cpu")
    ours = net.Network(mesh)
    ours.load_full(model.state_dict())
    mine = net.scatter(net.Network._inputs[0], x, mesh)
    steps = {("convgen", what): run for (_, what), run in torch_steps(ours, mine).items()}
    steps |= jax_steps(graph, program, letter, state, x.numpy())
    serve(steps, end, dist.barrier)


def whole_main(name: str, threads: int, end: Any) -> None:
    torch.set_num_threads(threads)
    model, x = made(name)
    serve({("module", what): run for (_, what), run in torch_steps(model, x).items()}, end, lambda: None)


def serve(steps: Steps, end: Connection, meet: Callable[[], Any]) -> None:
    """Run what is asked for and say how long it took, and the loss."""
    while (asked := end.recv()) is not None:
        meet()
        start = time.perf_counter()
        loss = steps[asked]()
        end.send((time.perf_counter() - start, loss))
    os._exit(0)  # jax's shutdown waits for all, and has nothing to say


def heard(end: Connection, processes: list[Any]) -> tuple[float, float]:
    """Raises SystemExit: a process is gone."""
    while not end.poll(1.0):
        if not all(p.is_alive() for p in processes):
            raise SystemExit("a process has ended; what it said is above")
    return end.recv()


def compared(name: str, letter: str, ranks: int, rounds: int) -> None:
    """Print a network on a grid."""
    model, x = made(name)
    graph, tensors = graph_of(model, (torch.zeros(x.shape),), name="net")
    with tempfile.TemporaryDirectory() as folder:
        package = files_of(compile_network(graph, Grid(((letter, ranks),))), tensors)
        write_package(Path(folder) / "net", package, "the folder")
        context, base = mp.get_context("spawn"), 20000 + random.SystemRandom().randrange(20000)
        pipes = [context.Pipe() for _ in range(ranks + 1)]
        args = [(r, ranks, name, letter, folder, (base, base + 1), pipes[r][1]) for r in range(ranks)]
        processes = [context.Process(target=rank_main, args=a) for a in args]
        processes.append(context.Process(target=whole_main, args=(name, ranks, pipes[-1][1])))
        for p in processes:
            p.daemon = True
            p.start()
        ends = {"convgen": pipes[:-1], "XLA": pipes[:-1], "module": pipes[-1:]}
        order = [(system, what) for what in PASSES for system in ends]
        times: dict[tuple[str, str], list[float]] = {key: [] for key in order}
        losses: dict[tuple[str, str], float] = {}
        for turn in range(rounds + 2):
            random.shuffle(order)
            for key in order:
                for mine, _ in ends[key[0]]:
                    mine.send(key)
                took = [heard(mine, processes) for mine, _ in ends[key[0]]]
                losses[key] = took[0][1]
                if turn > 1:
                    times[key].append(max(t for t, _ in took))
        for mine, _ in pipes:
            mine.send(None)
        for p in processes:
            p.join()
    if not all(math.isclose(a, losses["module", "forward"], rel_tol=1e-4) for a in losses.values()):
        raise SystemExit(f"{name} by {letter}: losses differ: {losses}")
    for what in PASSES:
        a, b, c = (statistics.median(times[system, what]) * 1e3 for system in ("convgen", "XLA", "module"))
        least = min(times["convgen", what]) / min(times["XLA", what])
        print(
            f"{name:14}{letter}={ranks:<4}{what:10}{a:10.1f}{b:10.1f}{a / b:8.2f}{least:8.2f}{c:10.1f}{a / c:8.2f}",
            flush=True,
        )


def main() -> int:
    asked = options(__doc__, only="", ranks=2, rounds=9, letters="NHC")
    warnings.simplefilter("ignore")
    print(f"{asked.ranks} processes of one thread; the module on one process of {asked.ranks}; ms, medians")
    print(
        f"{'network':14}{'grid':6}{'pass':10}{'convgen':>10}{'XLA':>10}{'ratio':>8}{'least':>8}{'module':>10}{'ratio':>8}"
    )
    for name in CASES:
        if asked.only in name:
            for letter in asked.letters:
                compared(name, letter, asked.ranks, asked.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
