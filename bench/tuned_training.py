"""What tuning gains in training on a CPU: tuned and untuned modules, forward and backward.

    python bench/tuned_training.py tune FOLDER [--minutes 9] [--samples 2] [--ways 2,3,4,6] [--effort quick]
    python bench/tuned_training.py modules FOLDER [--minutes 9] [--rounds 100]
    python bench/tuned_training.py report FOLDER

The set: the local problems of ResNet-50 that one of 2, 3, 4 or 6 ranks has when channels or filters are split, in
float32, on one thread. `tune` tunes them, a convolution of the network after the other, those first that occur most.
`modules` then runs each module whose layer got a kernel in turn with the one without, in a process of its own: CPU time
of a step, forward and backward, the median over the rounds of the ratio within a round, and what it lies between. Both
write each result as it is there, stop in time, and go on where they were. `report` prints the table; the claim in it is
what the tuner stored. Modules without a kernel are the untuned ones, to the letter.
"""

from __future__ import annotations

import csv
import json
import math
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

import click
import torch
from rows import add, rows_of

from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.tune.bench_cpu import Alone
from convgen.tune.intervals import of_ratios
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


def layers(samples: int) -> list[dict[str, str]]:
    """ResNet-50's convolutions with so many samples, equal ones once, those first that occur most."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    seen: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        row["N"] = str(samples)
        seen.setdefault(tuple(v for k, v in row.items() if k != "name"), []).append(row)
    return [same[0] for same in sorted(seen.values(), key=len, reverse=True)]


def tuned(row: dict[str, str], ways: str, effort: str) -> list[dict[str, Any]]:
    """The tuner's records of a convolution, a problem each, with a database of its own."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "layer.csv")
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(row))
            writer.writeheader()
            writer.writerow(row)
        command = [
            sys.executable, "-m", "convgen.cli", "tune", str(file), "--grid", "N=1", "--partitions", ways,
            "--splits", "channel,filter", "--threads", "1", "--effort", effort, "--json",
        ]  # fmt: skip
        environment = os.environ | {"CONVGEN_CACHE": name, "OMP_NUM_THREADS": "1"}
        quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return json.loads(subprocess.run(command, check=True, env=environment, **quiet).stdout)


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


def gain(job: tuple[Problem, dict[str, str], int]) -> list[list[float]]:
    """Seconds of a step, untuned and tuned, a round each. In a process of its own."""
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
    return laps


@click.group(help=(__doc__ or "").split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    torch.set_num_threads(1)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ways", default="2,3,4,6")
@click.option("--samples", default=2)
@click.option("--effort", type=click.Choice(("quick", "full")), default="quick")
@click.option("--minutes", default=9.0)
def tune(folder: Path, ways: str, samples: int, effort: str, minutes: float) -> None:
    """Tune, a convolution of the network after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    file, end = folder / "tuned.jsonl", time.monotonic() + 60 * minutes
    there = {r["layer"] for r in rows_of(file)}
    left = [row for row in layers(samples) if row["name"] not in there]
    while left and time.monotonic() < end:
        row = left.pop(0)
        start = time.monotonic()
        records = tuned(row, ways, effort)
        kept = ("problem", "uses", "measured", "kernel", "ms", "aten_ms", "gain", "module", "doubt")
        for r in records:
            add(file, {"layer": row["name"], "load": os.getloadavg()[0]} | {n: r.get(n) for n in kept})
        gains = sum(r["measured"] and r["kernel"] != "aten" for r in records)
        took = time.monotonic() - start
        print(f"{row['name']}: {len(records)} problems, {gains} gains, {took:.0f} s", flush=True)
    print(f"{len(left)} convolutions left{'; the same command goes on' if left else ''}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=100)
@click.option("--minutes", default=9.0)
def modules(folder: Path, rounds: int, minutes: float) -> None:
    """Run each module that has a kernel in turn with the one without."""
    file, end = folder / "modules.jsonl", time.monotonic() + 60 * minutes
    there = {(r["layer"], json.dumps(r["kernels"])) for r in rows_of(file)}
    with_kernels = [one for one in by_layer(rows_of(folder / "tuned.jsonl")) if one.kernels]
    left = [one for one in with_kernels if (one.name, json.dumps(one.kernels)) not in there]
    while left and time.monotonic() < end:
        one = left.pop(0)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            laps = pool.submit(gain, (one.problem, one.kernels, rounds)).result()
        add(file, {"layer": one.name, "kernels": one.kernels, "laps": laps, "load": os.getloadavg()[0]})
        print(f"{one.name}: claimed {one.claim:.2f}, {of_ratios(*laps)}", flush=True)
    print(f"{len(left)} modules left{'; the same command goes on' if left else ''}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--most", default=1000, help="Rows: those that gain most.")
def report(folder: Path, most: int) -> None:
    """The table, and what counts."""
    records = rows_of(folder / "tuned.jsonl")
    whole = {one.name: one for one in by_layer(records)}
    ran = {r["layer"]: r for r in rows_of(folder / "modules.jsonl") if r["layer"] in whole}
    ran = {n: r for n, r in ran.items() if r["kernels"] == whole[n].kernels}
    found = {n: of_ratios(*r["laps"]) for n, r in ran.items()}
    print("| local layer | kernels | claimed | untuned / tuned | between |\n|---|---|---|---|---|")
    for n in sorted(found, key=lambda n: -found[n].median)[:most]:
        kernels, f = ", ".join(f"{p}: {k}" for p, k in ran[n]["kernels"].items()), found[n]
        print(f"| {n} | {kernels} | {whole[n].claim:.2f} | {f.median:.2f} | {f.low:.2f} to {f.high:.2f} |")
    problems = {r["problem"]: r for r in records if r["measured"]}
    with_kernels = [one for one in whole.values() if one.kernels]
    doubts, load = sum(bool(r["doubt"]) for r in problems.values()), statistics.median(r["load"] for r in records)
    print(f"\n{len(problems)} local problems tuned, {doubts} of them in doubt; {len(whole)} layers whole,")
    print(
        f"{len(with_kernels)} with kernels, {len(found)} of them run; the others are the untuned ones, to the letter."
    )
    if found:
        slower = [n for n, f in found.items() if f.high < 1]
        untuned, tuned_s = (sum(statistics.median(r["laps"][i]) for r in ran.values()) for i in (0, 1))
        mean = math.exp(statistics.mean(math.log(f.median) for f in found.values()))
        claimed = math.exp(statistics.mean(math.log(whole[n].claim) for n in found))
        print(f"Slower than untuned beyond noise: {len(slower)}{' ' + ', '.join(slower) if slower else ''}.")
        print(
            f"Their steps together: {untuned * 1e3:.1f} ms untuned, {tuned_s * 1e3:.1f} tuned: {untuned / tuned_s:.2f}."
        )
        print(f"Geometric mean {mean:.2f}, claimed {claimed:.2f}.")
    print(f"CPU time of one thread; load while tuning {load:.1f} (median).")


if __name__ == "__main__":
    main()
