"""How far the tuner can be trusted: its winners over fresh runs, quiet and under load; regret, flips, gains found.

    python bench/tuner_trust.py [--runs 3] [--load 8] [--effort quick] [--layers 6] [--json FILE]

Tunes the phases of six local layers on one thread, each run with a database of its own, beside so many processes that
multiply matrices. Then every kernel that any run stored and ATen run in turn, many rounds, on the machine as it is
with that load gone: that is taken for the truth. A flip is a pair of runs that are both sure and store different
kernels; it costs nothing where the truth can't tell them apart. A wrong winner is sure, and slower than ATen beyond
noise. Regret is the stored kernel's time over the best one's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from convgen.kernels.config import parse_config
from convgen.spec.target import CPU
from convgen.tune.bench_cpu import ATEN, CpuBench
from convgen.tune.candidates import Candidate
from convgen.tune.intervals import of_ratios
from convgen.tune.key import problem_of
from convgen.tune.replay import module_of

# N, C, F, rows, K: of layers of ResNet-50 as one of 3 to 12 ranks has them.
LAYERS = ((8, 22, 128, 28, 1), (8, 64, 22, 28, 1), (8, 43, 43, 14, 3), (8, 52, 43, 14, 1), (4, 22, 64, 28, 3),
          (8, 37, 74, 7, 3))  # fmt: skip
TRUTH_ROUNDS = 60


def layer_file(folder: Path, number: int) -> Path:
    n, c, f, rows, k = LAYERS[number]
    file = folder / f"layer{number}.yaml"
    file.write_text(
        f"name: layer{number}\nlayer: conv2d\ninput: [{n}, {c}, {rows}, {rows}]\nout_channels: {f}\n"
        f"kernel_size: {k}\npadding: {k // 2}\ngrid: {{N: 1}}\nalgorithm: sample\n"
    )
    return file


def _multiply() -> None:
    torch.set_num_threads(1)
    a = torch.randn(700, 700)
    while os.getppid() != 1:
        torch.mm(a, a)


@contextmanager
def loaded(count: int) -> Generator[None]:
    """Beside so many processes that multiply."""
    others = [multiprocessing.get_context("spawn").Process(target=_multiply, daemon=True) for _ in range(count)]
    for one in others:
        one.start()
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.join()


def tuned(count: int, effort: str) -> list[dict[str, Any]]:
    """The records of one fresh run."""
    with tempfile.TemporaryDirectory() as name:
        files = [str(layer_file(Path(name), i)) for i in range(count)]
        command = [sys.executable, "-m", "convgen.cli", "tune", *files, "--threads", "1", "--effort", effort, "--json"]
        environment = os.environ | {"CONVGEN_CACHE": name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        return json.loads(done.stdout)


def truth(key: str, kernels: set[str]) -> dict[str, list[float]]:
    """Laps of these kernels and ATen in turn."""
    problem, bench = problem_of(key), CpuBench(1)
    text = module_of(problem, f"truth_{abs(hash(key))}")
    assert text is not None
    bench.open(problem, text, 11)
    given = [(k, Candidate(problem, parse_config(k), CPU).text) for k in sorted(kernels - {"aten"})]
    found = bench.race(given, TRUTH_ROUNDS, 12, 60.0)
    return {("aten" if label == ATEN else label): r["laps"] for label, r in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--effort", choices=("quick", "full"), default="quick")
    parser.add_argument("--layers", type=int, default=len(LAYERS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with loaded(given.load):
        runs = [tuned(given.layers, given.effort) for _ in range(given.runs)]
    busy = os.getloadavg()[0]
    flips = costly = pairs = sure = wrong = gains = doubted = 0
    regrets: list[float] = []
    rows: list[dict[str, Any]] = []
    for entries in zip(*runs, strict=True):
        key = entries[0]["problem"]
        laps = truth(key, {e["kernel"] for e in entries})
        median = {k: statistics.median(v) for k, v in laps.items()}
        for e in entries:
            regrets.append(median[e["kernel"]] / min(median.values()))
            gains += e["kernel"] != "aten"
            doubted += bool(e["doubt"])
            sure += not e["doubt"]
            wrong += not e["doubt"] and of_ratios(laps["aten"], laps[e["kernel"]]).high < 1
        for a, b in combinations([e for e in entries if not e["doubt"]], 2):
            pairs += 1
            if a["kernel"] != b["kernel"]:
                flips += 1
                apart = of_ratios(laps[a["kernel"]], laps[b["kernel"]])
                costly += not apart.low <= 1 <= apart.high
        shown = "; ".join(f"{e['kernel']}{' (in doubt)' if e['doubt'] else ''}" for e in entries)
        print(f"{key}\n    {shown}\n    " + ", ".join(f"{k} {v:.0f} us" for k, v in median.items()), flush=True)
        rows.append({"problem": key, "kernels": [e["kernel"] for e in entries], "median_us": median})
    total = sum(len(r) for r in runs)
    print(
        f"\n{total} entries of {given.runs} runs: {sure} sure, {doubted} in doubt; {gains} gains, {wrong} wrong winners"
    )
    print(f"{flips} flips in {pairs} pairs of sure entries, {costly} of them between kernels that differ in truth")
    print(f"regret: mean {statistics.geometric_mean(regrets):.3f}, worst {max(regrets):.3f}")
    print(f"{given.load} processes beside it; load {before:.1f} before, {busy:.1f} in the end, {os.cpu_count()} cores")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
