"""A model with a generated layer under torch.compile with inductor: the same numbers, in one graph; seconds to compile.

    python bench/inductor.py

Two virtual ranks, one after the other asked to compile; each waits for g++ for 15 to 30 s. The tests compile with the
backends eager and aot_eager, which take the same graph.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from convgen.compiler import compile_layer
from convgen.kernels.load import load_text
from convgen.spec.reader import layer_from_dict
from convgen.verify.virtual import VirtualTransport, World

LAYER = {
    "name": "inductor_layer", "layer": "conv2d", "input": [4, 8, 14, 14], "out_channels": 8, "kernel_size": 3,
    "padding": 1, "bias": True, "grid": {"N": 1, "F": 2}, "algorithm": "stationary-y",
}  # fmt: skip


def main() -> None:
    layer = load_text(compile_layer(layer_from_dict(LAYER)).module())

    class Net(torch.nn.Module):
        def __init__(self, mesh: object) -> None:
            super().__init__()
            self.first, self.second = (layer.Conv(mesh, seed=i, parameters="blocks") for i in (1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)) + x).square().mean()

    def program(end: VirtualTransport) -> tuple[float, float]:
        mesh = layer.init_mesh(transport=end)
        net = Net(mesh)
        x = layer.scatter("x", torch.randn(4, 8, 14, 14, generator=torch.Generator().manual_seed(0)), mesh)
        net(x).backward()
        expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        start = time.perf_counter()
        torch.compile(net, backend="inductor", fullgraph=True)(x).backward()
        seconds = time.perf_counter() - start
        got = [p.grad for p in net.parameters() if p.grad is not None]
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, got, strict=True))
        return worst, seconds

    for rank, (worst, seconds) in enumerate(World(2).run(program)):
        print(f"rank {rank}: gradients within {worst:.1e} of eager, compiled in {seconds:.1f} s")
        if not worst < 1e-5:
            raise SystemExit("inductor's gradients differ")


if __name__ == "__main__":
    main()
