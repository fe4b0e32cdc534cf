"""By which indices plans split each stage of ResNet-50 and WRN-50-4 on Lassen: [CF] 6.2's question.

    python bench/plan_stages.py

A layer counts in every column that some grid axis has as its role.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from convgen.cost.machines import load_machine
from convgen.network_compiler import plan_graph
from convgen.plan.parts import Room
from convgen.plan.program.candidates import is_product
from convgen.plan.setting import Setting
from convgen.spec.network_graph import read_network_graph

NETWORKS = Path(__file__).resolve().parent.parent / "examples" / "networks"
COLUMNS = {"samples": "N", "rows, columns": ("H", "W"), "channels, filters": ("C", "F")}


def stages(name: str, ranks: int, hide_dw: bool) -> None:
    graph, lassen = read_network_graph(NETWORKS / f"{name}.yaml"), load_machine("lassen")
    machine = replace(lassen, hides_gradients=hide_dw)
    _, plan = plan_graph(graph, ranks, Setting(machine=machine, room=Room(keep="every"), statistics="local"))
    found: dict[str, list[frozenset[str]]] = {}
    for row in plan.program.rows:
        if is_product(row.bound.operation):
            stage = row.bound.module.split("_")[0]
            stage = stage[:4] if stage.startswith("res") else stage
            rows = (row, *(one for _, one in row.derived))
            found.setdefault(stage, []).append(frozenset(index for one in rows for index, _ in one.roles))
    hidden = "hidden" if hide_dw else "not hidden"
    print(f"{name}, {graph.batch} samples on {ranks} ranks, reductions of gradients {hidden}: {plan.program.grid}")
    print(f"  {'layers split by':<18}" + "".join(f"{column:>19}" for column in COLUMNS))
    for stage, layers in found.items():
        counts = [sum(bool(letters & set(wanted)) for letters in layers) for wanted in COLUMNS.values()]
        print(f"  {f'{stage} ({len(layers)})':<18}" + "".join(f"{count:>19}" for count in counts))


def main() -> None:
    for hide_dw in (False, True):
        stages("resnet50", 256, hide_dw)
        stages("wrn50_4", 64, hide_dw)


if __name__ == "__main__":
    main()
