"""Replay: what of convgen's output differs between a commit and this tree; a refactoring's difference is empty.

    python bench/replay.py --base COMMIT [--emit schedule|module|cost] [--random 300] [--show 3] [--jobs 2]

The corpus is made here and compiled by both: every layer of examples/; every layer of tuning/layers on several grids
by each algorithm, grids with axes of one rank among them; random layers of tests/generate.py with any storage and any
roles; networks of examples/, of which the bytes of each step are compared. Refusals are outputs too. The base is
checked out into a temporary worktree. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from difflib import unified_diff
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Grids and algorithms of each table; the last axis of some has one rank.
TABLES = (
    ("sample", "N=4"), ("sample", "N=4,idle=1"), ("spatial", "N=2,H=2"), ("spatial", "N=1,H=2,W=2"),
    ("stationary-x", "N=2,C=2"), ("stationary-x", "H=2,C=4"), ("stationary-y", "N=2,F=2"), ("stationary-y", "F=3,W=2"),
    ("stationary-w", "C=2,F=2"), ("stationary-w", "N=2,C=2,F=1"), ("integrated", "N=2,F=2,H=1"), ("auto", "a=2,b=2"),
    ("auto", "a=2,b=1,c=3"),
)  # fmt: skip
NETWORK_GRIDS = (
    "N=2", "H=2", "C=2", "N=2,H=2", "H=2,W=2", "C=2,F=2", "N=2,C=2", "H=3", "N=4", "W=2", "C=2,H=2", "H=4", "C=3",
    "N=2,C=2,H=2", "N=2,H=2,W=2",
)  # fmt: skip
TARGETS = ("cpu", "cuda:sm_90", "sw26010")

Case = tuple[str, list[str]]  # a file of the corpus, and the options that it is compiled with


def corpus(folder: Path, count: int) -> list[Case]:
    """Write the layers' files; the cases that are made of them."""
    return [*_examples(), *_tables(folder), *_random(folder, count), *networks()]


def networks() -> Iterator[Case]:
    """Bytes of each step of networks on several grids."""
    for path in sorted((ROOT / "examples" / "networks").rglob("*.yaml")):
        for grid in NETWORK_GRIDS:
            yield str(path), ["--grid", grid, "--emit", "cost", "--json"]


def _examples() -> Iterator[Case]:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        for target in TARGETS:
            yield str(path), ["--target", target]


def _tables(folder: Path) -> Iterator[Case]:
    """A table a layer, so that one refusal hides no other; a shape that several layers have once."""
    seen = set[str]()
    for path in sorted((ROOT / "tuning" / "layers").glob("*.csv")):
        head, *rows = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for row in rows:
            name, _, shape = row.partition(",")
            if shape in seen:
                continue
            seen.add(shape)
            one = folder / f"{path.stem}_{name}.csv"
            one.write_text(f"{head}\n{row}\n")
            for place, (algorithm, grid) in enumerate(TABLES):
                target = TARGETS[(len(seen) + place) % 2]
                yield str(one), ["--algorithm", algorithm, "--grid", grid, "--target", target]


def _random(folder: Path, count: int) -> Iterator[Case]:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from generate import random_problem

    for seed in range(count):
        rng = random.Random(f"replay {seed}")
        conv, grid, stored, roles = random_problem(rng, 12)
        spatial = conv.spatial
        data = {
            "name": f"random_{seed}",
            "layer": f"conv{len(spatial)}d",
            "input": [conv.batch, conv.channels, *(s.extent for s in spatial)],
            "out_channels": conv.filters,
            "kernel_size": [s.kernel for s in spatial],
            "stride": [s.stride for s in spatial],
            "padding": [[s.pad_lo, s.pad_hi] for s in spatial],
            "dilation": [s.dilation for s in spatial],
            "groups": conv.groups,
            "bias": conv.bias,
            "grid": dict(grid.axes),
            "distribution": {t: [list(axes) or "*" for axes in stored[t].axes] for t in ("x", "w", "y")},
            "roles": {p: {a: role for role, axes in r.nests for a in axes} for p, r in roles.items()},
            "target": rng.choice(TARGETS[:2]),
            "options": {"hold_x": rng.choice(("gathered", "stored"))},
        }
        path = folder / f"random_{seed}.yaml"
        path.write_text(json.dumps(data))
        yield str(path), []


def compile_all(cases: Sequence[Case], emit: str) -> list[str]:
    """What the convgen on the path says to each case, in this process."""
    from convgen.commands.main import main

    said: list[str] = []
    for file, options in cases:
        out, err = StringIO(), StringIO()
        sys.argv = ["convgen", "compile", file, *options, *([] if "--emit" in options else ["--emit", emit])]
        sys.argv += ["--untuned"] if emit == "module" else []
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code
            else:
                code = 0
        said.append(out.getvalue() + (f"exit code {code}\n{err.getvalue()}" if code else ""))
    return said


def replayed(tree: Path, cases: Sequence[Case], emit: str, jobs: int, folder: Path) -> list[str]:
    """The same by another tree's convgen, in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for part in range(jobs):
        todo, done = folder / f"{tree.name}_{part}.json", folder / f"{tree.name}_{part}_said.json"
        todo.write_text(json.dumps(cases[part::jobs]))
        command = [sys.executable, __file__, "--replay", str(todo), str(done), "--emit", emit]
        running.append((subprocess.Popen(command, cwd=folder, env=environment), done))
    said = [""] * len(cases)
    for part, (process, done) in enumerate(running):
        if process.wait():
            raise SystemExit(f"replaying in {tree} ended with exit code {process.returncode}")
        said[part::jobs] = json.loads(done.read_text())
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="a commit; HEAD by default, so what is not committed is seen")
    parser.add_argument("--emit", choices=("schedule", "module", "cost"), default="schedule")
    parser.add_argument("--random", type=int, default=300, help="random layers")
    parser.add_argument("--show", type=int, default=3, help="differences that are printed")
    parser.add_argument("--networks", action="store_true", help="networks alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--replay", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replay:
        cases, done = map(Path, given.replay)
        done.write_text(json.dumps(compile_all(json.loads(cases.read_text()), given.emit)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, base = Path(name), Path(name) / "base"
        cases = [*networks()] if given.networks else corpus(folder, given.random)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(base), given.base], cwd=ROOT, check=True)
        try:
            before, after = (replayed(tree, cases, given.emit, given.jobs, folder) for tree in (base, ROOT))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(base)], cwd=ROOT, check=True)
    different = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    for i in different[: given.show]:
        file, options = cases[i]
        print(f"{Path(file).name} {' '.join(options)}")
        print("\n".join(unified_diff(before[i].splitlines(), after[i].splitlines(), "base", "here", lineterm="", n=1)))
    refused = sum("exit code" in said for said in after)
    print(f"{len(cases)} cases, {refused} of them refused: {len(different)} differ from {given.base}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
