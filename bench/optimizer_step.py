"""Microseconds a parameter of AdamW's step: plain parameters, DTensors and Blocks, of small layers on one rank.

    python bench/optimizer_step.py [--layers 50] [--runs 30]

Medians of the processor's time on one thread, of the three interleaved: what torch does around the numbers, not the
numbers, of which a parameter has 144.
"""

from __future__ import annotations

import statistics
import time

import torch
from options import options

from convgen.compiler import compile_layer
from convgen.kernels.load import load_text
from convgen.spec.reader import layer_from_dict
from convgen.verify.virtual import VirtualTransport, World

LAYER = {
    "name": "step_layer", "layer": "conv2d", "input": [1, 4, 4, 4], "out_channels": 4, "kernel_size": 3,
    "padding": 1, "grid": {"N": 1, "C": 1}, "algorithm": "stationary-x",
}  # fmt: skip
STEPS = {"default": {}, "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def main() -> None:
    asked = options(__doc__, layers=50, runs=30)
    module = load_text(compile_layer(layer_from_dict(LAYER)).module())

    def program(end: VirtualTransport) -> None:
        torch.set_num_threads(1)
        mesh = module.init_mesh(transport=end)
        kinds = {
            "plain": lambda: torch.nn.Conv2d(4, 4, 3, bias=False),
            "DTensor": lambda: module.Conv(mesh),
            "Block": lambda: module.Conv(mesh, parameters="blocks"),
        }
        print(f"us a parameter   {'':8s}" + "".join(f"{kind:>10s}" for kind in kinds))
        for step, how in STEPS.items():
            optimizers: dict[str, torch.optim.Optimizer] = {}
            for kind, make in kinds.items():
                weights = [make().weight for _ in range(asked.layers)]
                for w in weights:
                    w.grad = torch.ones_like(w)
                optimizers[kind] = torch.optim.AdamW(weights, **how)
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for run in range(asked.runs + 3):
                for kind, optimizer in optimizers.items():
                    start = time.process_time()
                    optimizer.step()
                    times[kind] += [time.process_time() - start] if run > 2 else []
            row = [1e6 * statistics.median(of) / asked.layers for of in times.values()]
            print(f"AdamW {step:18s}" + "".join(f"{us:10.1f}" for us in row), flush=True)

    World(1).run(program)


if __name__ == "__main__":
    main()
