# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# (parts of torch.distributed have no types)
"""The ranks that measure together: a process group, and what they tell one another between measurements.

These messages go through gloo on either device, so that they don't touch the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from convgen.errors import InputError

TIMEOUT_S = 300.0  # a rank that dies is noticed at once; this is for one that hangs, or has not started yet
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
Call = Callable[[], object]


class LostRank(InputError):
    """Another rank died, or did not answer in time; every rank says so for itself."""


class Team:
    """This rank, and the others.

    Args:
        quantile: the quantile of repeats that counts: 0.5 is the usual time, 0 the time that nothing delays.
    """

    def __init__(self, device: torch.device, quantile: float = 0.5) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.quantile = quantile

    def typical(self, seconds: Sequence[float]) -> float:
        """The quantile of repeats' seconds that counts."""
        return float(np.quantile(np.array(seconds), self.quantile))

    def sync(self) -> None:
        """Wait until this rank's device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        with self._guard():
            dist.all_reduce(torch.zeros(1))

    def agree(self, answer: bool) -> bool:
        """Rank 0's answer, on every rank."""
        told = torch.tensor([int(answer)])
        with self._guard():
            dist.broadcast(told, src=0)
        return bool(told.item())

    def most(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        found = values.clone()
        with self._guard():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        found: list[Any] = [None] * self.size
        with self._guard():
            dist.all_gather_object(found, value)
        return found

    def communicate(self, run: Call) -> Call:
        """A call of torch.distributed as one that raises LostRank, which says this rank, where it fails."""

        def guarded() -> None:
            with self._guard():
                run()

        return guarded

    @contextmanager
    def _guard(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise LostRank(
                f"rank {self.rank} lost the others: {first}", hint="see what another rank said before it stopped"
            ) from error


@contextmanager
def joined(kind: str, quantile: float = 0.5) -> Generator[Team]:
    """The process group that the launcher described in the environment; left again in any case.

    Args:
        kind: cpu or cuda (which is HIP's as well).
        quantile: the quantile of repeats that counts.
    Raises:
        InputError: there are not so many GPUs, or the environment describes no group.
    """
    device = _device(kind)
    try:
        dist.init_process_group(BACKENDS[kind], timeout=timedelta(seconds=TIMEOUT_S))
    except (ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise LostRank(
            f"no process group: {first}",
            hint="start the ranks with torchrun; if they are, see what another rank said before it stopped",
        ) from error
    try:
        team = Team(device, quantile)
        if kind == "cuda":  # NCCL's first call must be one of all ranks
            team.communicate(lambda: dist.all_reduce(torch.zeros(1, device=device)))()
        yield team
    finally:
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = torch.cuda.device_count()
    if ranks > there:
        raise InputError(
            f"{ranks} ranks on a node where torch sees {there} GPU{'' if there == 1 else 's'}",
            hint=f"--nproc-per-node={there} on nodes of several GPUs, or --device cpu" if there else "--device cpu",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
