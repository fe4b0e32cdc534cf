"""A rank of bench/overlap.py: schedules of a step, its local work alone, its collectives alone, by turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from convgen.packages import load_package, runtime_of

WARM = 2  # rounds that don't count
Parts = Iterator[None]  # a step that stops between forward and backward


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


def rank_of(
    rank: int, ranks: int, shape: Any, names: Mapping[str, str], rounds: int, folder: str, port: int, results: Any
) -> None:
    """Put minima by way and part into `results`, on rank 0.

    Args:
        names: of each schedule its package in `folder`; one is "plain".
    """
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)

    def step_on(package: str, end: Any) -> Callable[[], Parts]:
        net = load_package(Path(folder) / package)
        mesh = net.init_mesh("cpu", transport=end(net) if callable(end) else end)
        model = net.Network(mesh, parameters="blocks")
        (key,) = net.Network._inputs
        torch.manual_seed(rank)
        x = net.scatter(key, torch.randn(shape), mesh).requires_grad_()

        def step() -> Parts:
            model.zero_grad()
            x.grad = None
            y = model(x)
            yield
            y.backward(torch.ones_like(y))

        return step

    def real(net: Any) -> Any:
        return runtime_of(net).TorchTransport(timedelta(seconds=120))

    noting = Noting(rank, ranks)
    noted = step_on(names["plain"], noting)
    list(noted())
    noting.calls.clear()  # the identity is exchanged once
    calls: list[list[Any]] = []
    for _ in noted():
        calls.append(list(noting.calls))
        noting.calls.clear()
    calls.append(list(noting.calls))
    end = real(load_package(Path(folder) / names["plain"]))

    def comm() -> Parts:
        for part, some in enumerate(calls):
            for kind, tensor, splits, group in some:
                getattr(end, kind)(tensor, splits, group)
            if part == 0:
                yield

    ways: dict[str, Callable[[], Parts]] = {"comm": comm, "comp": step_on(names["plain"], Nothing(rank, ranks))}
    ways |= {way: step_on(package, real) for way, package in names.items()}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    order, draw = list(ways), Random(0)
    for turn in range(rounds + WARM):
        draw.shuffle(order)
        for way in order:
            took = _timed(ways[way]())
            if turn >= WARM:
                times[way].append(took)
    if rank == 0:
        results.put({way: _minima(took) for way, took in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Parts) -> tuple[float, float]:
    """Seconds of forward and of backward, on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    next(step)
    dist.barrier()
    middle = time.perf_counter()
    for _ in step:
        pass
    dist.barrier()
    return middle - start, time.perf_counter() - middle


def _minima(took: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "forward": min(f for f, _ in took),
        "backward": min(b for _, b in took),
        "step": min(f + b for f, b in took),
    }
