"""Tensors that don't begin at 16 bytes, as views of larger ones may not, reach no kernel that takes them to."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from convgen.compiler import compile_layer
from convgen.spec.reader import layer_from_dict
from convgen.verify.check import tolerance
from convgen.verify.interpreter import launch
from convgen.verify.program import forget_module, global_tensors, load_module, reference
from convgen.verify.virtual import VirtualTransport, World

LAYER = {
    "layer": "conv2d", "input": [2, 8, 9, 8], "out_channels": 16, "kernel_size": 3, "padding": 1, "bias": True,
    "dtype": "bfloat16", "memory_format": "channels_last", "target": "cuda:sm_90",
}  # fmt: skip
BOX = "box TN=1 TH=8 TW=8 {}=16 {}=16 warps=4 stages=3"
POINTER = "pointer BP=64 {}=16 {}=16 warps=4 stages=3"
LAYERS: dict[str, dict[str, Any]] = {
    "boxes": {
        "grid": {"N": 2},
        "algorithm": "sample",
        "options": {"kernels": {"forward": BOX.format("BF", "BC"), "backward_data": BOX.format("BC", "BF")}},
    },
    "halos": {
        "grid": {"H": 2},
        "algorithm": "spatial",
        "options": {"kernels": {"forward": POINTER.format("BF", "BC"), "backward_data": POINTER.format("BC", "BF")}},
    },
}


def at_an_odd_place(tensor: Tensor) -> Tensor:
    """The same, strides included, one element behind the beginning of an allocation."""
    larger = tensor.new_empty(tensor.numel() + 1)
    return larger.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


@pytest.mark.parametrize("kind", LAYERS)
def test_kernels_get_what_begins_at_16_bytes(kind: str) -> None:
    compiled = compile_layer(layer_from_dict({**LAYER, **LAYERS[kind], "name": f"odd_{kind}"}))
    given = global_tensors(compiled.layer)
    truth = reference(compiled.layer.conv, given)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"odd_{kind}.py"
        path.write_text(compiled.module(), encoding="utf-8")
        layer = load_module(path, interpret=True)

    def watched(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        boxes = [a.base for a in args if hasattr(a, "base")]
        rims = args[:1] if "rim" in kernel.arg_names else ()  # forward's x, backward_data's dy
        rims += (args[kernel.arg_names.index("rim")],) if rims else ()
        if "rim" in kernel.arg_names and name.startswith("backward_filter"):
            rims = (args[1], *rims[1:])
        for tensor in (*boxes, *rims):
            assert tensor.data_ptr() % 16 == 0, name
            seen.add(name)
        launch(kernel, grid, *args, **constants)

    layer.launch = watched

    def program(end: VirtualTransport) -> dict[str, Tensor]:
        mesh = layer.init_mesh(layer.DEVICE, transport=end)
        blocks = {n: at_an_odd_place(layer.scatter(n, v, mesh)) for n, v in given.items()}
        assert all(b.data_ptr() % 16 for b in blocks.values())
        for name in ("x", "w", "bias"):
            blocks[name].requires_grad_()
        y = layer.conv(blocks["x"], blocks["w"], blocks["bias"], mesh=mesh)
        y.backward(blocks["dy"])
        gradients = {"dx": "x", "dw": "w", "dbias": "bias"}
        found = {"y": y.detach()} | {d: blocks[n].grad for d, n in gradients.items()}
        return {n: layer.gather(n, t, mesh) for n, t in found.items()}

    try:
        ran = World(2).run(program)
    finally:
        forget_module(layer)
    for name, whole in ran[0].items():
        limit = tolerance("bfloat16", compiled.layer.conv, 2, name, given, truth)
        assert float((whole.double() - truth[name]).abs().max()) <= limit * float(truth[name].abs().max()), name
    wanted = {"boxes": {"forward_box", "backward_data_box"}, "halos": {"backward_data_pointer"}}[kind]
    assert seen >= wanted, seen
