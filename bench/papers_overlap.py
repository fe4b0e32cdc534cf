"""The published times of [SP] Tables I to III and [CF] Table 1 beside whole networks' steps, overlap simulated.

    python bench/papers_overlap.py [sp1 sp2 sp3 cf] [--rows 1]

bench/papers.py models convolutions one by one and hides by a rule. Here the networks of examples/networks are whole
programs on Lassen, with the grids of the papers, and a step is simulated (cost/timeline.py): with every collective
waited for at once, and with what the timeline takes (buckets, halos behind interiors, chunks). Batch norms have a
rank's own statistics. Nothing is fitted. Of each table so many rows as are asked for: more samples are more ranks.
[CF]'s ways in channels and filters are those of every layer but the first two blocks, where rows are split: the
layout by price (algorithm auto) on the paper's grid stands for them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from papers import EPOCHS, IMAGES, ROWS, TITLE, rows_of

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.timeline import simulate
from convgen.network_compiler import compile_network
from convgen.spec.graph import Graph
from convgen.spec.network_graph import read_network_graph

ROOT = Path(__file__).resolve().parent.parent / "examples" / "networks"
NETWORKS = {"sp1": ("mesh1k", 1), "sp2": ("mesh2k", 1), "sp3": ("resnet50", 32)}


def published(name: str, rows: int) -> Iterator[tuple[str, int, int, int, str, float]]:
    """Of a table's first rows: network, samples, groups, GPUs a group, how, seconds."""
    for i, row in enumerate(rows_of(f"{name[:2]}_table{name[2:] or 1}")):
        if i >= rows:
            return
        batch = int(row["N"])
        if name == "cf":
            samples, ways, steps = int(row["samples"]), int(row["ways"]), IMAGES / batch * EPOCHS
            for how, minutes in ((1, "sample"), (ways, "minutes")):
                text = "sample" if how == 1 else row["algorithm"]
                yield row["network"], batch, batch // samples, how, text, float(row[minutes]) * 60 / steps
            continue
        network, samples = NETWORKS[name]
        for ways, seconds in row.items():
            if ways != "N" and seconds:
                yield network, batch, batch // samples, int(ways), "spatial", float(seconds)


def simulated(graph: Graph, grid: Grid, how: str, machine: Machine) -> tuple[float, float, float]:
    """Seconds of a step with nothing hidden, and with what the timeline takes; the share of moving that is hidden."""
    algorithm = "auto" if "x/y" in how or "w" in how.split() else None
    compiled = compile_network(graph, grid, algorithm, machine=machine, statistics="local")
    plain = simulate(compiled.plain, machine, "float32", alike=True)
    found = simulate(compiled.program, machine, "float32", alike=True)
    return plain.end_s, found.end_s, found.hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=("sp1", "sp2", "sp3", "cf", []), default=["sp1", "sp2", "sp3"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--timed", action="store_true", help="and the seconds that modelling takes")
    options = parser.parse_args()
    for name in options.tables:
        machine = load_machine("lassen")
        chosen = "ring" if name == "cf" else "rabenseifner"
        machine = replace(machine, collectives=replace(machine.collectives, all_reduce=chosen))
        print(TITLE[name])
        heads = ("published", "plain", "overlapped", "hidden", "speedup", "plain", "overlapped")
        print(f"  {'':16}{'GPUs a group':20}" + "".join(f"{h:>11}" for h in heads))
        first: dict[str, tuple[float, float, float]] = {}
        for network, batch, groups, ways, how, seconds in published(name, options.rows):
            began = time.perf_counter()
            graph = replace(read_network_graph(ROOT / f"{network}.yaml"), batch=batch)
            inner = ROWS[ways] if "w" not in how.split() else {"H": 2, "W": 4}
            grid = Grid((("N", groups), *inner.items()))
            plain, overlap, hidden = simulated(graph, grid, how, machine)
            base = first.setdefault(f"{network} {batch}", (seconds, plain, overlap))
            line = f"  {f'{network} N={batch}':16}{f'{ways} {how}':20}"
            line += f"{seconds:11.4f}{plain:11.4f}{overlap:11.4f}{hidden:11.1%}"
            line += "".join(f"{b / s:11.2f}" for b, s in zip(base, (seconds, plain, overlap), strict=True))
            print(line + f"{time.perf_counter() - began:9.0f} s" * options.timed, flush=True)


if __name__ == "__main__":
    main()
