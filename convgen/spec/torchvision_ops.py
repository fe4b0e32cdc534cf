"""Declares the operators of torchvision's C library where that can't load beside this torch, so that Python imports it.

PyPI's torchvision is built for CUDA. Beside a CPU torch its library does not load, and its Python files fail where they
look up the operators that the library would have declared. Networks without those operators need only their names.
"""

from __future__ import annotations

from typing import Any

SYMPTOM = "operator torchvision::"  # "operator torchvision::nms does not exist"
_ROI = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_ROI}) -> (Tensor, Tensor)",
    f"ps_roi_align({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    f"ps_roi_pool({_ROI}) -> (Tensor, Tensor)",
    "_roi_align_backward(Tensor grad) -> Tensor",
    "_roi_pool_backward(Tensor grad) -> Tensor",
    "_ps_roi_align_backward(Tensor grad) -> Tensor",
    "_ps_roi_pool_backward(Tensor grad) -> Tensor",
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_kept: list[Any] = []  # operators live as long as their library


def declare_operators() -> None:
    """Declare the operators of torchvision's C library, once, with nothing behind them."""
    if _kept:
        return
    import torch

    library: Any = torch.library.Library("torchvision", "DEF")
    for schema in _OPERATORS:
        library.define(schema)
    _kept.append(library)
