"""By which indices plans split each stage of ResNet-50 and WRN-50-4 on Lassen: [CF] 6.2's question.

    python bench/plan_stages.py

A layer counts in every column that some grid axis has as its role.
"""

from __future__ import annotations

from pathlib import Path

from convgen.cost.machines import load_machine
from convgen.plan.network.planner import plan_network
from convgen.plan.network.setting import Setting
from convgen.spec.network_reader import read_network
from convgen.spec.target import read_target

NETWORKS = Path(__file__).resolve().parent.parent / "examples" / "networks"
COLUMNS = {"samples": "N", "rows, columns": ("H", "W"), "channels, filters": ("C", "F")}


def stages(name: str, ranks: int, hide_dw: bool) -> None:
    network = read_network(NETWORKS / f"{name}.yaml")
    setting = Setting(machine=load_machine("lassen"), target=read_target("cuda"), hide_dw=hide_dw)
    plan = plan_network(network, setting, ranks)
    found: dict[str, list[frozenset[str]]] = {}
    for node in plan.nodes:
        if node.option is not None:
            stage = node.node.name.split("_")[0]
            stage = stage[:4] if stage.startswith("res") else stage
            found.setdefault(stage, []).append(node.option.letters)
    hidden = "hidden" if hide_dw else "not hidden"
    print(f"{name}, {network.batch} samples on {ranks} ranks, reductions of gradients {hidden}: {plan.grid}")
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
