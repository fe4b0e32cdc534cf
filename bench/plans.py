"""What plans of the papers' networks take, gain and look like.

    python bench/plans.py seconds                   # how long planning takes, and how far a heuristic is from it
    python bench/plans.py ranks [NETWORK...] [--machine lassen] [--most 4096] [--statistics global] [--overlapped]
    python bench/plans.py roles                     # what roles by phase and storage of w bring on 64 ranks of Lassen
    python bench/plans.py stages                    # by which indices stages of ResNets are split: [CF] 6.2's question

`seconds`: each case runs in a process of its own; seconds are those of its processor, starting Python included, MiB its
peak; exits with 1 where a case is over its limit. `ranks`: planned seconds over ranks, 1 to 4,096, which never rise;
exits with 1 where more ranks are planned slower than fewer; minutes a network. `roles`: `before` are plans in which
gradients have the roles of forward, and w is stored as these have it or split over all other axes, on the same grids.
`stages`: a layer counts in every column that some grid axis has as its role.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.errors import InputError
from convgen.network_compiler import network_parts, plan_graph
from convgen.plan.parts import Parts, Room
from convgen.plan.program.ranks import SCOUTED, grids_of
from convgen.plan.program.search import Effort, Search
from convgen.plan.program.tables import Question
from convgen.plan.setting import Setting
from convgen.spec.aten.describe import describe
from convgen.spec.network_graph import network_graph, read_network_graph
from convgen.spec.network_reader import network_from_dict, read_network, with_batch

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "networks"
NAMES = ("alexnet", "vgg16", "resnet50", "wrn50_2", "wrn50_4", "mesh1k", "mesh2k")
LASSEN, ROOM = load_machine("lassen"), Room(keep="every")


@click.group(help=__doc__.split("\n\n    ")[0], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


# ---- How long it takes ----

CASES = (
    # network, machine, samples, ranks, seconds allowed
    ("resnet50", "cuda", 512, 4096, 5.0),
    ("resnet50", "lassen", 512, 4096, None),
    ("resnet50", "lassen", 32, 256, None),
    ("wrn50_4", "lassen", 8, 64, None),
    ("vgg16", "lassen", 128, 64, None),
    ("alexnet", "lassen", 256, 64, None),
    ("mesh1k", "lassen", 4, 16, None),
    ("mesh2k", "lassen", 4, 64, None),
    ("chain of 1000", "cuda", 256, 1024, 30.0),
)


@main.command(hidden=True)
@click.argument("name")
@click.argument("machine")
@click.argument("samples", type=int)
@click.argument("ranks", type=int)
def one(name: str, machine: str, samples: int, ranks: int) -> None:
    """Plan, and print what it took as JSON."""
    if name.startswith("chain"):
        layer = {"name": "c", "kind": "conv", "out_channels": 256, "kernel_size": 3, "padding": 1}
        blocks = {"layer": [layer, {"kind": "relu"}]}
        nodes = [{"name": "l", "block": "layer", "repeat": 1000}]
        network = network_from_dict({"name": "chain", "input": [1, 256, 28, 28], "blocks": blocks, "nodes": nodes})
    else:
        network = read_network(FOLDER / f"{name}.yaml")
    setting = Setting(machine=load_machine(machine), room=ROOM, statistics="local")
    _, plan = plan_graph(network_graph(with_batch(network, samples)), ranks, setting)
    heuristic_s = plan.heuristic() / 1e12 if plan.heuristic is not None else plan.seconds
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"seconds": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024, "step_ms": plan.seconds * 1e3}
    print(json.dumps(found | {"gap": heuristic_s / plan.seconds - 1}))


@main.command()
def seconds() -> None:
    """How long planning takes and how much memory, and how far the longest-path heuristic of [SP] V-C is from it."""
    columns = (f"{'network':<14}", f"{'machine':<7}", f"{'samples':>7}", f"{'ranks':>6}", f"{'seconds':>8}")
    print(*columns, f"{'MiB':>6}", f"{'ms a step':>10}", " heuristic")
    late: list[str] = []
    for name, machine, samples, ranks, allowed in CASES:
        call = [sys.executable, __file__, "one", name, machine, str(samples), str(ranks)]
        found = json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
        print(
            f"{name:<14} {machine:<7} {samples:>7} {ranks:>6} {found['seconds']:>8.2f} {found['mib']:>6.0f} "
            f"{found['step_ms']:>10.3f}  {100 * found['gap']:.2f} % more",
            flush=True,
        )
        if (allowed is not None and found["seconds"] > allowed) or found["mib"] > 2048:
            late.append(f"{name} on {ranks}")
    print(f"over its limit: {', '.join(late) or 'none'} (ResNet-50 with 512 samples 5 s, the chain 30 s, all 2 GiB)")
    sys.exit(bool(late))


# ---- Over ranks ----


def rises(plan: Callable[[int], tuple[float, Grid]], most: int) -> Iterator[int]:
    """Ranks that are planned slower than half as many; prints each plan."""
    last = float("inf")
    for count in (2**i for i in range(most.bit_length())):
        began = time.process_time()
        try:
            found_s, grid = plan(count)
        except InputError as error:
            print(f"  {count:5}  {error.fact}", flush=True)
            continue
        took = time.process_time() - began
        print(f"  {count:5} {found_s * 1e3:10.3f} ms  {grid}, planned in {took:.1f} s", flush=True)
        if found_s > last * (1 + 1e-9):
            yield count
        last = found_s


@main.command()
@click.argument("networks", nargs=-1, type=click.Choice(NAMES))
@click.option("--machine", default="lassen")
@click.option("--most", default=4096)
@click.option("--statistics", default="local", help="Of batch norms.")
@click.option("--samples", type=int, help="Instead of the file's number.")
@click.option("--overlapped", is_flag=True, help="Steps with what travels meanwhile, not sums; these may rise.")
def ranks(
    networks: tuple[str, ...], machine: str, most: int, statistics: str, samples: int | None, *, overlapped: bool
) -> None:
    """Planned seconds over ranks."""
    found = list[str]()
    setting = Setting(machine=load_machine(machine), room=ROOM, statistics=statistics, by_step=overlapped)
    for name in networks or NAMES:
        print(name, flush=True)
        network = read_network(FOLDER / f"{name}.yaml")
        graph = network_graph(network if samples is None else with_batch(network, samples))

        def planned(count: int, graph: object = graph) -> tuple[float, Grid]:
            plan = plan_graph(graph, count, setting)[1]  # type: ignore[arg-type]
            return plan.step_s, plan.program.grid

        found += [f"{name} on {count} ranks" for count in rises(planned, most)]
    print("rises: " + (", ".join(found) or "none"))
    sys.exit(bool(found))


# ---- Roles by phase ----


class OneRole(Search):
    """Every phase of a row in the same roles."""

    def question(self, i: int) -> Question:
        found = super().question(i)
        return found if found.operation.signatures[0].reduction != "sum" else replace(found, gradients=())


def least(search: type[Search], parts: Parts, grid: Grid, effort: Effort) -> int:
    return search(parts, grid, LASSEN, "float32", effort, ROOM).run().time_ps


@main.command()
@click.argument("networks", nargs=-1, type=click.Choice(NAMES))
def roles(networks: tuple[str, ...]) -> None:
    """What plans gain from roles by phase and storage of w over any axes."""
    print(f"{'network':<10}{'before':>13}{'now':>13}{'less':>9}  grid")
    for name in networks or ("resnet50", "mesh2k", "vgg16", "wrn50_4"):
        graph = read_network_graph(FOLDER / f"{name}.yaml")
        parts = network_parts(graph, describe(graph.at(graph.batch)))
        grids = grids_of(64, LASSEN)[-SCOUTED:]
        now, grid = min((least(Search, parts, grid, Effort()), str(grid)) for grid in grids)
        before = min(least(OneRole, parts, grid, Effort(parameters=2)) for grid in grids)
        less = 100 * (1 - now / before)
        print(f"{name:<10}{before / 1e9:>10.3f} ms{now / 1e9:>10.3f} ms{less:>7.2f} %  {grid}", flush=True)


# ---- Stages ----

COLUMNS = {"samples": "N", "rows, columns": ("H", "W"), "channels, filters": ("C", "F")}


@main.command()
@click.option("--ranks", "counts", nargs=2, default=(256, 64), help="Of ResNet-50, and of WRN-50-4.")
def stages(counts: tuple[int, int]) -> None:
    """By which indices plans split each stage of ResNet-50 and WRN-50-4."""
    for hide_dw in (False, True):
        setting = Setting(machine=replace(LASSEN, hides_gradients=hide_dw), room=ROOM, statistics="local")
        for name, count in zip(("resnet50", "wrn50_4"), counts, strict=True):
            graph = read_network_graph(FOLDER / f"{name}.yaml")
            _, plan = plan_graph(graph, count, setting)
            found: dict[str, list[frozenset[str]]] = {}
            for row in plan.program.rows:
                if row.bound.operation.is_product:
                    stage = row.bound.module.split("_")[0]
                    stage = stage[:4] if stage.startswith("res") else stage
                    rows = (row, *(one for _, one in row.derived))
                    found.setdefault(stage, []).append(frozenset(index for one in rows for index, _ in one.roles))
            said = f"{graph.batch} samples on {count} ranks, reductions of gradients {'not ' * (not hide_dw)}hidden"
            print(f"{name}, {said}: {plan.program.grid}")
            print(f"  {'layers split by':<18}" + "".join(f"{column:>19}" for column in COLUMNS))
            for stage, layers in found.items():
                counted = [sum(bool(letters & set(wanted)) for letters in layers) for wanted in COLUMNS.values()]
                print(f"  {f'{stage} ({len(layers)})':<18}" + "".join(f"{n:>19}" for n in counted))


if __name__ == "__main__":
    main()
