"""What tuning gains in training on a CPU: tuned and untuned modules, forward and backward.

    python bench/tuned_training.py [--budget S] [--effort full] [--cache DIR] [--rounds 24] [--samples 4] [--json FILE]

The set: the local problems of ResNet-50 that one of 2, 3, 4 or 6 ranks has when channels or filters are split, in
float32, on one thread. They are tuned into a folder (a temporary one, or DIR, where what is sure already is not
measured again), heaviest first, as long as the budget lasts. Then each module whose layer got a kernel runs in turn
with the one without, in a process of its own: CPU time of a step, medians over the rounds of the ratio within a round,
and what they lie between. The claim beside it is what the tuner stored. Modules without a kernel are the untuned ones,
to the letter.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.tune.bench_cpu import Alone
from convgen.tune.intervals import Interval, of_ratios
from convgen.tune.key import problem_of
from convgen.tune.replay import module_of
from convgen.tune.rotation import Rotation

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tuning" / "layers" / "resnet50.csv"
PHASES = ("forward", "backward_data", "backward_filter")


@dataclass(frozen=True)
class Tuned:
    """A local layer with what was stored for its phases."""

    name: str
    problem: Problem  # forward
    records: dict[str, dict[str, Any]]

    @property
    def kernels(self) -> dict[str, str]:
        return {phase: r["kernel"] for phase, r in self.records.items() if r["kernel"] != "aten"}

    @property
    def claim(self) -> float:
        """ATen's time over the kernels', of all three phases."""
        return sum(r["aten_ms"] for r in self.records.values()) / sum(r["ms"] for r in self.records.values())


def table(folder: Path, samples: int) -> Path:
    """ResNet-50's convolutions with so many samples, equal ones once."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        row["N"] = str(samples)
        seen.setdefault(tuple(v for k, v in row.items() if k != "name"), row)
    made = folder / "resnet50.csv"
    with made.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(seen.values())
    return made


def tune(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The tuner's records, a problem each."""
    command = [
        sys.executable, "-m", "convgen.cli", "tune", str(table(folder, options.samples)), "--grid", "N=1",
        "--partitions", options.ways, "--splits", "channel,filter", "--threads", "1", "--effort", options.effort,
        "--json",
    ]  # fmt: skip
    command += ["--budget", str(options.budget)] if options.budget else []
    environment = os.environ | {"CONVGEN_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def by_layer(records: list[dict[str, Any]]) -> Iterator[Tuned]:
    """Layers all of whose phases were reached, equal ones once."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["measured"]:
            for use in record["uses"]:
                layer, _, rest = use.partition(".")
                phase, _, split = rest.partition(" ")
                found.setdefault(f"{layer} {split}", {})[phase] = record
    seen: set[str] = set()
    for name, phases in found.items():
        key = phases.get("forward", {}).get("problem", "")
        if len(phases) == len(PHASES) and key not in seen:
            seen.add(key)
            yield Tuned(name, problem_of(key), phases)


def step(text: str) -> Callable[[Any], object]:
    """Forward and backward of a module on a set of operands."""
    module = load_text(text)
    mesh = module.init_mesh(transport=Alone())

    def run(one: Any) -> object:
        x, w, dy = (one.tensors[n] for n in ("x", "w", "dy"))
        return torch.autograd.grad(module.conv(x, w, mesh=mesh), (x, w), dy)

    return run


def gain(job: tuple[Problem, dict[str, str], int]) -> tuple[Interval, float, float]:
    """Untuned over tuned; and seconds of a step of each. In a process of its own."""
    problem, kernels, rounds = job
    torch.set_num_threads(1)
    rotation = Rotation(problem, 7)
    texts = [module_of(problem, "untuned"), module_of(problem, "tuned", kernels)]
    runs = [step(text) for text in texts if text is not None]
    laps: list[list[float]] = [[], []]

    def seconds(which: int) -> float:
        one = rotation.next()
        start = time.process_time()
        runs[which](one)
        return time.process_time() - start

    for which in (0, 1, 0, 1):
        seconds(which)
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            laps[which].append(seconds(which))
    return of_ratios(*laps), statistics.median(laps[0]), statistics.median(laps[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--ways", default="2,3,4,6")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--effort", choices=("quick", "full"), default="quick")
    parser.add_argument("--budget", type=float, help="seconds of tuning")
    parser.add_argument("--cache", type=Path, help="folder of the database; a temporary one by default")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.cache or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()[0]
        records = tune(folder, options)
        layers = list(by_layer(records))
    with_kernels = [one for one in layers if one.kernels]
    rows: list[dict[str, Any]] = []
    print("| local layer | kernels | claimed | untuned / tuned | between |\n|---|---|---|---|---|")
    for one in with_kernels:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found, before, after = pool.submit(gain, (one.problem, one.kernels, options.rounds)).result()
        print(
            f"| {one.name} | {', '.join(f'{p}: {k}' for p, k in one.kernels.items())} | {one.claim:.2f} "
            f"| {found.median:.2f} | {found.low:.2f} to {found.high:.2f} |",
            flush=True,
        )
        rows.append(
            {"layer": one.name, "kernels": one.kernels, "claimed": one.claim, "untuned_s": before, "tuned_s": after,
             "gain": [found.median, found.low, found.high], "doubts": [r["doubt"] for r in one.records.values()]}
        )  # fmt: skip
    doubts = sum(bool(r["doubt"]) for r in records if r["measured"])
    reached = sum(r["measured"] for r in records)
    print(
        f"\n{reached} of {len(records)} local problems reached, {doubts} of them in doubt; {len(layers)} layers whole,"
    )
    print(f"{len(with_kernels)} with kernels; the others are the untuned ones, to the letter.")
    if rows:
        slower = [r["layer"] for r in rows if r["gain"][2] < 1]
        untuned, tuned = (sum(r[n] for r in rows) for n in ("untuned_s", "tuned_s"))
        print(f"Slower than untuned beyond noise: {len(slower)}{' ' + ', '.join(slower) if slower else ''}.")
        print(f"Their steps together: {untuned * 1e3:.1f} ms untuned, {tuned * 1e3:.1f} tuned: {untuned / tuned:.2f}.")
    print(
        f"CPU time of one thread, {options.samples} samples, torch {torch.__version__}, load {load:.1f} at the start."
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
