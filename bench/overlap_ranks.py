"""A rank of bench/overlap.py: schedules of a step, its local work alone, its collectives alone, by turns.

Parts are measured as they are in the step. Local work runs on a transport that moves nothing, but in which ranks meet
where they would, through shared memory: so it is of the slowest rank between any two collectives, as the step's is.
What would arrive is made once, since receiving it is part of the collectives. These run with pauses as long as what is
computed between them, which don't count: so the link, the processor and the threads that wait are as in a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from convgen.packages import load_package, runtime_of

WARM, MOST = 3, 500  # rounds: that don't count; that do
PARTS = ("forward", "backward")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
Step = Iterator[None]  # that stops between forward and backward
Way = Callable[[], Step]


class Meeting:
    """Where ranks wait for each other without the link: counts in shared memory, by group and rank."""

    def __init__(self, rank: int, counts: torch.Tensor) -> None:
        self.rank, self.counts = rank, counts.numpy()

    def __call__(self, ranks: tuple[int, ...]) -> None:
        slot = self.counts[sum(1 << r for r in ranks)]
        slot[self.rank] += 1
        members, mine = np.asarray(ranks), slot[self.rank]
        while (slot[members] < mine).any():
            os.sched_yield()


class Nothing:
    """A transport that moves nothing: what comes is of the right size, and the same every time.

    Attributes:
        calls: of one step by part, what would have moved, and the shortest time between it and what was before it.
    """

    def __init__(self, rank: int, size: int, meet: Meeting) -> None:
        self.rank, self.size, self._meet, self.is_settled = rank, size, meet, False
        self.calls: dict[str, list[tuple[str, torch.Tensor, Any, Any]]] = {part: [] for part in PARTS}
        self.pauses: dict[str, list[float]] = {part: [] for part in PARTS}
        self._came: dict[str, list[torch.Tensor]] = {part: [] for part in PARTS}

    def begin(self, part: str) -> None:
        """A part of the step."""
        self._part, self._turn = part, 0
        self._last = time.perf_counter()

    def __getattr__(self, kind: str) -> Any:
        if kind not in KINDS:
            raise AttributeError(kind)

        def moved(tensor: torch.Tensor, splits: Any, group: Any) -> torch.Tensor:
            pause = time.perf_counter() - self._last
            part, turn = self._part, self._turn
            came, pauses = self._came[part], self.pauses[part]
            if turn == len(came):
                came.append(self._made(kind, tensor, splits, group))
                pauses.append(pause)
                self.calls[part].append((kind, torch.zeros_like(tensor), splits, group))
            if not self.is_settled:
                pauses[turn] = min(pauses[turn], pause)
            self._meet(group.ranks)
            self._turn, self._last = turn + 1, time.perf_counter()
            return came[turn].detach()

        return moved

    def _made(self, kind: str, tensor: torch.Tensor, splits: Any, group: Any) -> torch.Tensor:
        match kind:
            case "all_gather":
                return tensor.repeat(len(splits)) if len(set(splits)) == 1 else tensor.new_ones(sum(splits))
            case "reduce_scatter":
                return tensor.split(list(splits))[group.ranks.index(self.rank)].clone()
            case "all_reduce":
                return tensor.clone()
            case _:
                return tensor.new_ones(sum(splits[1]))


def rank_of(
    rank: int, ranks: int, shape: Any, names: Mapping[str, str], least: Any, folder: str, port: int, shared: Any
) -> None:
    """Put minima by way and part into `results`, on rank 0.

    Args:
        names: of each schedule its package in `folder`; one is "plain".
        least: rounds, and seconds that they take together: short steps run more often.
        shared: counts for Meeting, and a queue for results.
    """
    counts, results = shared
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    meet, everyone = Meeting(rank, counts), tuple(range(ranks))

    def step_on(package: str, end: Any, begin: Callable[[str], None] = lambda part: None) -> Way:
        net = load_package(Path(folder) / package)
        mesh = net.init_mesh("cpu", transport=end(net) if callable(end) else end)
        model = net.Network(mesh, parameters="blocks")
        (key,) = net.Network._inputs
        torch.manual_seed(rank)
        x = net.scatter(key, torch.randn(shape), mesh).requires_grad_()
        if end is nothing:
            sizes[:] = [3 * x.numel(), max(p.numel() for p in model.parameters())]  # x, y, a gradient; a filter

        def step() -> Step:
            model.zero_grad()
            x.grad = None
            begin("forward")
            y = model(x)
            yield
            begin("backward")
            y.backward(torch.ones_like(y))

        return step

    def real(net: Any) -> Any:
        return runtime_of(net).TorchTransport(timedelta(seconds=120))

    sizes: list[int] = []
    nothing = Nothing(rank, ranks, meet)
    nothing.begin("forward")  # where blocks are put in their places
    ways: dict[str, Way] = {"comp": step_on(names["plain"], nothing, nothing.begin)}
    end = real(load_package(Path(folder) / names["plain"]))
    ways |= {way: step_on(package, real) for way, package in names.items()}
    for _ in range(2):  # the first step says what layers they are
        _forget(nothing)
        _timed(ways["comp"](), lambda: meet(everyone))

    caches = cycle(torch.zeros(sum(sizes)).split(1 << 13))  # pauses go over them, as computing does

    def comm() -> dict[str, tuple[float, float]]:
        """Of each part seconds, and seconds of the processor, but for pauses."""
        found: dict[str, tuple[float, float]] = {}
        for part in PARTS:
            meet(everyone)
            start, processor, paused = time.perf_counter(), 0.0, 0.0
            for pause, (kind, tensor, splits, group) in zip(nothing.pauses[part], nothing.calls[part], strict=True):
                begun = time.perf_counter()
                while time.perf_counter() - begun < pause:
                    next(caches).add_(1)
                paused += time.perf_counter() - begun
                used = time.process_time()
                getattr(end, kind)(tensor, splits, group)
                processor += time.process_time() - used
            meet(everyone)
            found[part] = time.perf_counter() - start - paused, processor
        return found

    times: dict[str, list[dict[str, tuple[float, float]]]] = {way: [] for way in ("comm", *ways)}
    order, draw = list(times), Random(0)

    def one_round() -> dict[str, dict[str, tuple[float, float]]]:
        draw.shuffle(order)
        return {way: comm() if way == "comm" else _timed(ways[way](), lambda: meet(everyone)) for way in order}

    for _ in range(WARM):
        begun = time.perf_counter()
        one_round()
    for part in PARTS:  # as long on all ranks
        slowest = torch.tensor(nothing.pauses[part], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        nothing.pauses[part][:] = slowest.tolist()
    nothing.is_settled = True
    if rank == 0:  # says how many, since all stop at once
        counts[0, 0] = max(least[0], min(MOST, int(least[1] / (time.perf_counter() - begun))))
    meet(everyone)
    for _ in range(int(counts[0, 0])):
        for way, took in one_round().items():
            times[way].append(took)
    if rank == 0:
        results.put({way: _minima(took) for way, took in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def _forget(nothing: Nothing) -> None:
    """What moved before the first step."""
    for part in PARTS:
        for kept in (nothing.calls, nothing.pauses, nothing._came):
            kept[part].clear()


def _timed(step: Step, meet: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """Of each part seconds, on all ranks, and seconds of this one's processor."""
    found: dict[str, tuple[float, float]] = {}
    for part in PARTS:
        meet()
        start, processor = time.perf_counter(), time.process_time()
        next(step, None)
        used = time.process_time() - processor
        meet()
        found[part] = time.perf_counter() - start, used
    return found


def _minima(took: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Seconds of each part and of the step, and of the processor in a step."""
    found = {part: min(one[part][0] for one in took) for part in PARTS}
    found["step"] = sum(found.values())
    found["processor"] = min(sum(one[part][1] for part in PARTS) for one in took)
    return found
