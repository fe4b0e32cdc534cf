"""Planned seconds over ranks, 1 to 4,096: they never rise.

    python bench/planned_ranks.py [NETWORK...] [--machine lassen] [--most 4096] [--statistics global]

Of the papers' networks in examples/networks, as `convgen plan` plans them. Exits with 1 where more ranks are planned
slower than fewer. Minutes a network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.errors import InputError
from convgen.network_compiler import plan_graph
from convgen.plan.parts import Room
from convgen.plan.setting import Setting
from convgen.spec.network_graph import read_network_graph

NETWORKS = Path(__file__).resolve().parent.parent / "examples" / "networks"
NAMES = ("alexnet", "vgg16", "resnet50", "wrn50_2", "wrn50_4", "mesh1k", "mesh2k")
Planned = Callable[[int], tuple[float, Grid]]


def planned(name: str, machine: str, statistics: str) -> Planned:
    graph = read_network_graph(NETWORKS / f"{name}.yaml")
    setting = Setting(machine=load_machine(machine), room=Room(keep="every"), statistics=statistics)

    def of(ranks: int) -> tuple[float, Grid]:
        found = plan_graph(graph, ranks, setting)[1]
        return found.seconds, found.program.grid

    return of


def rises(plan: Planned, most: int) -> Iterator[int]:
    """Ranks that are planned slower than half as many; prints each plan."""
    last = float("inf")
    for ranks in (2**i for i in range(most.bit_length())):
        began = time.process_time()
        try:
            seconds, grid = plan(ranks)
        except InputError as error:
            print(f"  {ranks:5}  {error.fact}", flush=True)
            continue
        print(
            f"  {ranks:5} {seconds * 1e3:10.3f} ms  {grid}, planned in {time.process_time() - began:.1f} s", flush=True
        )
        if seconds > last * (1 + 1e-9):
            yield ranks
        last = seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NAMES)
    parser.add_argument("--machine", default="lassen")
    parser.add_argument("--most", type=int, default=4096)
    parser.add_argument("--statistics", default="local", help="of batch norms")
    options = parser.parse_args()
    found: list[str] = []
    for name in options.networks:
        print(name, flush=True)
        plan = planned(name, options.machine, options.statistics)
        found += [f"{name} on {ranks} ranks" for ranks in rises(plan, options.most)]
    print("rises: " + (", ".join(found) or "none"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
