"""What plans gain from roles by phase and storage of w over any axes, on 64 ranks of Lassen.

    python bench/plan_roles.py

`before` are plans in which gradients have the roles of forward, and w is stored as these have it or split over all
other axes; on the same grids.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.network_compiler import network_parts
from convgen.plan.parts import Parts, Room
from convgen.plan.program.ranks import SCOUTED, grids_of
from convgen.plan.program.search import Effort, Search
from convgen.plan.program.tables import Question
from convgen.spec.aten.describe import describe
from convgen.spec.network_graph import read_network_graph

NETWORKS = Path(__file__).resolve().parent.parent / "examples" / "networks"
NAMES = ("resnet50", "mesh2k", "vgg16", "wrn50_4")
RANKS = 64
LASSEN, ROOM = load_machine("lassen"), Room(keep="every")


class OneRole(Search):
    """Every phase of a row in the same roles."""

    def question(self, i: int) -> Question:
        found = super().question(i)
        if found.operation.signatures[0].reduction != "sum":
            return found
        return replace(found, gradients=())


def least(search: type[Search], parts: Parts, grid: Grid, effort: Effort) -> int:
    return search(parts, grid, LASSEN, "float32", effort, ROOM).run().time_ps


def main() -> None:
    print(f"{'network':<10}{'before':>13}{'now':>13}{'less':>9}  grid")
    for name in NAMES:
        graph = read_network_graph(NETWORKS / f"{name}.yaml")
        parts = network_parts(graph, describe(graph.at(graph.batch)))
        grids = grids_of(RANKS, LASSEN)[-SCOUTED:]
        now, grid = min((least(Search, parts, grid, Effort()), str(grid)) for grid in grids)
        before = min(least(OneRole, parts, grid, Effort(parameters=2)) for grid in grids)
        less = 100 * (1 - now / before)
        print(f"{name:<10}{before / 1e9:>10.3f} ms{now / 1e9:>10.3f} ms{less:>7.2f} %  {grid}", flush=True)


if __name__ == "__main__":
    main()
