"""Look for better layouts than plans': annealing over storage, roles, ways and gradients' rows of whole programs.

    python bench/adversary.py [NETWORK...] [--layouts 20000] [--random 50] [--in-order] [--small]

Each line is a network on a machine's ranks: the plan's step with what travels meanwhile, the least that annealing found
from there on the plan's grid, and what that is less. Layouts are accepted by a quick count of the step
(convgen/plan/program/step_ps.py); of those that it says are the best so far, and of others now and then, the step is
timed as plans' are (by_timeline.py), and the end is a descent by these times alone. `--in-order`: sums of seconds
instead, as of `convgen plan --in-order`. Networks are those of examples, or drawn at random; `--small` looks at a few.
Exits with 1 where something is better by more than 0.1 %.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import click
import torch

from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.network_compiler import plan_graph
from convgen.plan.fewer import without_idle
from convgen.plan.program.by_timeline import overlapped_s
from convgen.plan.program.nearby import Nearby, anneal
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
WARM = 2e-3  # of the plan's seconds: what annealing takes at first
SURE = 3e-4  # of the quick count: what is less by so much is timed
NEAR = 5e-3  # more by the quick count than this, and a step is not timed in the descent
TIMED = 0.05  # of layouts, that are timed whatever the quick count says of them, half of them at the end


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


@dataclass
class Found:
    """The least seconds, how many layouts were looked at, and how many of them were timed."""

    seconds: float
    looked: int = 0
    timed: int = 0
    program: Program | None = None


def annealed(program: Program, machine: Machine, dtype: str, layouts: int, draw: Random, *, in_order: bool) -> Found:
    """The best layout that is found from a program on."""
    near = Nearby(program, machine, dtype, by_step=not in_order)
    if in_order:
        found = Found(near.time_ps / PICOSECONDS)
        for _ in anneal(near, layouts, draw, WARM):
            _least(found, near.time_ps / PICOSECONDS, near)
        found.looked = layouts
        return found
    found = Found(overlapped_s(program, machine, dtype), program=program)
    least, every = near.time_ps, max(round(2 / TIMED), 1)
    for number, _ in enumerate(anneal(near, layouts, draw, WARM)):
        if near.time_ps < (1 - SURE) * least or number % every == 0:
            least = min(least, near.time_ps)
            found.timed += 1
            _least(found, overlapped_s(near.program, machine, dtype), near)
    near = Nearby(found.program or program, machine, dtype, by_step=True)
    last = round(layouts * TIMED / 2)
    for _ in range(last):
        if (change := near.draw(draw)) is not None and change.more_ps < NEAR * near.time_ps:
            before = near.kept()
            near.take(change)
            found.timed += 1
            if not _least(found, overlapped_s(near.program, machine, dtype), near):
                near.go_back(before)
    found.looked = layouts + last
    return found


def _least(found: Found, seconds: float, near: Nearby) -> bool:
    if seconds >= found.seconds:
        return False
    found.seconds, found.program = seconds, near.program
    return True


def compared(name: str, graph: Graph, machine: Machine, ranks: int, layouts: int, *, in_order: bool) -> float:
    """What is less than a plan's step, as a share of it; prints a line."""
    began = time.process_time()
    plan = plan_graph(graph, ranks, Setting(machine=machine, by_step=not in_order))[1]
    planned = time.process_time() - began
    seconds, program = plan.step_s, replace(plan.program, grid=without_idle(plan.program.grid))
    found = annealed(program, machine, "float32", layouts, Random(f"adversary {name}"), in_order=in_order)
    gap = max(1 - found.seconds / seconds, 0.0)
    each = (time.process_time() - began - planned) / max(found.looked, 1)
    print(
        f"{name:<12} {machine.name:<9} {ranks:>5} {program.grid!s:<24} {seconds * 1e3:>11.4f} "
        f"{found.seconds * 1e3:>11.4f} {100 * gap:>8.3f} % {found.looked:>7} {found.timed:>6} {each * 1e3:>8.2f} "
        f"{planned:>7.1f}",
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
@click.option("--small", is_flag=True, help="Four networks that are drawn, 400 layouts of each.")
def main(networks: tuple[str, ...], layouts: int, drawn: int, first: int, in_order: bool, small: bool) -> None:
    """Compare, and print a table."""
    if small:
        layouts, drawn = 400, 4
    head = (f"{'network':<12} {'machine':<9} {'ranks':>5}", f"{'grid':<24} {'plan, ms':>11} {'found, ms':>11}")
    print(*head, f"{'less':>10} {'layouts':>7} {'timed':>6} {'ms each':>8} {'plan, s':>7}")
    gaps: dict[str, float] = {}
    for name in () if small else networks or REAL:
        graph, ranks = REAL[name]
        gaps[name] = compared(name, graph(), load_machine("lassen"), ranks, layouts, in_order=in_order)
    for number in range(first, first + (0 if networks else drawn)):
        name = f"random {number}"
        gaps[name] = compared(name, *drawn_network(number), layouts, in_order=in_order)
    worse = {name: gap for name, gap in gaps.items() if gap > GAP}
    said = ", ".join(f"{name} {100 * gap:.2f} %" for name, gap in worse.items())
    print(f"better by more than 0.1 %: {len(worse)} of {len(gaps)}" + f": {said}" * bool(said))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
