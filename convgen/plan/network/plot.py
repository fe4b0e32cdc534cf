"""Strong and weak scaling of a network's plans, against sample parallelism alone."""

from __future__ import annotations

from pathlib import Path

from convgen.errors import InputError
from convgen.pictures.scaling import Point, Scaling, draw_scaling
from convgen.plan.network.counted import plan_counted
from convgen.plan.network.planner import budget_of
from convgen.plan.network.sample import sample_parallelism
from convgen.plan.network.setting import Setting
from convgen.spec.network import Network
from convgen.spec.network_reader import with_batch


def plot_scaling(network: Network, setting: Setting, ranks: int, budget: int | None, file: Path) -> None:
    """`draw_scaling` of a network written by hand."""
    budget = budget_of(setting, budget)

    def planned(ranks: int, batch: int) -> Point:
        try:
            return Point(plan_counted(with_batch(network, batch), setting, ranks, budget_bytes=budget).seconds)
        except InputError:
            return Point(None, fits=False)

    def sample(ranks: int, batch: int) -> Point:
        alone = sample_parallelism(with_batch(network, batch), setting, ranks)
        return Point(alone.seconds, fits=budget is None or (alone.memory_bytes or 0) <= budget)

    draw_scaling(Scaling(network.name, setting.machine.name, network.batch, planned, sample, budget), ranks, file)
