"""Train through a generated module: 20 steps of SGD towards a teacher of the same shape.

    convgen compile examples/res5a_branch2b.yaml -o build
    torchrun --nproc-per-node 4 examples/train.py [build/res5a_branch2b.py [checkpoint]]

Any layer file for the cpu works, on as many processes as its grid has ranks. No gradient needs averaging: where
ranks hold copies of the weights, the module hands every copy the same, whole gradient. The checkpoint, a folder, can be
read on any number of ranks, and by one device's torch.nn layer.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

STEPS = 20


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "build/res5a_branch2b.py")
    if not path.is_file():
        sys.exit(f"no {path}; make it by: convgen compile examples/{path.stem}.yaml -o {path.parent}")
    sys.path.insert(0, str(path.parent))
    layer = importlib.import_module(path.stem)

    dist.init_process_group("gloo")
    mesh = layer.init_mesh("cpu")
    student, teacher = layer.Conv(mesh, seed=0), layer.Conv(mesh, seed=1)

    # Every rank draws the same whole x and keeps its block of it. Nobody holds the whole target.
    x_global = torch.randn(layer.SPEC["input"], generator=torch.Generator().manual_seed(2))
    x = layer.scatter("x", x_global, mesh)
    with torch.no_grad():
        target = teacher(x)
    elements = layer.gather("y", target, mesh).numel()

    # The mean over all F filters makes a filter's gradient F times smaller than its own loss would.
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1 * layer.SPEC["out_channels"])
    for step in range(STEPS):
        optimizer.zero_grad()
        error = student(x) - target
        loss = error.square().sum() / elements  # this rank's part of the mean over the whole y
        loss.backward()
        layer.clip_grad_norm_(student.parameters(), 1.0)  # of the whole gradient
        optimizer.step()
        whole = layer.gather("y", error, mesh)  # a collective: every rank calls it
        if dist.get_rank() == 0:
            print(f"step {step + 1:2d}  loss {whole.square().mean().item():.6f}", flush=True)
    if len(sys.argv) > 2:
        dcp.save({"model": student.state_dict()}, checkpoint_id=sys.argv[2])

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
