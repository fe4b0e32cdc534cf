"""What is hidden of a step's communication, measured: two processes over a paced link, in a namespace of their own.

    python bench/overlap.py [--rounds 15] [--rate 400mbit] [--case halo ...]

Each case is a network's step of training, forward and backward, in four ways, interleaved: as it is without overlap
(serial), with it (overlapped), its local work alone on a transport that moves nothing (comp), and its collectives alone
(comm). By minima:

    hidden  = (comm + comp - overlapped) / min(comm, comp)
    control = serial / (comm + comp); where it leaves 0.95 to 1.05 the run is void

The link is tbf on `lo` (`unshare -rn`, `tc`): one that both ranks share. Rounds are at least 15 for a number to count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network, program_like, without_flights
from convgen.packages import files_of, load_package, runtime_of
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.network_contract import NetworkPass
from convgen.passes.start_halos import StartHalos
from convgen.spec.aten.describe import describe
from convgen.spec.exported import graph_of

INSIDE = "CONVGEN_BENCH_NAMESPACE"
RATE, BURST = "400mbit", "256kb"


def tower(channels: int, count: int, kernel: int = 3) -> nn.Module:
    layers = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False) for _ in range(count)]
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parent))
    from network_step import model_of

    return model_of("resnet18")


Case = tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int], tuple[NetworkPass, ...]]
CASES: dict[str, Case] = {
    # Long rows: halos are much beside what is computed.
    "halo": (lambda: tower(32, 1), (1, 32, 64, 4096), {"H": 2}, (StartHalos(),)),
    "halos in a row": (lambda: tower(32, 3), (1, 32, 64, 2048), {"H": 2}, (StartHalos(),)),
    # Many filters on few rows: gradients are much beside what is computed.
    "all-reduce": (lambda: tower(256, 3), (8, 256, 28, 28), {"N": 2}, (BucketGradients(1),)),
    "nothing to hide": (lambda: tower(16, 4), (2, 16, 64, 64), {"N": 2}, (StartHalos(), BucketGradients())),
    "resnet18": (resnet, (4, 3, 128, 128), {"N": 2}, (BucketGradients(5),)),
}


class Nothing:
    """A transport that moves nothing: what comes is of the right size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: Any, splits: Any, group: Any) -> Any:
        return tensor.repeat(len(splits)) if len(set(splits)) == 1 else tensor.new_ones(sum(splits))

    def reduce_scatter(self, tensor: Any, splits: Any, group: Any) -> Any:
        return tensor.split(list(splits))[group.ranks.index(self.rank)].clone()

    def all_reduce(self, tensor: Any, splits: Any, group: Any) -> Any:
        return tensor.clone()

    def all_to_all(self, tensor: Any, splits: Any, group: Any) -> Any:
        return tensor.new_ones(sum(splits[1]))

    exchange = all_to_all


class Noting(Nothing):
    """The same, and it notes what would have moved."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[str, Any, Any, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange"):
            return found

        def noted(tensor: Any, splits: Any, group: Any) -> Any:
            self.calls.append((name, torch.zeros_like(tensor), splits, group))
            return found(tensor, splits, group)

        return noted


def rank_of(rank: int, name: str, rounds: int, folder: str, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    shape = CASES[name][1]

    def step_on(package: str, end: Any) -> Callable[[], None]:
        net = load_package(Path(folder) / package)
        mesh = net.init_mesh("cpu", transport=end(net) if callable(end) else end)
        model = net.Network(mesh, parameters="blocks")
        (key,) = net.Network._inputs
        x = net.scatter(key, torch.randn(shape), mesh).requires_grad_()

        def step() -> None:
            model.zero_grad()
            x.grad = None
            y = model(x)
            y.backward(torch.ones_like(y))

        return step

    def real(net: Any) -> Any:
        return runtime_of(net).TorchTransport(timedelta(seconds=120))

    noting = Noting(rank, 2)
    noted = step_on("serial", noting)
    noted()
    noting.calls.clear()  # the identity is exchanged once
    noted()
    calls, end = list(noting.calls), real(load_package(Path(folder) / "serial"))

    def comm() -> None:
        for kind, tensor, splits, group in calls:
            getattr(end, kind)(tensor, splits, group)

    ways = {
        "comm": comm,
        "comp": step_on("serial", Nothing(rank, 2)),
        "serial": step_on("serial", real),
        "overlapped": step_on("overlapped", real),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 2):
        for way, run in ways.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if turn > 1:
                times[way].append(time.perf_counter() - start)
    if rank == 0:
        results.put({way: min(took) for way, took in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def packages(name: str, folder: Path) -> None:
    make, shape, grid, passes = CASES[name]
    torch.manual_seed(0)
    graph, tensors = graph_of(make(), (torch.zeros(shape),), name="net")
    compiled = compile_network(graph, Grid(tuple(grid.items())))
    for kind in ("serial", "overlapped"):
        program = without_flights(compiled.program)
        for one in passes if kind == "overlapped" else ():
            program = one.run(program)
        other = program_like(program, describe(graph.at(2 * graph.batch + 1)))
        made = type(compiled)(graph, compiled.described, program, other, None)
        (folder / kind).mkdir()
        for file, content in files_of(made, tensors).items():
            (folder / kind / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def measure(name: str, rounds: int, port: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        packages(name, Path(folder))
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_of, args=(name, rounds, folder, port, results), nprocs=2)
        found = results.get()
    both = found["comm"] + found["comp"]
    control = found["serial"] / both
    hidden = (both - found["overlapped"]) / min(found["comm"], found["comp"])
    void = "" if 0.95 <= control <= 1.05 else "  void"
    milliseconds = "  ".join(f"{found[way] * 1e3:8.1f}" for way in ("comm", "comp", "serial", "overlapped"))
    said = f"{found['overlapped'] / found['serial']:8.3f}  {hidden:7.1%}  {control:7.3f}"
    print(f"{name:<16}  {milliseconds}  {said}{void}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", default=RATE, help="of tbf; none: no pacing")
    parser.add_argument("--case", nargs="*", choices=tuple(CASES), default=list(CASES))
    args = parser.parse_args()
    if INSIDE not in os.environ:
        if shutil.which("unshare") is None or shutil.which("tc") is None:
            sys.exit("a link to pace needs unshare and tc (iproute2)")
        inside = ["unshare", "-rn", sys.executable, *sys.argv]
        sys.exit(subprocess.run(inside, env=os.environ | {INSIDE: "1"}, check=False).returncode)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if args.rate != "none":
        tbf = ["tbf", "rate", args.rate, "burst", BURST, "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *tbf], check=True)
    few = "" if args.rounds >= 15 else "; too few for numbers to count"
    print(f"2 processes over {args.rate}, minima of {args.rounds} rounds in ms{few}; load {os.getloadavg()[0]:.1f}")
    heads = ("comm", "comp", "serial", "overlap", "ratio", "hidden", "control")
    print(f"{'':<16}  " + "  ".join(f"{h:>{w}}" for h, w in zip(heads, (8, 8, 8, 8, 8, 7, 7), strict=True)))
    for i, name in enumerate(args.case):
        measure(name, args.rounds, 29500 + i)


if __name__ == "__main__":
    main()
