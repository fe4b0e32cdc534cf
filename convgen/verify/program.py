"""What every rank runs in a check, and the single-device reference that ranks are compared with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from convgen.algebra.conv import Conv
from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.spec.layer import Layer

RESULTS = ("y", "dx", "dw", "dbias")
OF = {"y": "y", "dx": "x", "dw": "w", "dbias": "bias", "x": "x", "w": "w", "bias": "bias", "dy": "y"}


def load_module(path: Path, *, interpret: bool = False) -> ModuleType:
    """Import a generated module from its file.

    Args:
        interpret: run a GPU's module on CPU tensors, its kernels in Triton's interpreter.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if interpret:
        from convgen.verify.interpreter import launch

        vars(module).update(DEVICE="cpu", launch=launch)
        module.LAYER.device = "cpu"
    return module


def forget_module(module: ModuleType) -> None:
    """Forget a module and give back its op's name, so that another version of the layer can be checked."""
    sys.modules.pop(module.__name__, None)
    shared = sys.modules.get("_convgen_shared")
    if shared is not None:
        vars(shared)["ops"].pop(module.NAME, None)


def global_tensors(layer: Layer, seed: int = 0) -> dict[str, Tensor]:
    """Random x, w, dy (and bias) in float64, rounded to the layer's type, so that all compute on equal numbers."""
    conv = layer.conv
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": conv.shape("x"), "w": conv.shape("w"), "dy": conv.shape("y")}
    if conv.bias:
        shapes["bias"] = (conv.filters,)
    dtype = TORCH_DTYPES[layer.dtype]
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).double()
        for name, shape in shapes.items()
    }


def reference(conv: Conv, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """y, dx, dw and dbias of one device in float64: padding added and cut by hand, and one plain call of torch."""
    x = given["x"].double().detach().requires_grad_()
    w = given["w"].double().detach().requires_grad_()
    bias = given["bias"].double().detach().requires_grad_() if conv.bias else None
    functions = torch.nn.functional
    convolve = getattr(functions, conv.name)
    how = {
        "stride": tuple(s.stride for s in conv.spatial),
        "dilation": tuple(s.dilation for s in conv.spatial),
        "groups": conv.groups,
    }
    if conv.transposed:
        # Rows that no product reaches are zeros; there may be so many that all that products reach are cut off.
        whole = convolve(x, w, **how)
        short = [s.pad_lo + s.extent - n for s, n in zip(conv.spatial, whole.shape[2:], strict=True)]
        whole = functions.pad(whole, [n for rows in reversed(short) for n in (0, max(rows, 0))])
        y = whole[(..., *(slice(s.pad_lo, s.pad_lo + s.extent) for s in conv.spatial))]
        y = y if bias is None else y + bias.view(-1, *[1] * len(conv.spatial))
    else:
        padding = [p for s in reversed(conv.spatial) for p in (s.pad_lo, s.pad_hi)]
        y = convolve(functions.pad(x, padding), w, bias, **how)
    torch.autograd.backward(y, given["dy"].double())
    results = {"y": y.detach(), "dx": x.grad, "dw": w.grad}
    if bias is not None:
        results["dbias"] = bias.grad
    return {name: value for name, value in results.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank's blocks of y, dx, dw and dbias, and what it sent: (collective, bytes) in order.

    `report`: what its mesh did, where the module emulates a mesh.
    """

    blocks: dict[str, Tensor]
    sent: tuple[tuple[str, int], ...]
    report: dict[str, Any] = field(default_factory=dict[str, Any])


def run_rank(layer: ModuleType, given: Mapping[str, Tensor], mesh: Any, sent: list[Any]) -> RankResult:
    """Forward and backward on one rank, through the module's public interface."""
    local = {name: layer.scatter(name, value, mesh) for name, value in given.items()}
    for name in ("x", "w", "bias"):
        if name in local:
            local[name].requires_grad_()
    y = layer.conv(local["x"], local["w"], local.get("bias"), mesh=mesh)
    y.backward(local["dy"])
    blocks = {"y": y.detach(), "dx": local["x"].grad, "dw": local["w"].grad}
    if "bias" in local:
        blocks["dbias"] = local["bias"].grad
    return RankResult(
        {name: block.cpu() for name, block in blocks.items()},
        tuple((one.collective, one.bytes) for one in sent),
        layer.report(mesh) if hasattr(layer, "report") else {},
    )
