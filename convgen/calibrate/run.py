"""A calibration from beginning to end, on one screen: where ranks lie, links, local work, collectives."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from convgen.calibrate.collectives import beside_model, gathered, launch_s, measure_collectives, misfits_of
from convgen.calibrate.launches import launch_of, network_step
from convgen.calibrate.links import measure_messages
from convgen.calibrate.local import measure_local
from convgen.calibrate.nodes import nodes_of
from convgen.calibrate.processor import measure_processor
from convgen.calibrate.result import Calibration, assumed, machine_of, rounded, uncertainty_of
from convgen.calibrate.shapes import measure_shapes
from convgen.calibrate.team import Team
from convgen.calibrate.write import check_output
from convgen.errors import InputError
from convgen.tune.gpu import this_gpu

SHARES = {"links": 0.25, "local": 0.15, "shapes": 0.25, "collectives": 0.38}  # of the seconds
Say = Callable[[str], None]


def calibrate(team: Team, name: str, output: Path, seconds: float, say: Say, host: str | None = None) -> Calibration:
    """Measure on all ranks; each has the same result.

    Args:
        name: the machine's.
        output: the file that rank 0 will write; refused before measuring if it can't.
        seconds: how long to measure, about; starting and leaving come on top.
        say: takes a line of progress.
        host: this rank's node, instead of the host's name.
    Raises:
        InputError: on all ranks: they lie as no machine file can say, `output` can't be written, or no line fits times.
    """
    nodes = nodes_of(team.gather(host or socket.gethostname()))
    _refuse_together(team, output)
    say(f"{nodes.text}: messages")
    messages = measure_messages(team, nodes, SHARES["links"] * seconds)
    processor = measure_processor(team, nodes)
    say("copies, products, a convolution")
    local = measure_local(team, nodes.ranks, SHARES["local"] * seconds)
    say("convolutions by shape")
    shapes = measure_shapes(team, SHARES["shapes"] * seconds)
    say("collectives, in modules, and a network's launches")
    with network_step(team, _target(team)) as network:
        watched = measure_collectives(team, SHARES["collectives"] * seconds, _target(team), [network.run])
    ran, stepped = gathered(team, nodes, watched), network.stepped()
    links = machine_of(name, nodes, messages, local, shapes, launch_s(team, ran), processor)
    collectives = tuple(beside_model(team, links, ran))
    machine = replace(links, misfits=misfits_of(collectives, rounded))
    machine = replace(machine, uncertainty=uncertainty_of(machine, messages))
    return Calibration(
        date=datetime.now(UTC).date().isoformat(),
        backend="gloo" if team.device.type == "cpu" else "nccl",
        torch=torch.__version__.partition("+")[0],
        nodes=nodes,
        messages=messages,
        local=local,
        machine=replace(machine, network_launch_s=rounded(launch_of(machine, stepped))),
        assumed=assumed(local),
        shapes=tuple(shapes),
        quantile=team.quantile,
        collectives=collectives,
    )


def _target(team: Team) -> str:
    """What modules are compiled for."""
    if team.device.type == "cpu":
        return "cpu"
    found = this_gpu()
    assert found is not None
    return found.target


def _refuse_together(team: Team, output: Path) -> None:
    """Rank 0 checks whether it can write; all ranks raise where it can't."""
    problem: InputError | None = None
    if team.rank == 0:
        try:
            check_output(output)
        except InputError as error:
            problem = error
    fact, hint = team.gather((problem.fact, problem.hint) if problem else ("", ""))[0]
    if fact:
        raise InputError(fact, hint=hint)
