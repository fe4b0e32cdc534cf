"""The papers' networks whole: packages that train exactly at reduced extents, and plans at the papers' scale.

    python bench/papers_networks.py [NETWORK...]

Each network of examples/networks is read at a few samples of small extents, compiled by letters and by price, and
checked on virtual ranks against one device in float64: outputs, gradients, buffers, three steps of training. Then the
extents of the file are planned on Lassen ([CF] 6: ResNet-50 and its wide variants; [SP] VI: the mesh models): modelled.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost
from convgen.errors import InputError
from convgen.network_compiler import compile_network, plan_graph, sample_parallelism
from convgen.plan.setting import Setting
from convgen.spec.graph import Graph
from convgen.spec.graph_edit import with_dtype
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict, read_network
from convgen.spec.text import parse_grid
from convgen.spec.yaml import read_yaml
from convgen.verify.network import check_network

ROOT = Path(__file__).resolve().parent.parent / "examples" / "networks"
# name: reduced input, and at the papers' scale (samples, ranks)
CASES = {
    "alexnet": ((4, 3, 67, 67), (256, 16)),
    "vgg16": ((4, 3, 32, 32), (128, 64)),
    "resnet50": ((4, 3, 64, 64), (32, 64)),
    "wrn50_2": ((4, 3, 33, 47), (32, 64)),
    "wrn50_4": ((4, 3, 33, 47), (8, 64)),
    "mesh1k": ((2, 18, 128, 128), (4, 16)),
    "mesh2k": ((2, 18, 128, 128), (4, 64)),
}
GRIDS = ("N=2,H=2", "H=2,W=2", "C=2,N=2", "plan")


def reduced(name: str) -> Graph:
    data = dict(read_yaml(ROOT / f"{name}.yaml").data)
    return network_graph(network_from_dict(data | {"input": list(CASES[name][0])}))


def main() -> None:
    lassen = load_machine("lassen")
    wrong = 0
    print(f"{'network':10} {'extents':18} {'grid':24} {'outputs':>9} {'gradients':>9} {'training':>9} {'seconds':>8}")
    for name in sys.argv[1:] or CASES:
        graph = with_dtype(reduced(name), "float64")
        for text in GRIDS:
            begun = time.perf_counter()
            try:
                if text == "plan":
                    compiled, _ = plan_graph(graph, 4, Setting(machine=lassen))
                else:
                    axes = tuple(parse_grid(text).items())
                    if axes[0][0] == "N" and graph.batch < axes[0][1]:
                        continue
                    compiled = compile_network(graph, Grid(axes))
                report = check_network(compiled, {})
            except InputError as error:
                print(f"{name:10} {'x'.join(map(str, CASES[name][0])):18} {text:24} refused: {error}")
                continue
            errors = {c.kind: c.error for c in report.compared}
            gradients = max(e for kind, e in errors.items() if "gradient" in kind)
            took = time.perf_counter() - begun
            wrong += not report.ok
            print(
                f"{name:10} {'x'.join(map(str, CASES[name][0])):18} {str(compiled.program.grid)[4:]:24} "
                f"{errors['outputs']:9.1e} {gradients:9.1e} {errors['change of parameters']:9.1e} {took:8.1f}"
                + ("" if report.ok else "  WRONG"),
                flush=True,
            )
    print(f"{wrong} wrong\n")
    print(f"{'network':10} {'samples':>7} {'ranks':>6} {'planned ms':>11} {'samples ms':>11} {'MiB a rank':>11}")
    for name in sys.argv[1:] or CASES:
        samples, ranks = CASES[name][1]
        graph = replace(network_graph(read_network(ROOT / f"{name}.yaml")), batch=samples)
        compiled, found = plan_graph(graph, ranks, Setting(machine=lassen))
        alone = sample_parallelism(compiled)
        beside = "can't be" if alone is None else f"{program_cost(alone, lassen, compiled.dtype).seconds * 1e3:.3f}"
        print(
            f"{name:10} {samples:7} {ranks:6} {found.seconds * 1e3:11.3f} {beside:>11} "
            f"{found.memory_bytes / (1 << 20):11.1f}",
            flush=True,
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
