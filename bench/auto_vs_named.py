"""`algorithm: auto` against the named algorithms: modelled seconds of every layer in tuning/layers on several grids.

    python bench/auto_vs_named.py             # checks, and prints the tables
    python bench/auto_vs_named.py --write     # puts them into docs/studies/auto.md

Every named algorithm is tried under every assignment of its letters to the grid's axes, those that leave ranks
empty too. Fails if one of them is modelled faster than auto on any layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from options import options

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from named_layouts import named_layouts  # isort: skip

from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.cost.layer_price import LayerPrice
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import PICOSECONDS
from convgen.cost.schedule import schedule_cost
from convgen.passes.contract import Context
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.share import Share
from convgen.plan.layer_search import FoundLayout, LayerSearch
from convgen.program.build import lower
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import CPU

GRIDS = [{"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 4}]
MACHINES = ("cpu", "cuda")
DOCS = Path(__file__).resolve().parent.parent / "docs" / "studies" / "auto.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


@dataclass(frozen=True)
class Plan:
    """Layouts and roles, picoseconds and the bytes that a rank sends."""

    stored: Mapping[str, Layout]
    roles: Mapping[str, Roles]
    cost: tuple[int, int]


@dataclass(frozen=True)
class Result:
    """Auto's plan and the best named one, with its name."""

    auto: Plan
    named: Plan
    name: str


@cache
def compare(conv: Conv, grid: Grid, machine: Machine) -> Result:
    space = Space(conv, grid)
    price, context = LayerPrice(space, machine, "float32"), Context(space, CPU)

    def plan(found: FoundLayout) -> Plan:
        schedule = lower("layer", space, found.stored, found.roles, bias=conv.bias)
        cost = schedule_cost(Share().run(FuseBias().run(schedule, context), context), price.model)
        assert cost.total().time_ps == found.price
        return Plan(found.stored, found.roles, (found.price, cost.total().sent_bytes))

    named = [
        (LayerSearch(price, True, {t: one.axes for t, one in stored.items()}, roles).found(), name)
        for name, stored, roles in named_layouts(conv, grid)
    ]
    best, name = min(named, key=lambda one: one[0].price)
    return Result(plan(LayerSearch(price, True, {}, {}).found()), plan(best), name)


def layers(network: str, grid: dict[str, int]) -> list[tuple[str, Conv]]:
    return [(one.name, one.conv) for one in read_csv(data_file("tuning", "layers", f"{network}.csv"), grid=grid)]


def digest(networks: list[str]) -> tuple[list[str], int]:
    """A row per network, machine and grid; and on how many layers a named algorithm was faster."""
    rows = [
        "| network | machine | grid | layers | best named, ms | auto, ms | ratio | best layer | layers won "
        "| named, MB | auto, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lost = 0
    for network in networks:
        for machine in MACHINES:
            for sizes in GRIDS:
                grid = Grid(tuple(sizes.items()))
                found = [compare(conv, grid, load_machine(machine)) for _, conv in layers(network, sizes)]
                auto, named = sum(r.auto.cost[0] for r in found), sum(r.named.cost[0] for r in found)
                sent, named_sent = sum(r.auto.cost[1] for r in found), sum(r.named.cost[1] for r in found)
                lost += sum(r.auto.cost[0] > r.named.cost[0] for r in found)
                won = sum(r.auto.cost[0] < r.named.cost[0] for r in found)
                best = max(r.named.cost[0] / r.auto.cost[0] for r in found)
                rows.append(
                    f"| {network} | {machine} | {grid} | {len(found)} | {named / PICOSECONDS * 1e3:.3f} "
                    f"| {auto / PICOSECONDS * 1e3:.3f} | {named / auto:.3f} | {best:.3f} | {won} "
                    f"| {named_sent / 1e6:.2f} | {sent / 1e6:.2f} |"
                )
                print(rows[-1], flush=True)
    return rows, lost


def by_layer(network: str, sizes: dict[str, int], machine: str) -> list[str]:
    """A row per distinct layer: seconds, bytes, storage and roles of the best named algorithm and of auto."""
    grid = Grid(tuple(sizes.items()))
    count = Counter(conv for _, conv in layers(network, sizes))
    rows = [
        f"### {network}, {machine}, {grid}",
        "",
        "| layer | alike | best named | ms | MB | auto: x w y | roles | ms | MB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    seen: set[Conv] = set()
    for name, conv in layers(network, sizes):
        if conv in seen:
            continue
        seen.add(conv)
        r = compare(conv, grid, load_machine(machine))
        roles = [str(r.auto.roles[phase]) for phase in PHASES]
        told = roles[0] if len(set(roles)) == 1 else "; ".join(roles)
        stored = " ".join(str(layout) for layout in r.auto.stored.values())
        rows.append(
            f"| {name} | {count[conv]} | {r.name} {r.named.roles['forward']} | {_ms(r.named)} | {_mb(r.named)} "
            f"| `{stored}` | {told} | {_ms(r.auto)} | {_mb(r.auto)} | {r.named.cost[0] / r.auto.cost[0]:.3f} |"
        )
    return rows


def _ms(plan: Plan) -> str:
    return f"{plan.cost[0] / PICOSECONDS * 1e3:.3f}"


def _mb(plan: Plan) -> str:
    return f"{plan.cost[1] / 1e6:.3f}"


def main() -> None:
    write = options(__doc__, write=(False, "put the tables into docs/studies/auto.md")).write
    networks = sorted(path.stem for path in data_file("tuning", "layers").glob("*.csv"))
    rows, lost = digest(networks)
    tables = [*rows, "", "## Layer by layer", ""]
    for network, machine in (("resnet50", "cpu"), ("resnet50", "cuda"), ("vgg16", "cuda"), ("mesh2k_assumed", "cpu")):
        tables += [*by_layer(network, {"a": 2, "b": 2}, machine), ""]
    if write:
        head, rest = DOCS.read_text().split(BEGIN)
        DOCS.write_text("\n".join([head + BEGIN, "", *tables, END]) + rest.split(END)[1])
    else:
        print("\n".join(tables[len(rows) :]))
    print(f"layers on which a named algorithm is modelled faster: {lost}")
    raise SystemExit(lost > 0)


if __name__ == "__main__":
    main()
