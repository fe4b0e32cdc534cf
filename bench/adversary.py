"""Look for better layouts than plans': annealing over storage, roles, ways and gradients' rows of whole programs.

    python bench/adversary.py [NETWORK...] [--layouts 20000] [--near 0] [--random 50] [--in-order] [--small]

Each line is a network on a machine's ranks: the plan's step with what travels meanwhile, the least that annealing found
from there on the plan's grid (convgen/plan/program/annealed.py), and what that is less. `--near`: plans look at so many
layouts near them before, as of `convgen plan --layouts`. `--in-order`: sums of seconds instead, as of `convgen plan
--in-order`. Networks are those of examples, or drawn at random; `--small` looks at a few.
Exits with 1 where something is better by more than 0.1 %.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import click
import torch

from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.network_compiler import plan_graph
from convgen.plan.fewer import without_idle
from convgen.plan.program.annealed import WARM, annealed
from convgen.plan.program.nearby import Nearby, anneal
from convgen.plan.program.ranks import frozen_in
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import read_network, with_batch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from test_plan_by_hand import branched  # noqa: E402
from test_plan_price import a_machine  # noqa: E402

from examples.convnext import small_convnext  # noqa: E402
from examples.resnet import ResNet  # noqa: E402
from examples.unet3d import UNet3d  # noqa: E402

GAP = 1e-3


def by_hand(name: str, batch: int) -> Graph:
    return network_graph(with_batch(read_network(ROOT / "examples" / "networks" / f"{name}.yaml"), batch))


def by_torch(name: str, module: Callable[[], torch.nn.Module], *shape: int) -> Graph:
    return graph_of(module(), (torch.zeros(shape),), name=name)[0]


REAL: dict[str, tuple[Callable[[], Graph], int]] = {
    "alexnet": (lambda: by_hand("alexnet", 64), 8),
    "vgg16": (lambda: by_hand("vgg16", 16), 8),
    "resnet50": (lambda: by_hand("resnet50", 32), 8),
    "wrn50_2": (lambda: by_hand("wrn50_2", 8), 8),
    "mesh1k": (lambda: by_hand("mesh1k", 2), 8),
    "resnet18": (lambda: by_torch("resnet18", lambda: ResNet(64, (2, 2, 2, 2), 1000), 8, 3, 112, 112), 16),
    "unet3d": (lambda: by_torch("unet3d", lambda: UNet3d(16, 3), 2, 1, 64, 64, 64), 8),
    "convnext": (lambda: by_torch("convnext", lambda: small_convnext(100, (64, 128, 256)), 8, 3, 128, 128), 8),
}


def in_order_s(
    program: Program, machine: Machine, layouts: int, draw: Random, frozen: frozenset[str] = frozenset()
) -> float:
    """The least sum of seconds that annealing finds from a program on."""
    near = Nearby(program, machine, "float32", frozen)
    return min([near.time_ps, *(near.time_ps for _ in anneal(near, layouts, draw, WARM))]) / PICOSECONDS


def compared(
    name: str, graph: Graph, machine: Machine, ranks: int, layouts: int, near: int, *, in_order: bool
) -> float:
    """What is less than a plan's step, as a share of it; prints a line.

    Args:
        near: layouts that the plan is asked to look at beyond its own.
    """
    began = time.process_time()
    plan = plan_graph(graph, ranks, Setting(machine=machine, by_step=not in_order, layouts=near))[1]
    planned = time.process_time() - began
    seconds, program = plan.step_s, replace(plan.program, grid=without_idle(plan.program.grid))
    draw, timed, frozen = Random(f"adversary {name}"), 0, frozen_in(plan) or frozenset()
    if in_order:
        found_s = in_order_s(program, machine, layouts, draw, frozen)
    else:
        found = annealed(program, machine, "float32", layouts, draw, frozen)
        found_s, timed = found.seconds, found.timed
    gap = max(1 - found_s / seconds, 0.0)
    each = (time.process_time() - began - planned) / layouts
    print(
        f"{name:<12} {machine.name:<9} {ranks:>5} {program.grid!s:<24} {seconds * 1e3:>11.4f} "
        f"{found_s * 1e3:>11.4f} {100 * gap:>8.3f} % {layouts:>7} {timed:>6} {each * 1e3:>8.2f} {planned:>7.1f}",
        flush=True,
    )
    return gap


def drawn_network(number: int) -> tuple[Graph, Machine, int]:
    """A network, a machine and ranks, the same ones every time."""
    draw = Random(f"adversary {number}")
    machine, ranks = replace(a_machine(draw), hides_gradients=False), draw.choice((2, 4, 6, 8, 12, 16))
    return network_graph(branched(draw, draw.randint(1, 5))), machine, ranks


@click.command(help=__doc__.split("\n\n    ")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("networks", nargs=-1, type=click.Choice([*REAL]))
@click.option("--layouts", default=20000, show_default=True, help="That are looked at, of each network.")
@click.option("--random", "drawn", default=50, show_default=True, help="Networks that are drawn.")
@click.option("--first", default=0, show_default=True, help="Number of the first of them.")
@click.option("--in-order", is_flag=True, help="Sums of steps' seconds, with everything one after the other.")
@click.option("--near", default=0, show_default=True, help="Of the plan: as of convgen plan --layouts.")
@click.option("--small", is_flag=True, help="Four networks that are drawn, 400 layouts of each.")
def main(
    networks: tuple[str, ...], layouts: int, drawn: int, first: int, in_order: bool, near: int, small: bool
) -> None:
    """Compare, and print a table."""
    if small:
        layouts, drawn = 400, 4
    head = (f"{'network':<12} {'machine':<9} {'ranks':>5}", f"{'grid':<24} {'plan, ms':>11} {'found, ms':>11}")
    print(*head, f"{'less':>10} {'layouts':>7} {'timed':>6} {'ms each':>8} {'plan, s':>7}")
    gaps: dict[str, float] = {}
    for name in () if small else networks or REAL:
        graph, ranks = REAL[name]
        gaps[name] = compared(name, graph(), load_machine("lassen"), ranks, layouts, near, in_order=in_order)
    for number in range(first, first + (0 if networks else drawn)):
        name = f"random {number}"
        gaps[name] = compared(name, *drawn_network(number), layouts, near, in_order=in_order)
    worse = {name: gap for name, gap in gaps.items() if gap > GAP}
    said = ", ".join(f"{name} {100 * gap:.2f} %" for name, gap in worse.items())
    print(f"better by more than 0.1 %: {len(worse)} of {len(gaps)}" + f": {said}" * bool(said))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
