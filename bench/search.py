"""Does the search earn its keep? The corrected ranking against the ranking and chance, all configurations measured.

    python bench/search.py                     # replays the landscapes of bench/landscapes/
    python bench/search.py --record FILE [--minutes 9]      # measures one on this machine's CPU, one thread; goes on
    python bench/search.py --record FILE --held-out         # of other layers, on which nothing of the model was decided

A landscape has the time of every legal configuration of some problems. The search asks for a tenth of them, and is told
what was recorded; so is chance, and so is the ranking alone. What counts is the best that each found over the best that
there is. The last two columns ask for what where the model is wrong: its times are multiplied by a power of each
parameter, drawn at random, which is what measurements can correct and a ranking can't.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from convgen.kernels.choose import describe
from convgen.kernels.config import Config, parse_config
from convgen.kernels.problem import LocalDim, Problem
from convgen.spec.target import CPU, Target, read_target
from convgen.tune.bench_cpu import ATEN
from convgen.tune.candidates import candidates, digest, ranked
from convgen.tune.database import Ceilings, replace_text
from convgen.tune.key import key_of, problem_of
from convgen.tune.search import Ranked, Search

FOLDER = Path(__file__).resolve().parent / "landscapes"
SEEDS, DRAWS, SHARE, GOAL = 10, 400, 10, 1.03
LAPS, SLOW = 3, 3.0
OFF = 0.3  # of a parameter's logarithm, that a wrong model is off by
Times = Mapping[Config, float]


# C F H=W K N of layers of ResNet-50 as one of 3 to 12 ranks has them: channels that are no multiples of anything.
SHAPES = ((22, 64, 28, 3, 4), (43, 43, 14, 3, 8), (52, 43, 14, 1, 16))
HELD_OUT = ((32, 26, 28, 3, 4), (64, 22, 28, 1, 8), (37, 74, 7, 3, 8))


def problems(shapes: tuple[tuple[int, ...], ...]) -> list[Problem]:
    """All phases of these shapes."""
    found: list[Problem] = []
    for phase in ("forward", "backward_data", "backward_filter"):
        for channels, filters, rows, kernel, batch in shapes:
            found += [
                Problem(
                    phase=phase,
                    batch=batch,
                    channels=channels,
                    filters=filters,
                    dims=tuple(LocalDim(n, rows, rows, kernel, 1, 1, kernel // 2) for n in "HW"),
                    dtype="float32",
                    memory_format="contiguous",
                )
            ]
    return found


# ---- Recording -----------------------------------------------------------------------------------------------------


def record(file: Path, shapes: tuple[tuple[int, ...], ...], minutes: float, console: Console) -> None:
    """Time every legal configuration of every problem that the file lacks; the least of some laps, which another load
    does not move."""
    from convgen.tune.bench_cpu import CpuBench
    from convgen.tune.device import this_cpu, versions
    from convgen.tune.replay import module_of

    end, bench = time.monotonic() + 60 * minutes, CpuBench(1)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if not lines:
        ceilings = bench.ceilings(("float32",))
        lines.append(
            json.dumps({"device": this_cpu(1).name, "target": "cpu", "versions": versions(CPU), "ceilings": ceilings})
        )
    there = {json.loads(line)["problem"] for line in lines[1:]}
    left = [p for p in problems(shapes) if key_of(p) not in there]
    while left and time.monotonic() < end:
        p = left.pop(0)
        text = module_of(p, f"untuned_{digest(key_of(p))}")
        assert text is not None
        times = {"aten": float(f"{bench.open(p, text, 0)['aten_us'][ATEN]:.5g}")}
        for c in candidates(p, CPU):
            if c.label != "aten":
                found = [bench.attempt(c.label, c.text, SLOW * min(times.values())) for _ in range(LAPS)]
                times[c.label] = float(f"{min(one['us'] for one in found):.5g}")
        lines.append(json.dumps({"problem": key_of(p), "us": times}))
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, "\n".join(lines) + "\n")
        best = min(times, key=lambda t: times[t])
        console.print(
            f"{key_of(p)}: {len(times)} configurations, {best} {times[best]:.0f} us, ATen {times['aten']:.0f} us"
        )
    console.print(f"{len(left)} problems left{'; the same command goes on' if left else ''}")


def read(file: Path) -> tuple[dict[str, Any], list[tuple[Problem, Times]]]:
    """A landscape's head, and its problems with the times of their configurations."""
    head, *rest = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return head, [(problem_of(one["problem"]), {parse_config(c): us for c, us in one["us"].items()}) for one in rest]


# ---- Strategies: all get as many measurements ----------------------------------------------------------------------


def run(search: Search, times: Times) -> float:
    """The best time that a search finds."""
    while batch := search.ask():
        for config in batch:
            search.tell(config, times[config])
    return search.best()[0][0]


def chance(times: Times, limit: int) -> float:
    """What as many configurations drawn at random have as their best, on average."""
    rng, values = random.Random(0), list(times.values())
    return statistics.mean(min(rng.sample(values, limit)) for _ in range(DRAWS))


def wrong(order: Ranked, seed: int) -> Ranked:
    """The same configurations by a model that is off by a power of each parameter."""
    rng = random.Random(seed)
    names = sorted({n for c in order.configs for n in c.as_dict()})
    off = {n: rng.gauss(0, OFF) for n in names}
    us = {
        c: t * math.prod((v + 1) ** off[n] for n, v in c.as_dict().items())
        for c, t in zip(order.configs, order.modelled_us, strict=True)
    }
    configs = sorted(us, key=lambda c: us[c])
    return Ranked(tuple(configs), tuple(us[c] for c in configs))


def ranking_of(p: Problem, times: Times, target: Target, ceilings: Ceilings) -> Ranked:
    order = [(us, c.config) for us, c in ranked(candidates(p, target), ceilings) if c.config in times]
    return Ranked(tuple(c for _, c in order), tuple(us for us, _ in order))


def strategies(order: Ranked, times: Times, limit: int) -> dict[str, list[float]]:
    """Best times over the exhaustive best, a seed each."""
    best = min(times.values())
    made: dict[str, Callable[[int], float]] = {
        "corrected": lambda seed: run(Search(order, limit), times),
        "ranking alone": lambda seed: alone(order, times, limit),
        "chance": lambda seed: chance(times, limit),
        "model off: corrected": lambda seed: run(Search(wrong(order, seed), limit), times),
        "model off: ranking": lambda seed: alone(wrong(order, seed), times, limit),
    }
    return {n: [f(seed) / best for seed in range(SEEDS if "off" in n else 1)] for n, f in made.items()}


def alone(order: Ranked, times: Times, limit: int) -> float:
    """The best of the first so many."""
    return min(times[c] for c in order.configs[:limit])


def replay(file: Path, console: Console, *, markdown: bool = False) -> list[dict[str, float]]:
    """Print a landscape's table; ratios of the strategies, a problem each."""
    head, landscape = read(file)
    target, ceilings = read_target(head["target"]).known(), Ceilings(**head["ceilings"])
    table = Table(
        title=f"{file.name}: {head['device']}, {head['versions']}; best found / best there is", title_justify="left",
        box=box.MARKDOWN if markdown else box.SIMPLE_HEAD,
    )  # fmt: skip
    names = ("corrected", "ranking alone", "chance", "model off: corrected", "model off: ranking")
    for column in ("problem", "configurations", "measured", "ATen", *names):
        table.add_column(column, justify="left" if column == "problem" else "right")
    rows: list[dict[str, float]] = []
    for p, times in landscape:
        limit = math.ceil(len(times) / SHARE)
        found = strategies(ranking_of(p, times, target, ceilings), times, limit)
        row = {n: statistics.geometric_mean(v) for n, v in found.items()}
        rows.append(row)
        plain = next(us for c, us in times.items() if c.family == "aten") / min(times.values())
        cells = [f"{row[n]:.3f}" for n in names]
        table.add_row(f"{p.phase}: {describe(p)}", str(len(times)), str(limit), f"{plain:.2f}", *cells)
    if not markdown:
        table.add_section()
    table.add_row("geometric mean", "", "", "", *(f"{mean(rows, n):.3f}" for n in names))
    table.add_row("worst", "", "", "", *(f"{max(r[n] for r in rows):.3f}" for n in names))
    within = {n: sum(r[n] <= GOAL for r in rows) for n in names}
    table.add_row(f"within {GOAL - 1:.0%}", "", "", "", *(f"{within[n]} of {len(rows)}" for n in names))
    console.print(table)
    return rows


def mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    return statistics.geometric_mean(r[name] for r in rows)


@click.command(help=(__doc__ or "").split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--record", "recorded", type=click.Path(path_type=Path), metavar="FILE", help="Measure a landscape.")
@click.option("--held-out", is_flag=True, help="With --record: of the layers that the model was not made on.")
@click.option("--minutes", default=9.0, help="Of --record.")
@click.option("--markdown", is_flag=True, help="Tables for docs/studies/search.md.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
def main(recorded: Path | None, held_out: bool, minutes: float, markdown: bool, files: tuple[Path, ...]) -> None:
    console = Console(width=200, markup=False, highlight=False)
    if recorded is not None:
        record(recorded, HELD_OUT if held_out else SHAPES, minutes, console)
        return
    for file in files or sorted(FOLDER.glob("*.jsonl")):
        replay(file, console, markdown=markdown)


if __name__ == "__main__":
    main()
