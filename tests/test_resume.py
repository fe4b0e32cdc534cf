"""Training that stops and goes on, on other grids and numbers of ranks, and behind a rank that was killed: model,
optimizer, scheduler, loader and dropout's step by torch.distributed.checkpoint alone."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from free_networks import imported
from sampling import cases_of
from small_networks import seeded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.data import Batches, Blocks
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.packages import files_of
from convgen.spec.exported import graph_of
from convgen.verify.processes import ProcessFailed, spawn
from convgen.verify.virtual import VirtualTransport, World
from examples.volume import State

COUNT, SIZE, STOP, STEPS = 13, 2, 8, 20  # of 6 batches an epoch, the eighth is in the second
GENERATOR = np.random.default_rng(3)
IMAGES, TARGETS = (GENERATOR.standard_normal((COUNT, c, 6, 5)) for c in (3, 5))

CASES = ("dtensors", "H=2,C=2", "H=3"), ("blocks", "C=2", "N=2,W=2"), ("dtensors", "N=1", "C=2")


class Net(nn.Module):
    """Running statistics, dropout, filters that two ranks have as Blocks, as DTensor can't say them; and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.b, self.c = nn.Conv2d(8, 7, 3, padding=1), nn.Conv2d(7, 5, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        y = self.drop(torch.relu(self.norm(self.a(image))))
        return (self.c(torch.tanh(self.b(y))) - target).square().mean()


def module() -> nn.Module:
    seeded()
    return Net().double()


@cache
def graph() -> Any:
    return graph_of(module(), (torch.tensor(IMAGES[:SIZE]), torch.tensor(TARGETS[:SIZE])), name="resumed")


@cache
def package(grid: str, folder: Path) -> Any:
    made, tensors = graph()
    axes = tuple((a, int(n)) for a, n in (one.split("=") for one in grid.split(",")))
    files = files_of(compile_network(made, Grid(axes)), tensors)
    return imported({n: t.decode() for n, t in files.items()}, folder)


Each = Callable[[int, State], None]


def train(net: Any, kind: str, each: Each, load: Path | None = None) -> list[float]:
    """Losses of steps, from the first or a checkpoint's; `each(step, state)` behind each one."""
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh, parameters=kind)
    model.load_full(module().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    blocks = Blocks({"image": IMAGES, "target": TARGETS}, net, mesh)
    loader = blocks.loader(SIZE, shuffle=True, seed=4)
    state = State(model, optimizer, scheduler=scheduler, loader=loader)
    if load is not None:
        dcp.load({"state": state}, checkpoint_id=load)
    losses, steps = list[float](), loader.epoch * len(loader) + loader.batches.done
    for epoch in range(loader.epoch, STEPS):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch["image"], batch["target"])
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
            each(steps + len(losses), state)
            if steps + len(losses) == STEPS:
                return losses
    raise AssertionError("more epochs are wanted")


def keeps(at: int, folder: Path) -> Each:
    """Stores a checkpoint behind this step."""

    def each(step: int, state: State) -> None:
        if step == at:
            dcp.save({"state": state}, checkpoint_id=folder)

    return each


def ranks_of(net: Any) -> int:
    return int(np.prod([*net.SPEC["grid"].values()]))


def nothing(step: int, state: State) -> None:
    pass


def trained(net: Any, **how: Any) -> list[float]:
    """Losses, which are alike on all ranks."""
    found = spawn(lambda _: train(net, **{"kind": "dtensors", "each": nothing, **how}), ranks_of(net))
    assert all(losses == found[0] for losses in found)
    return found[0]


def is_close(ours: list[float], wanted: list[float]) -> bool:
    return len(ours) == len(wanted) and np.allclose(ours, wanted, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", cases_of(3, "resumed"))
def test_losses_are_those_of_training_that_never_stopped(number: int, packages: Path, tmp_path: Path) -> None:
    """On the grid that stored it to the bit, on another within 1e-12; Blocks among DTensors, or throughout."""
    kind, grid, other = CASES[number]
    net = package(grid, packages)
    wanted = trained(net, kind=kind, each=keeps(STOP, tmp_path / "kept"))
    assert len(wanted) == STEPS
    assert trained(net, kind=kind, load=tmp_path / "kept") == wanted[STOP:]
    assert is_close(trained(package(other, packages), kind=kind, load=tmp_path / "kept"), wanted[STOP:])


@pytest.mark.slow
def test_a_killed_rank(packages: Path, tmp_path: Path) -> None:
    """In the second epoch, between two checkpoints: the others end, too, and another grid goes on from the last."""
    net, other = package("H=2,C=2", packages), package("H=3", packages)
    wanted = trained(other)

    def program(rank: int) -> list[float]:
        def each(step: int, state: State) -> None:
            if step % 3 == 0:
                dcp.save({"state": state}, checkpoint_id=tmp_path / str(step))
            if step == STOP and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return train(net, "dtensors", each)

    with pytest.raises(ProcessFailed, match="rank 0: "):
        spawn(program, 4)
    last = max(int(one.parent.name) for one in tmp_path.glob("*/.metadata"))
    assert last == 6
    found = trained(other, load=tmp_path / str(last))
    assert is_close(found, wanted[last:])


def test_the_batches_that_are_left(packages: Path) -> None:
    """Of an epoch that broke off, with the state of any batch; at an epoch's end none are, and the next has all."""
    of = Batches(11, 3, shuffle=True, seed=2, drop_last=False)
    every: dict[int, list[tuple[int, ...]]] = {}
    for epoch in range(3):
        of.set_epoch(epoch)
        every[epoch] = [*of]
    assert every[0] != every[1]
    for epoch in range(3):
        for done in range(5):
            other = Batches(11, 3, shuffle=True, seed=2, drop_last=False)
            other.load_state_dict({**of.state_dict(), "epoch": epoch, "done": done})
            other.set_epoch(epoch)
            assert [*other] == every[epoch][done:]
            other.set_epoch((epoch + 1) % 3)
            assert [*other] == every[(epoch + 1) % 3]
    for what, value in {"size": 4, "seed": 3, "shuffle": False, "count": 12, "drop_last": True}.items():
        words = re.escape(f"{what}={value}, and these have {what}={getattr(of, what)}")
        with pytest.raises(InputError, match=words):
            of.load_state_dict({**of.state_dict(), what: value})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_begins_again(workers: int, packages: Path) -> None:
    """Without a state each iteration is of a whole epoch, one behind a break, too; what is read ahead isn't done."""
    net = package("N=1", packages)
    mesh = net.init_mesh("cpu", transport=VirtualTransport(World(1), 0))
    loader = Blocks({"image": IMAGES}, net, mesh).loader(SIZE, workers=workers)
    samples = [*loader.batches]
    for batch in loader:
        if batch.samples == samples[2]:
            break
    state = loader.state_dict()
    assert state["done"] == 3
    assert [b.samples for b in loader] == [b.samples for b in loader] == samples
    loader.load_state_dict(state)
    assert [b.samples for b in loader] == samples[3:]
    assert [b.samples for b in loader] == samples
