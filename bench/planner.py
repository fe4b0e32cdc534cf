"""How long planning takes and how much memory, and how far the longest-path heuristic of [SP] V-C is from the optimum.

    python bench/planner.py

Each case runs in a process of its own: seconds are those of its processor, starting Python included, MiB its peak.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def one(name: str, machine: str, samples: int, ranks: int) -> None:
    """Plan, and print what it took as JSON."""
    from convgen.cost.machines import load_machine
    from convgen.network_compiler import plan_graph
    from convgen.plan.parts import Room
    from convgen.plan.setting import Setting
    from convgen.spec.network_graph import network_graph
    from convgen.spec.network_reader import network_from_dict, read_network, with_batch

    if name.startswith("chain"):
        layer = {"name": "c", "kind": "conv", "out_channels": 256, "kernel_size": 3, "padding": 1}
        blocks = {"layer": [layer, {"kind": "relu"}]}
        nodes = [{"name": "l", "block": "layer", "repeat": 1000}]
        network = network_from_dict({"name": "chain", "input": [1, 256, 28, 28], "blocks": blocks, "nodes": nodes})
    else:
        network = read_network(ROOT / "examples" / "networks" / f"{name}.yaml")
    setting = Setting(machine=load_machine(machine), room=Room(keep="every"), statistics="local")
    _, plan = plan_graph(network_graph(with_batch(network, samples)), ranks, setting)
    heuristic_s = plan.heuristic() / 1e12 if plan.heuristic is not None else plan.seconds
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"seconds": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024, "step_ms": plan.seconds * 1e3}
    print(json.dumps(found | {"gap": heuristic_s / plan.seconds - 1}))


def main() -> None:
    columns = (f"{'network':<14}", f"{'machine':<7}", f"{'samples':>7}", f"{'ranks':>6}", f"{'seconds':>8}")
    print(*columns, f"{'MiB':>6}", f"{'ms a step':>10}", " heuristic")
    late: list[str] = []
    for name, machine, samples, ranks, allowed in CASES:
        call = [sys.executable, __file__, name, machine, str(samples), str(ranks)]
        done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(done.stdout)
        print(
            f"{name:<14} {machine:<7} {samples:>7} {ranks:>6} {found['seconds']:>8.2f} {found['mib']:>6.0f} "
            f"{found['step_ms']:>10.3f}  {100 * found['gap']:.2f} % more",
            flush=True,
        )
        if (allowed is not None and found["seconds"] > allowed) or found["mib"] > 2048:
            late.append(f"{name} on {ranks}")
    print(f"over its limit: {', '.join(late) or 'none'} (ResNet-50 with 512 samples 5 s, the chain 30 s, all 2 GiB)")
    sys.exit(bool(late))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
