"""What is hidden of a step's communication, measured beside simulated: processes over a paced link of their own.

    python bench/overlap.py [--rounds 15] [--rate 400mbit] [--random 8] [--case gather ...] [--json FILE]

Each case is a layer's or a network's step of training, forward and backward, in several schedules: plain, and what its
passes make (halos behind the interior, gathers and scatters in 2, 4 and 8 chunks, buckets, one halo for several rows).
In every round all of them run once, in an order drawn anew, and besides the local work alone (comp), on a transport
that moves nothing, and the collectives alone (comm): overlap_ranks.py. By minima:

    hidden  = (comm + comp - schedule) / min(comm, comp), forward and backward
    could   = the same, if all that may go on beside other things did (overlap_could.py)
    control = plain / (comm + comp) of the step; where it leaves 0.95 to 1.05 the case is void

Simulated are the same programs on a machine file that `convgen calibrate` writes first, in the same namespace, of as
many processes. Of all cases: how far simulated and measured steps are apart, how often the schedule that the timeline
takes is the fastest of those measured (or within 1 % of it), and what a wrong choice costs.

The link is tbf on `lo` (`unshare -rn`, `tc`): one that all ranks share, one core a process. Rounds are at least 15 for
a number to count, on a machine that nobody else uses: where computing alone takes much more than its processor's time,
and ranks have a core each, others were at work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from networks_memory import Skips
from networks_training import ResNet18
from overlap_could import PARTS, could
from overlap_ranks import rank_of
from paced import enter, pace
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.packages import files_of, write_package
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.contract import NetworkPass
from convgen.passes.parameters_first import ParametersFirst
from convgen.passes.start_halos import StartHalos
from convgen.passes.widen_halos import WidenHalos
from convgen.plan.program.overlapped import overlapped
from convgen.program.network import Program
from convgen.program.other_sizes import program_like
from convgen.spec.exported import graph_of

RATE = "400mbit"
NEAR = 1.01  # of the fastest: as fast
LEAST = 0.01  # of a step: less is not told from nothing

Ways = dict[str, tuple[NetworkPass, ...]]
CHUNKS: Ways = {f"chunks {c}": (ChunkCollectives(c),) for c in (2, 4, 8)}
HALOS: Ways = {"split": (StartHalos(),), "behind dw": (StartHalos(gradients="whole"),)}
BUCKETS: Ways = {
    "buckets": (BucketGradients(1),),
    "one bucket": (BucketGradients(0),),
    "dw first": (ParametersFirst(), BucketGradients(1)),
}
BOTH: Ways = BUCKETS | {"halos, buckets": (StartHalos(), BucketGradients(1))}
WIDE: Ways = {"one halo": (WidenHalos(),), "one halo, split": (WidenHalos(), StartHalos())}


def tower(channels: int, count: int, kernel: int = 3) -> nn.Module:
    layers = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False) for _ in range(count)]
    return nn.Sequential(*layers)


def normed(channels: int, count: int) -> nn.Module:
    """Convolutions with a batch norm between, whose moments and halos are small."""
    block = (nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False))
    return nn.Sequential(
        nn.Conv2d(channels, channels, 1), *(module for _ in range(count) for module in deepcopy(block))
    )


@dataclass(frozen=True)
class Case:
    """A network, its input, a grid, and schedules beside the plain one."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    grid: dict[str, int]
    ways: Ways


CASES: dict[str, Case] = {
    # Long rows: halos are much beside what is computed.
    "halo": Case(lambda: tower(32, 1), (1, 32, 64, 4096), {"H": 2}, HALOS),
    "halos in a row": Case(lambda: tower(32, 3), (1, 32, 64, 2048), {"H": 2}, HALOS),
    "halo of two dimensions": Case(lambda: tower(16, 2), (2, 16, 256, 256), {"H": 2, "W": 2}, HALOS),
    # Few pixels: each halo is a latency, and so are moments.
    "short halos in a row": Case(lambda: tower(16, 4), (1, 16, 64, 64), {"H": 2}, HALOS | WIDE),
    "halos behind moments": Case(lambda: normed(16, 4), (1, 16, 64, 64), {"H": 2}, HALOS | WIDE),
    # Filters, or channels, of what is gathered or scattered whole.
    "gather": Case(lambda: tower(64, 2, 5), (8, 64, 32, 32), {"F": 2}, CHUNKS),
    "gather of rows": Case(lambda: tower(64, 2, 5), (1, 64, 96, 96), {"F": 2}, CHUNKS),
    "scatter": Case(lambda: tower(64, 2, 5), (8, 64, 32, 32), {"C": 2}, CHUNKS),
    "scatter of rows": Case(lambda: tower(64, 2, 5), (1, 64, 96, 96), {"C": 2}, CHUNKS),
    # Many filters on few rows: gradients are much beside what is computed.
    "all-reduce": Case(lambda: tower(256, 3), (8, 256, 14, 14), {"N": 2}, BUCKETS),
    "nothing to hide": Case(lambda: tower(16, 4), (2, 16, 64, 64), {"N": 2}, BOTH),
    "resnet18": Case(ResNet18, (4, 3, 128, 128), {"N": 2}, BOTH),
    "resnet18 by rows": Case(ResNet18, (4, 3, 192, 192), {"H": 2}, BOTH),
    "unet": Case(lambda: Skips(16), (2, 3, 192, 192), {"H": 2}, BOTH),
}


def ranks_of(case: Case) -> int:
    return prod(case.grid.values())


def drawn(number: int) -> Case:
    """A layer that no case has: of any bound, by chance."""
    draw = Random(f"overlap {number}")
    axis = ("H", "F", "C", "N")[number % 4]
    channels, rows = draw.choice((16, 32, 64)), draw.choice((32, 48, 64))
    samples, long = draw.choice((2, 4, 8)), draw.choice((1, 4, 16)) if axis == "H" else 1
    kernel, count = draw.choice((1, 3, 3, 5)) if axis != "H" else draw.choice((3, 5)), draw.randint(1, 2)
    ways = {"H": HALOS, "F": CHUNKS, "C": CHUNKS, "N": BUCKETS}[axis]
    return Case(lambda: tower(channels, count, kernel), (samples, channels, rows, rows * long), {axis: 2}, ways)


# ---- Packages ----


def programs(case: Case) -> tuple[CompiledNetwork, dict[str, torch.Tensor], dict[str, Program]]:
    """The network, and its program by schedule."""
    torch.manual_seed(0)
    graph, tensors = graph_of(case.make(), (torch.zeros(case.shape),), name="net")
    compiled = compile_network(graph, Grid(tuple(case.grid.items())))
    plain = compiled.plain
    found = {"plain": plain}
    for name, passes in case.ways.items():
        program = plain
        for one in passes:
            program = one.run(program)
        if program not in found.values():
            found[name] = program
    return compiled, tensors, found


def write(compiled: CompiledNetwork, tensors: Any, program: Program, folder: Path) -> None:
    other = program_like(program, compiled.any_sizes.many)
    write_package(folder, files_of(replace(compiled, program=program, other=other), tensors), "the folder")


# ---- One case ----


@dataclass(frozen=True)
class Measured:
    """Seconds, minima by way and part ("forward", "backward", "step"), simulated steps by schedule, and by schedule
    and part what could be hidden of the plain one."""

    name: str
    found: dict[str, dict[str, float]]
    simulated: dict[str, float]
    could: dict[str, dict[str, float]]
    taken: str

    @property
    def control(self) -> float:
        """Over 1: something beside both; under 1: not all of both."""
        return self.found["plain"]["step"] / (self.found["comm"]["step"] + self.found["comp"]["step"])

    @property
    def is_void(self) -> bool:
        return not 0.95 <= self.control <= 1.05

    def saved(self, way: str, part: str) -> float:
        return self.found["comm"][part] + self.found["comp"][part] - self.found[way][part]

    def shares(self, way: str, part: str) -> tuple[float, ...]:
        """Of what is shorter, computing or communication: hidden, and what could be; none where next to none moves."""
        comm, comp = self.found["comm"][part], self.found["comp"][part]
        if comm < LEAST * comp:
            return ()
        return self.saved(way, part) / min(comm, comp), self.could[way][part] / min(comm, comp)

    @property
    def fastest(self) -> str:
        return min(self.simulated, key=lambda way: self.found[way]["step"])

    @property
    def lost(self) -> float:
        """What the timeline's choice takes over the fastest."""
        return self.found[self.taken]["step"] / self.found[self.fastest]["step"] - 1


def measure(name: str, case: Case, machine: Machine, least: tuple[int, float], port: int) -> Measured:
    compiled, tensors, by_way = programs(case)
    simulated = {w: simulate(p, machine, "float32", of_inputs=True).end_s for w, p in by_way.items()}
    chosen = overlapped(by_way["plain"], machine, "float32", of_inputs=True)
    if chosen not in by_way.values():
        by_way["chosen"] = chosen
        simulated["chosen"] = simulate(chosen, machine, "float32", of_inputs=True).end_s
    taken = next(w for w, p in by_way.items() if p == chosen)
    ranks = ranks_of(case)
    with tempfile.TemporaryDirectory() as folder:
        for i, program in enumerate(by_way.values()):
            write(compiled, tensors, program, Path(folder) / f"way{i}")
        names = {w: f"way{i}" for i, w in enumerate(by_way)}
        results = mp.get_context("spawn").SimpleQueue()
        shared = torch.zeros((1 << ranks, ranks), dtype=torch.int64).share_memory_(), results
        mp.spawn(rank_of, args=(ranks, case.shape, names, least, folder, port, shared), nprocs=ranks)
        found = results.get()
    parts = {w: could(by_way["plain"], p, machine, found["comp"], found["comm"]) for w, p in by_way.items()}
    return Measured(name, found, simulated, parts, taken)


HEAD = (
    *("step ms", "forward", "backward", "processor", "of plain"),
    *("forward", "could", "backward", "could", "of could", "simulated", "/ measured"),
)


def print_case(m: Measured, case: Case) -> None:
    grid = ",".join(f"{a}={n}" for a, n in case.grid.items())
    void = "  void" if m.is_void else ""
    print(f"\n{m.name}: {case.shape} on {grid}; control {m.control:.3f}{void}; taken: {m.taken}, fastest: {m.fastest}")
    alone = m.found["comp"]
    print(f"  computing alone takes {alone['step'] / alone['processor']:.2f} of its processor's time")
    print(f"  {'':<14}" + "".join(f"{h:>11}" for h in HEAD))
    for way, parts in m.found.items():
        line = "".join(f"{parts[p] * 1e3:11.1f}" for p in ("step", "forward", "backward", "processor"))
        if way in m.simulated:
            line += f"{parts['step'] / m.found['plain']['step']:11.3f}"
            shares = [s for p in PARTS for s in m.shares(way, p) or (None, None)]
            able = m.could[way]["step"]
            shares.append(m.saved(way, "step") / able if able > LEAST * parts["step"] else None)
            line += "".join(f"{'-':>11}" if s is None else f"{s:11.1%}" for s in shares)
            line += f"{m.simulated[way] * 1e3:11.1f}{m.simulated[way] / parts['step']:11.2f}"
        print(f"  {way:<14}{line}", flush=True)


def print_all(cases: Sequence[Measured]) -> None:
    counted = [m for m in cases if not m.is_void]
    print(f"\n{len(counted)} of {len(cases)} cases count")
    if not counted:
        return
    right = [m for m in counted if m.lost <= NEAR - 1]
    ratios = [m.simulated[w] / m.found[w]["step"] for m in counted for w in m.simulated]
    within = sum(1 / 1.15 <= r <= 1.15 for r in ratios)
    print(f"the schedule taken is the fastest in {len(right)} of {len(counted)}: {len(right) / len(counted):.0%}")
    print(f"a wrong choice costs at most {max(m.lost for m in counted):.1%}")
    print(f"simulated / measured steps: median {median(ratios):.2f}; {within} of {len(ratios)} within 15 %")


# ---- All of them ----


def calibrated(path: Path, ranks: int, seconds: int) -> Machine:
    """The machine as convgen calibrate finds it in this namespace."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
    pinned = str(Path(__file__).with_name("pinned.py"))  # as ranks are
    words = ["--master-port=29399", pinned, "calibrate", "-o", str(path), "--seconds", str(seconds)]
    words += ["--quantile", "0.25"]  # of what is compared with minima
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launch, *words], check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"convgen calibrate: {done.stderr[-2000:]}")
    return load_machine(str(path))


def machine_for(ranks: int, path: Path, seconds: int) -> Machine:
    """Of so many processes; of two in a file of this name, of others beside it."""
    path = path if ranks == 2 else path.with_stem(f"{path.stem}_{ranks}")
    return load_machine(str(path)) if path.exists() else calibrated(path, ranks, seconds)


def print_machine(ranks: int, machine: Machine) -> None:
    (level,) = machine.levels
    flops, memory = machine.flops_per_s("float32") / 1e9, machine.memory_bytes_per_s / 1e9
    launch, message, rate = (
        n * 1e6 for n in (machine.rows_launch_s, machine.message_processor_s, machine.processor_s_per_byte)
    )
    print(f"{ranks} ranks: link {level.latency_s * 1e6:.0f} us, {level.bytes_per_s / 1e6:.1f} MB/s; ", end="")
    print(f"computing {flops:.1f} GFLOP/s, {memory:.1f} GB/s; a launch {launch:.0f} us; ", end="")
    print(f"of the processor {message:.0f} us a message, {rate * 1e6:.0f} us a megabyte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=15, help="of rounds, of a case whose steps are short")
    parser.add_argument("--rate", default=RATE, help="of tbf; none: no pacing")
    parser.add_argument("--case", nargs="*", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--random", type=int, default=8, help="layers drawn besides")
    parser.add_argument("--calibrate", type=int, default=30, help="seconds that measuring the machine takes, about")
    parser.add_argument("--machine", type=Path, help="file of what is measured; read where it is there")
    parser.add_argument("--json", type=Path, help="all minima")
    args = parser.parse_args()
    enter()
    pace(args.rate)
    few = "" if args.rounds >= 15 else "; too few for numbers to count"
    print(f"{args.rate}, minima of {args.rounds} rounds{few}; load {os.getloadavg()[0]:.1f}")
    cases = {name: CASES[name] for name in args.case} | {f"random {i}": drawn(i) for i in range(args.random)}
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        path = args.machine or Path(folder) / "paced.yaml"
        machines = {n: machine_for(n, path, args.calibrate) for n in sorted({ranks_of(c) for c in cases.values()})}
    for ranks, machine in machines.items():
        print_machine(ranks, machine)
    for i, (name, case) in enumerate(cases.items()):
        found.append(measure(name, case, machines[ranks_of(case)], (args.rounds, args.seconds), 29500 + i))
        print_case(found[-1], case)
    print_all(found)
    if args.json is not None:
        args.json.write_text(json.dumps([m.__dict__ for m in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
