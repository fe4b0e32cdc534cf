"""Do simulated steps predict measured ones, and does `plan --try 3` find the fastest layout? Over a paced link.

    python bench/predict.py [--only schedules|try] [--minutes 12] [--rounds 11] [--json FILE] [--small]

Schedules: ResNet-18 on small images, a U-Net and three layers, on three grids of 2 and three of 4 processes, each with
every collective waited for at once and as its timeline on the machine has it: 60, as far as they differ. The machine is
measured by `convgen calibrate` first, in the same namespace. Of each: simulated beside measured, the model's own
deviation, and which step is off most. Right is within 15 %; a machine that knows itself has 19 of 20 within two
deviations.

Tried: of ten pairs of network and link, the ten best layouts by the model are run on 2 processes. `--try 3` runs the
first three, in a series of its own; another series of all ten judges what it picked, and what the model alone would
have. Right is the fastest, or what takes 5 % longer at most.

Both stop to begin new cases when `--minutes` are over, and say how many are left out. `--small` runs a few cases for a
moment, to see that everything works: its numbers mean nothing. A machine that nobody else uses, of as many cores as
there are processes where numbers are to count.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from networks_memory import Skips
from networks_training import ResNet18
from overlap import machine_for, tower
from paced import enter, pace
from torch import nn

from convgen.algebra.grid import Grid
from convgen.bench.report import farthest
from convgen.bench.run import PLAIN, STEP, Effort, Subject, bench
from convgen.bench.tried import Candidate, candidates, run_in_turn
from convgen.calibrate.team import Team
from convgen.cost.machine import Machine
from convgen.cost.uncertainty import estimate
from convgen.network_compiler import compile_network
from convgen.plan.setting import Setting
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.target import CPU
from convgen.verify.processes import spawn

NEAR, BEST = 0.15, 0.05  # of a measured step: the simulated one is right; of the fastest layout: as fast
RATES = ("400mbit", "4gbit")
TRIED, OF = 3, 10
GRIDS: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"N": 2}, {"H": 2}, {"C": 2}),
    4: ({"N": 4}, {"N": 2, "H": 2}, {"H": 2, "W": 2}),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (ResNet18, (4, 3, 64, 64)),
    "unet": (lambda: Skips(8), (4, 3, 96, 96)),
    "early layer": (lambda: tower(32, 1), (4, 32, 112, 112)),
    "middle layer": (lambda: tower(64, 1, 5), (8, 64, 32, 32)),
    "late layer": (lambda: tower(256, 1), (8, 256, 14, 14)),
}


def graph(name: str) -> tuple[Graph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    return graph_of(make(), (torch.zeros(shape),), name=name.replace(" ", "_"))


def pinned() -> Team:
    """This process on a core of its own, as calibrate's ranks are."""
    team, cores = Team(torch.device("cpu")), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[team.rank % len(cores)]})
    return team


# ---- Schedules ----


@dataclass(frozen=True)
class Schedules:
    """What each process runs: a step of a subject, as compiled and with every collective waited for."""

    subject: Subject
    machine: Machine
    effort: Effort

    def __call__(self, _: int) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            found = bench(pinned(), self.subject, Path(folder), self.machine, self.effort, ("overlap",))
        compiled = self.subject.compiled
        programs = {STEP: compiled.program} | ({PLAIN: compiled.plain} if compiled.plain != compiled.program else {})
        rows: list[dict[str, Any]] = []
        for way, program in programs.items():
            simulated, step = found.simulated[way][1], found.ways[way]["step"]
            worst = farthest(found.beside, simulated / step.median - 1) if way == STEP else None
            own = estimate(program, self.machine, compiled.dtype, of_inputs=self.subject.of_inputs)
            rows.append(
                {
                    "case": self.subject.name,
                    "way": way,
                    "simulated_s": simulated,
                    "measured_s": step.median,
                    "spread": step.spread,
                    "deviation_s": None if own is None else own.deviation,
                    "off_most": None if worst is None else f"{worst.what} {worst.name}, {worst.phase}",
                }
            )
        return rows


def subjects(ranks: int, machine: Machine) -> Iterator[Callable[[], Subject]]:
    """One after the other, so that those which there is no time for are not compiled."""

    def of(name: str, grid: dict[str, int]) -> Subject:
        described, tensors = graph(name)
        return Subject(compile_network(described, Grid(tuple(grid.items())), machine=machine), tensors)

    for grid in GRIDS[ranks]:
        yield from (lambda name=name, grid=grid: of(name, grid) for name in MODULES)


def print_schedules(rows: Sequence[dict[str, Any]], left_out: int) -> None:
    print(f"\n{'case':<34}{'way':<28}{'simulated':>11}{'measured ms':>13}{'ratio':>7}{'+-':>8}{'spread':>8}")
    for r in rows:
        deviation = "" if r["deviation_s"] is None else f"{r['deviation_s'] / r['simulated_s']:.0%}"
        line = f"{r['case']:<34}{r['way']:<28}{r['simulated_s'] * 1e3:11.2f}{r['measured_s'] * 1e3:13.2f}"
        print(f"{line}{r['simulated_s'] / r['measured_s']:7.2f}{deviation:>8}{r['spread']:8.0%}")
        if not is_near(r) and r["off_most"]:
            print(f"    most by {r['off_most']}")
    right = sum(map(is_near, rows))
    sure = [
        abs(r["simulated_s"] - r["measured_s"]) <= 2 * r["deviation_s"] for r in rows if r["deviation_s"] is not None
    ]
    print(f"\nwithin {NEAR:.0%}: {right} of {len(rows)} schedules ({right / max(len(rows), 1):.0%})")
    print(f"within two deviations of the model's own: {sum(sure)} of {len(sure)}")
    names = Counter(r["off_most"].split()[0] for r in rows if r["off_most"] and not is_near(r))
    print(f"of those that are off, most is off by: {dict(names) or 'none is'}")
    if left_out:
        print(f"no time for {left_out} more networks on grids")


def is_near(row: dict[str, Any]) -> bool:
    return abs(row["simulated_s"] / row["measured_s"] - 1) <= NEAR


# ---- Tried ----


@dataclass(frozen=True)
class Judged:
    """What each process runs: the first layouts, and then all of them."""

    found: tuple[Candidate, ...]
    tensors: dict[str, torch.Tensor]
    seconds: float

    def __call__(self, _: int) -> dict[str, Any]:
        team = pinned()
        with tempfile.TemporaryDirectory() as folder:
            first, every = Path(folder) / "first", Path(folder) / "every"
            first.mkdir(), every.mkdir()
            tried, _ = run_in_turn(team, self.found[:TRIED], self.tensors, first, self.seconds)
            judged, _ = run_in_turn(team, self.found, self.tensors, every, self.seconds)
        took = {one.candidate.name: one.took.median for one in judged}
        return {
            "layouts": took,
            "fastest": judged[0].candidate.name,
            "picked": tried[0].candidate.name,
            "modelled": self.found[0].name,
        }


def lost(row: dict[str, Any], what: str) -> float:
    """What a choice takes over the fastest."""
    return row["layouts"][row[what]] / row["layouts"][row["fastest"]] - 1


def print_tried(rows: Sequence[dict[str, Any]], left_out: int) -> None:
    tried_by = f"--try {TRIED}"
    head = f"{'pair':<24}{'layouts':>8}  {'fastest':<28}{tried_by:<28}{'lost':>7}"
    print(f"\n{head}  {'modelled':<28}{'lost':>7}")
    for r in rows:
        line = f"{r['pair']:<24}{len(r['layouts']):8}  {r['fastest']:<28}{r['picked']:<28}{lost(r, 'picked'):7.1%}"
        print(f"{line}  {r['modelled']:<28}{lost(r, 'modelled'):7.1%}")
    for what, said in (("picked", f"plan --try {TRIED}"), ("modelled", "the model alone")):
        right = sum(lost(r, what) <= BEST for r in rows)
        print(f"{said}: the fastest, or {BEST:.0%} longer at most, in {right} of {len(rows)} pairs")
    if left_out:
        print(f"no time for {left_out} more pairs")


# ---- Both ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("schedules", "try"))
    parser.add_argument("--minutes", type=float, default=12, help="after which nothing new begins; half for each part")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1.0, help="of running, about, a layout that is tried")
    parser.add_argument("--calibrate", type=int, default=30, help="seconds that measuring a machine takes, about")
    parser.add_argument("--machine", type=Path, help="file of what is measured, by rate; read where it is there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="a few cases for a moment; numbers mean nothing")
    args = parser.parse_args()
    enter()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    begun, parts = time.monotonic(), [args.only] if args.only else ["schedules", "try"]
    if args.small:
        args.rounds, args.seconds, args.calibrate = 2, 0.05, 4
    said = "; small: no number counts" if args.small else ""
    print(
        f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, {args.rounds} rounds{said}", flush=True
    )
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = args.machine or Path(folder) / "machine.yaml"

        def machine(rate: str, ranks: int) -> Machine:
            pace(rate)
            return machine_for(ranks, base.with_stem(f"{base.stem}_{rate}"), args.calibrate)

        for number, part in enumerate(parts, 1):
            deadline = begun + 60 * args.minutes * number / len(parts)
            rows, left_out = (schedules if part == "schedules" else tried)(args, machine, deadline)
            (print_schedules if part == "schedules" else print_tried)(rows, left_out)
            found[part] = rows
    print(f"\n{(time.monotonic() - begun) / 60:.1f} minutes")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


Rows = tuple[list[dict[str, Any]], int]


def schedules(args: Any, machine: Callable[[str, int], Machine], deadline: float) -> Rows:
    rows, left_out = list[dict[str, Any]](), 0
    for ranks in GRIDS if not args.small else (2,):
        on = machine(RATES[0], ranks)
        some = [*subjects(ranks, on)]
        for make in some[: 3 if args.small else None]:
            if time.monotonic() > deadline:
                left_out += 1
                continue
            rows += spawn(Schedules(make(), on, Effort(args.rounds, 2, 5)), ranks)[0]
            print(f"  {rows[-1]['case']}", flush=True)
    return rows, left_out


def tried(args: Any, machine: Callable[[str, int], Machine], deadline: float) -> Rows:
    rows, left_out = list[dict[str, Any]](), 0
    for rate in RATES if not args.small else RATES[:1]:
        on = machine(rate, 2)
        for name in [*MODULES][2:3] if args.small else MODULES:
            if time.monotonic() > deadline:
                left_out += 1
                continue
            described, tensors = graph(name)
            some = tuple(candidates(described, 2, Setting(machine=on), CPU, OF))
            rows.append({"pair": f"{name}, {rate}"} | spawn(Judged(some, tensors, args.seconds), 2)[0])
            print(f"  {rows[-1]['pair']}", flush=True)
    return rows, left_out


if __name__ == "__main__":
    main()
