"""Look for better layouts than plans': annealing over storage, roles, ways and gradients' rows of whole programs.

    python bench/adversary.py [NETWORK...] [--layouts 20000] [--random 50] [--small]

Each line is a network on a machine's ranks: the sum of a plan's seconds (`convgen plan --in-order`), the least that
annealing found from there on the plan's grid, idle ranks too, and what that is less. Networks are those of examples,
or drawn at random; `--small` looks at a few. Exits with 1 where something is better by more than 0.1 %.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from math import exp
from pathlib import Path
from random import Random

import click

from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.network_compiler import plan_graph
from convgen.plan.program.nearby import Nearby
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.graph import Graph
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import read_network, with_batch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from test_plan_by_hand import branched  # noqa: E402
from test_plan_price import a_machine  # noqa: E402

REAL = (("alexnet", 64, 8), ("vgg16", 16, 8), ("resnet50", 32, 8), ("wrn50_2", 8, 8), ("mesh1k", 2, 8))
GAP = 1e-3
WARM = 2e-3  # of the plan's seconds: what annealing takes at first


def annealed(program: Program, machine: Machine, dtype: str, layouts: int, draw: Random) -> int:
    """Picoseconds of the best layout that is found."""
    near = Nearby(program, machine, dtype)
    best, warm = near.time_ps, WARM * near.time_ps
    for n in range(layouts):
        change = near.draw(draw)
        if change is None:
            continue
        heat = warm * (1 - n / layouts) ** 2
        if change.more_ps <= 0 or (heat > 0 and draw.random() < exp(-change.more_ps / heat)):
            near.take(change)
            best = min(best, near.time_ps)
    return best


def compared(name: str, graph: Graph, machine: Machine, ranks: int, layouts: int) -> float:
    """What is less than a plan's sum, as a share of it; prints a line."""
    plan = plan_graph(graph, ranks, Setting(machine=machine))[1]
    program = plan.program
    began = time.process_time()
    best = annealed(program, machine, "float32", layouts, Random(f"adversary {name}"))
    each = (time.process_time() - began) / layouts
    gap = max(1 - best / 1e12 / plan.seconds, 0.0)
    print(
        f"{name:<12} {machine.name:<9} {ranks:>5} {program.grid!s:<24} {plan.seconds * 1e3:>11.4f} {best / 1e9:>11.4f} "
        f"{100 * gap:>8.3f} % {each * 1e3:>6.2f}",
        flush=True,
    )
    return gap


@click.command(help=__doc__.split("\n\n    ")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("networks", nargs=-1, type=click.Choice([name for name, _, _ in REAL]))
@click.option("--layouts", default=20000, show_default=True, help="That are looked at, of each network.")
@click.option("--random", "drawn", default=50, show_default=True, help="Networks that are drawn.")
@click.option("--small", is_flag=True, help="Four networks that are drawn, 400 layouts of each.")
def main(networks: tuple[str, ...], layouts: int, drawn: int, small: bool) -> None:
    """Compare, and print a table."""
    if small:
        layouts, drawn = 400, 4
    head = (f"{'network':<12} {'machine':<9} {'ranks':>5}", f"{'grid':<24} {'plan, ms':>11} {'found, ms':>11}")
    print(*head, f"{'less':>10} {'ms each':>8}")
    gaps: dict[str, float] = {}
    for name, batch, ranks in REAL if not small else ():
        if not networks or name in networks:
            network = with_batch(read_network(ROOT / "examples" / "networks" / f"{name}.yaml"), batch)
            gaps[name] = compared(name, network_graph(network), load_machine("lassen"), ranks, layouts)
    for number in range(0 if networks else drawn):
        draw = Random(f"adversary {number}")
        machine, ranks = replace(a_machine(draw), hides_gradients=False), draw.choice((2, 4, 6, 8, 12, 16))
        graph = network_graph(branched(draw, draw.randint(1, 5)))
        gaps[f"random {number}"] = compared(f"random {number}", graph, machine, ranks, layouts)
    worse = {name: gap for name, gap in gaps.items() if gap > GAP}
    said = ", ".join(f"{name} {100 * gap:.2f} %" for name, gap in worse.items())
    print(f"better by more than 0.1 %: {len(worse)} of {len(gaps)}" + f": {said}" * bool(said))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
