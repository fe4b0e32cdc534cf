"""How far the tuner can be trusted: its winners over fresh runs, quiet and under load; wrong ones, flips, gains found.

    python bench/tuner_trust.py measure quiet.jsonl [--runs 3] [--layers 8] [--minutes 9]
    python bench/tuner_trust.py measure loaded.jsonl --load 8
    python bench/tuner_trust.py truth truth.jsonl quiet.jsonl loaded.jsonl [--minutes 9]
    python bench/tuner_trust.py report truth.jsonl quiet.jsonl [loaded.jsonl]
    python bench/tuner_trust.py planted [--draws 100]     # times that are drawn instead of measured; no machine needed

`measure` tunes the phases of eight local layers on one thread, each run of each layer with a database of its own,
beside so many processes that multiply matrices in a session of theirs, as other users' are. `truth` runs every kernel
that any run stored and ATen in turn, many rounds: on a machine that does nothing else. Both write each result as it is
there, stop in time, and go on where they were. `report` prints tables.

A flip is a pair of runs that are both sure and store different kernels; it costs something where the truth tells them
apart by more than a tie. A wrong winner is sure, and slower than ATen beyond noise. Regret is the stored kernel's time
over the best one's. A gain is found where a run stores a kernel: of those that most quiet runs found, so many are.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import torch
from rows import Rows, add, rows_of

from convgen.kernels.config import parse_config
from convgen.spec.target import CPU
from convgen.tune.bench_cpu import ATEN, CpuBench
from convgen.tune.candidates import Candidate, digest
from convgen.tune.intervals import of_ratios
from convgen.tune.key import problem_of
from convgen.tune.replay import module_of
from convgen.tune.rounds import TIED

# N, C, F, rows, K: of layers of ResNet-50 as one of 3 to 24 ranks has them.
LAYERS = ((8, 22, 128, 28, 1), (8, 64, 22, 28, 1), (8, 43, 43, 14, 3), (8, 52, 43, 14, 1), (4, 22, 64, 28, 3),
          (8, 37, 74, 7, 3), (2, 256, 21, 56, 1), (4, 512, 21, 28, 1))  # fmt: skip
TRUTH_ROUNDS, SITTINGS = 60, 3
MULTIPLY = """
import os, torch
for _ in range({0} - 1):
    if not os.fork():
        break
torch.set_num_threads(1)
a, parent = torch.randn(700, 700), os.getppid()
while os.getppid() == parent:
    torch.mm(a, a)
"""


# ---- Measuring -----------------------------------------------------------------------------------------------------


def layer_file(folder: Path, number: int) -> Path:
    n, c, f, rows, k = LAYERS[number]
    file = folder / f"layer{number}.yaml"
    file.write_text(
        f"name: layer{number}\nlayer: conv2d\ninput: [{n}, {c}, {rows}, {rows}]\nout_channels: {f}\n"
        f"kernel_size: {k}\npadding: {k // 2}\ngrid: {{N: 1}}\nalgorithm: sample\n"
    )
    return file


@contextmanager
def loaded(count: int) -> Generator[None]:
    """Beside so many processes that multiply."""
    if not count:
        yield
        return
    others = subprocess.Popen([sys.executable, "-c", MULTIPLY.format(count)], start_new_session=True)
    try:
        time.sleep(5.0)
        yield
    finally:
        os.killpg(others.pid, signal.SIGKILL)
        others.wait()


def tuned(number: int, effort: str) -> Rows:
    """The records of a fresh run of a layer."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "convgen.cli", "tune", str(layer_file(Path(name), number)), "--threads", "1"]
        environment = os.environ | {"CONVGEN_CACHE": name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--effort", effort, "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        return json.loads(done.stdout)


def truth(key: str, kernels: Sequence[str]) -> dict[str, list[float]]:
    """Laps of these kernels and ATen in turn, of several sittings one after the other."""
    problem, bench = problem_of(key), CpuBench(1)
    text = module_of(problem, f"truth_{digest(key)}")
    assert text is not None
    bench.open(problem, text, 11)
    given = [(k, Candidate(problem, parse_config(k), CPU).text) for k in kernels]
    laps: dict[str, list[float]] = {}
    for sitting in range(SITTINGS):
        records = {k: bench.race([(k, text)], TRUTH_ROUNDS, 12 + sitting, 60.0, gains=(1e9,)) for k, text in given}
        for k, record in records.items():
            laps.setdefault(k, []).extend(record[k]["laps"])
            laps.setdefault(f"aten beside {k}", []).extend(record[ATEN]["laps"])
    return laps


# ---- Counting ------------------------------------------------------------------------------------------------------


def gains_of(laps: Mapping[str, list[float]]) -> dict[str, Any]:
    """ATen's time over each kernel's."""
    return {k: of_ratios(laps[f"aten beside {k}"], v) for k, v in laps.items() if not k.startswith("aten")}


def counted(rows: Rows, true: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the report says of a study."""
    flips = costly = pairs = wrong = 0
    regrets: list[float] = []
    by_problem: dict[str, Rows] = {}
    for row in rows:
        by_problem.setdefault(row["problem"], []).append(row)
    for key, entries in by_problem.items():
        gains = true.get(key, {})
        median = {"aten": 1.0} | {k: gain.median for k, gain in gains.items()}
        for e in entries:
            regrets.append(max(median.values()) / median[e["kernel"]])
            wrong += not e["doubt"] and e["kernel"] != "aten" and gains[e["kernel"]].high < 1
        for a, b in combinations([e for e in entries if not e["doubt"]], 2):
            pairs += 1
            flips += a["kernel"] != b["kernel"]
            apart = median[a["kernel"]] / median[b["kernel"]]
            costly += not 1 / TIED <= apart <= TIED
    return {
        "entries": len(rows), "sure": sum(not r["doubt"] for r in rows), "wrong": wrong, "pairs": pairs, "flips": flips,
        "costly": costly, "gains": sum(r["kernel"] != "aten" for r in rows),
        "regret": statistics.geometric_mean(regrets), "worst": max(regrets),
        "load": statistics.median(r["load"] for r in rows),
    }  # fmt: skip


def found_of(quiet: Rows, loaded: Rows) -> tuple[int, int]:
    """Of the problems where most quiet runs found a gain: how many entries of the other study found it, of how many."""
    runs: dict[str, list[bool]] = {}
    for row in quiet:
        runs.setdefault(row["problem"], []).append(row["kernel"] != "aten")
    there = {key for key, found in runs.items() if 2 * sum(found) > len(found)}
    of = [row["kernel"] != "aten" for row in loaded if row["problem"] in there]
    return sum(of), len(of)


# ---- Commands ------------------------------------------------------------------------------------------------------


@click.group(help=(__doc__ or "").split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    torch.set_num_threads(1)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--runs", default=3)
@click.option("--load", default=0)
@click.option("--effort", type=click.Choice(("quick", "full")), default="quick")
@click.option("--layers", type=click.IntRange(1, len(LAYERS)), default=len(LAYERS))
@click.option("--minutes", default=9.0)
def measure(file: Path, runs: int, load: int, effort: str, layers: int, minutes: float) -> None:
    """Tune, a layer of a run after the other."""
    end, there = time.monotonic() + 60 * minutes, {(r["run"], r["layer"]) for r in rows_of(file)}
    left = [(run, i) for run in range(runs) for i in range(layers) if (run, i) not in there]
    with loaded(load if left else 0):
        while left and time.monotonic() < end:
            run, i = left.pop(0)
            start = time.monotonic()
            for one in tuned(i, effort):
                kept = {n: one[n] for n in ("problem", "kernel", "doubt", "gain", "module")}
                add(file, {"run": run, "layer": i, **kept, "load": os.getloadavg()[0]})
                print(f"run {run}: {one['problem']}: {one['kernel']} {one['gain']} {one['doubt']}", flush=True)
            print(f"    {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{len(left)} of {runs * layers} left{'; the same command goes on' if left else ''}")


@main.command("truth")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("studies", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--minutes", default=9.0)
def true(file: Path, studies: Sequence[Path], minutes: float) -> None:
    """Race what was stored against ATen, on a machine that does nothing else."""
    end = time.monotonic() + 60 * minutes
    there = {(r["problem"], k) for r in rows_of(file) for k in r["laps"]}
    wanted: dict[str, set[str]] = {}
    for row in (r for study in studies for r in rows_of(study)):
        if row["kernel"] != "aten" and (row["problem"], row["kernel"]) not in there:
            wanted.setdefault(row["problem"], set()).add(row["kernel"])
    left = list(wanted.items())
    while left and time.monotonic() < end:
        key, kernels = left.pop(0)
        laps = truth(key, sorted(kernels))
        add(file, {"problem": key, "laps": laps, "load": os.getloadavg()[0]})
        print(f"{key}: {', '.join(f'{k} {gain}' for k, gain in gains_of(laps).items())}", flush=True)
    print(f"{len(left)} problems left{'; the same command goes on' if left else ''}")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("studies", nargs=-1, type=click.Path(path_type=Path))
def report(file: Path, studies: Sequence[Path]) -> None:
    """The tables: of each study, and of the gains of the first, how many the others found."""
    known: dict[str, dict[str, Any]] = {}
    raced = rows_of(file)
    for row in raced:
        known.setdefault(row["problem"], {}).update(gains_of(row["laps"]))
    given = {study: rows_of(study) for study in studies}
    print("| study | entries | sure | wrong winners | flips, of pairs of sure ones | costly | gains | regret | worst |")
    print("|---|---|---|---|---|---|---|---|---|")
    for study, rows in given.items():
        if not rows:
            print(f"| {study.stem}: not measured yet | | | | | | | | |")
            continue
        c = counted(rows, known)
        print(
            f"| {study.stem} (load {c['load']:.0f}) | {c['entries']} | {c['sure']} | {c['wrong']} | {c['flips']} of "
            f"{c['pairs']} | {c['costly']} | {c['gains']} | {c['regret']:.3f} | {c['worst']:.2f} |"
        )
    if raced:
        print(f"\nThe truth was measured at a load of {statistics.median(r['load'] for r in raced):.0f}.")
    there = [study for study, rows in given.items() if rows]
    for first, other in ((there[0], other) for other in there[1:]):
        found, of = found_of(given[first], given[other])
        share = f"{found} of {of} ({found / of:.0%})" if of else "none of none"
        print(f"\nOf the gains that most runs of {first.stem} found, {other.stem} found {share}.")


@main.command()
@click.option("--draws", default=100)
def planted(draws: int) -> None:
    """Kernels whose speed is known, three fresh runs of each draw."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from planted_times import BUSY, QUIET, WILD
    from planted_times import counted as counted_of_planted

    print("| noise | entries | sure | wrong winners | gains of 5 % surely missed | flips | gains found | regret |")
    print("|---|---|---|---|---|---|---|---|")
    for name, noise in (("quiet", QUIET), ("busy", BUSY), ("wild", WILD)):
        with tempfile.TemporaryDirectory() as folder:
            c = counted_of_planted(Path(folder), noise, draws)
        print(
            f"| {name} | {3 * draws} | {c.sure} | {c.wrong} | {c.missed} | {c.flips} of {c.pairs} "
            f"| {c.found} of {c.of} | {statistics.geometric_mean(c.regrets):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
