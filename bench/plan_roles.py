"""What plans gain from roles by phase and storage of w over any axes, on 64 ranks of Lassen, and what is left.

    python bench/plan_roles.py [--left]

`before` are plans in which every phase of a layer had the same roles, and w was stored as they have it or split over
all other axes. `left`, which takes minutes, is what layers would take less with the best roles of each phase and the
best storage of w there are, none of them the planner's candidates only; x and y stay as planned.
"""

from __future__ import annotations

import sys
from pathlib import Path

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.cost.machines import load_machine
from convgen.plan.candidates import Candidates
from convgen.plan.network.conv_node import ConvNode
from convgen.plan.network.planner import Plan, plan_network
from convgen.plan.network.setting import Setting
from convgen.plan.role_search import best_roles
from convgen.plan.storage_only import arrangements
from convgen.spec.network_reader import read_network
from convgen.spec.target import read_target

NETWORKS = Path(__file__).resolve().parent.parent / "examples" / "networks"
RANKS = 64
BEFORE_PS = {"resnet50": 17555803167, "mesh2k": 21078062418, "vgg16": 29167404907, "wrn50_4": 21840735122}


def left_ps(plan: Plan) -> int:
    """Picoseconds; layers whose x needs no gradient left out, as in them roles of backward-data don't count."""
    known: dict[tuple[ConvNode, Layout, Layout], int] = {}
    total = 0
    for node in plan.nodes:
        if node.option is not None and node.stored is not None and (conv := plan.graph.convs[node.node.name]).dx:
            x, y = conv.layout("x", node.reads[0]), conv.layout("y", node.stored)
            if (conv, x, y) not in known:
                known[conv, x, y] = least_ps(conv, x, y)
            total += sum(s.cost.time_ps for s in node.steps) - known[conv, x, y]
    return total


def least_ps(conv: ConvNode, x: Layout, y: Layout) -> int:
    """Over all roles of each phase and all storages of w."""
    candidates = Candidates(conv.space)
    found: list[int] = []
    for axes in arrangements(candidates.axes, 2):
        stored = {"x": x, "w": Layout("w", axes), "y": y}
        if candidates.stores(stored["w"]):
            choices: dict[str, tuple[Roles, ...]] = {p: candidates.all_roles(p, stored) for p in PHASES}
            found.append(best_roles(conv.terms, stored, choices)[0][0])
    return min(found)


def main() -> None:
    print(f"{'network':<10}{'before':>13}{'now':>13}{'less':>9}{'left':>9}  grid")
    for name, before_ps in BEFORE_PS.items():
        setting = Setting(machine=load_machine("lassen"), target=read_target("cuda"))
        plan = plan_network(read_network(NETWORKS / f"{name}.yaml"), setting, RANKS)
        less = 100 * (1 - plan.cost_ps / before_ps)
        left = f"{100 * left_ps(plan) / plan.cost_ps:.2f} %" if "--left" in sys.argv else "-"
        columns = f"{name:<10}{before_ps / 1e9:>10.3f} ms{plan.cost_ps / 1e9:>10.3f} ms{less:>7.2f} %{left:>9}"
        print(columns, plan.grid, sep="  ", flush=True)


if __name__ == "__main__":
    main()
