"""Meshes meet whatever groups a process has: those that only some ranks made, destroyed ones, parts of a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_cases import GUARD_S, fault_layer, told
from modules import Case
from torch import Tensor

from convgen.verify.processes import spawn
from convgen.verify.program import global_tensors, reference, run_rank

PAIR = fault_layer("met_pair", "stationary-x", {"C": 2})
FOUR = fault_layer("met_four", "stationary-w", {"C": 2, "F": 2})


def right(case: Case, mesh: Any) -> None:
    """A mesh computes what one device does."""
    given = global_tensors(case.layer)
    truth = reference(case.layer.conv, given)
    for name, block in run_rank(case.module, given, mesh, []).blocks.items():
        torch.testing.assert_close(case.module.gather(name, block, mesh), truth[name], rtol=1e-12, atol=1e-12)


def uneven(rank: int) -> None:
    """Ranks 0 and 1 have made groups of their own, by names of torch's that others don't count."""
    if rank < 2:
        dist.new_group([rank], use_local_synchronization=True)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    right(FOUR, FOUR.module.init_mesh("cpu"))


def parts_then_whole(rank: int) -> None:
    """Meshes on some ranks, of which the others hear nothing, and one on all behind them."""
    if rank in (1, 2):
        right(PAIR, PAIR.module.init_mesh("cpu", ranks=[2, 1]))
    right(FOUR, FOUR.module.init_mesh("cpu", ranks=[3, 1, 0, 2]))
    if rank in (1, 3):
        right(PAIR, PAIR.module.init_mesh("cpu", ranks=[1, 3]))
    right(FOUR, FOUR.module.init_mesh("cpu"))


def between_torchs(rank: int) -> None:
    """A mesh, a user's groups, torch's own mesh, and ours again."""
    right(FOUR, FOUR.module.init_mesh("cpu"))
    group = dist.new_group([0, 3])
    theirs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("C", "F"))
    right(FOUR, theirs)
    if rank in (0, 3):
        right(PAIR, PAIR.module.init_mesh("cpu", process_group=group))
        right(PAIR, PAIR.module.init_mesh("cpu", ranks=[0, 3]))
    refused = told(lambda: PAIR.module.init_mesh("cpu", process_group=group, ranks=[0, 3]))
    assert "process_group= says which ranks these are" in refused
    if rank in (1, 2):
        assert f"rank {rank} is not in the process group" in told(
            lambda: PAIR.module.init_mesh("cpu", process_group=group)
        )


def destroyed_and_made_again(rank: int) -> None:
    mesh = FOUR.module.init_mesh("cpu")
    right(FOUR, mesh)
    for axis in ("C", "F"):
        dist.destroy_process_group(mesh.get_group(axis))
    right(FOUR, FOUR.module.init_mesh("cpu"))


def a_world_bound_to_a_device(rank: int) -> None:
    """As init_process_group(device_id=...) leaves it for NCCL: torch would split the world's communicator, which all of
    its ranks would have to call. Here a group that splits waits for all of them."""
    c10d: Any = dist.distributed_c10d
    world, torchs = dist.group.WORLD, c10d._new_process_group_helper
    split: list[Any] = []

    def helper(*args: Any, **how: Any) -> Any:
        if world.bound_device_id is not None:
            split.append(args)
            dist.barrier()
        return torchs(*args, **how)

    c10d._new_process_group_helper = helper
    world.bound_device_id = torch.device("cuda:0")
    if rank in (0, 2):
        PAIR.module.init_mesh("cpu", ranks=[0, 2])
    assert world.bound_device_id == torch.device("cuda:0")
    world.bound_device_id = None
    c10d._new_process_group_helper = torchs
    assert not split


CASES: list[Callable[[int], None]] = [
    uneven, parts_then_whole, between_torchs, destroyed_and_made_again, a_world_bound_to_a_device,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_meshes_meet(case: Callable[[int], None]) -> None:
    for one in (PAIR, FOUR):
        one.module  # noqa: B018  its file, before any fork
    spawn(case, 4, GUARD_S)


@pytest.mark.slow
def test_a_world_that_is_made_again() -> None:
    """Groups are the new world's, under names that the old one's store doesn't know."""
    PAIR.module  # noqa: B018

    def program(rank: int, files: str = "") -> Tensor:
        right(PAIR, PAIR.module.init_mesh("cpu"))
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        right(PAIR, PAIR.module.init_mesh("cpu"))
        return torch.zeros(1)

    spawn(program, 2, GUARD_S)
