"""`convgen plan --try K`, on every rank by a launcher: the best layouts are run, and the fastest is the plan."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convgen.commands.correct import put_back
from convgen.commands.launched import refused_once
from convgen.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from convgen.network_compiler import CompiledNetwork
    from convgen.plan.setting import Setting
    from convgen.spec.graph import Graph

LAUNCH = "torchrun --nproc-per-node {ranks} -m convgen plan ... --ranks {ranks} --try {count}"


def try_plans(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    ranks: int,
    setting: Setting,
    count: int,
    seconds: float,
    *,
    as_json: bool,
    write: Callable[[CompiledNetwork, float], None] | None,
    correct: Path | None = None,
) -> None:
    """Plan, run and print.

    Args:
        tensors: the graph's constants.
        seconds: about how long each layout runs.
        write: gets, on rank 0, the fastest layout and its measured seconds.
        correct: the machine's file, into which corrections are written.
    Raises:
        InputError: no launcher has started as many ranks, or there is no plan.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) != ranks:
        here = f"{world} processes are here" if world.isdecimal() else "no launcher has started any"
        hint = LAUNCH.format(ranks=ranks, count=count)
        raise InputError(f"--try runs layouts on {ranks} ranks, and {here}", hint=hint)
    import torch

    from convgen.bench.tried import candidates, run_in_turn, tried_json, tried_text
    from convgen.calibrate.team import joined
    from convgen.spec.target import read_target
    from convgen.tune.gpu import this_gpu

    with refused_once(), joined("cuda" if torch.cuda.is_available() else "cpu") as team:
        gpu = this_gpu() if team.device.type == "cuda" else None
        target = read_target("cpu" if gpu is None else gpu.target).for_networks()

        def tell(text: str) -> None:
            if team.rank == 0:
                click.echo(text, err=True)

        some = candidates(graph, ranks, setting, target, count, tell)
        tell(f"running {len(some)} layouts")
        with tempfile.TemporaryDirectory(prefix="convgen-try-") as folder:
            machine = None if correct is None else setting.machine
            found, corrected = run_in_turn(team, some, tensors, Path(folder), seconds, machine)
    if team.rank != 0:
        return
    name = setting.machine.name
    click.echo(json.dumps(tried_json(found), indent=1) if as_json else tried_text(found, ranks, name))
    if correct is not None:
        put_back(correct, corrected)
    if write is not None:
        write(found[0].candidate.compiled, found[0].took.median)
