"""Models of torchvision, small: classifiers, segmenters, video, and parts of detectors and of optical flow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.makers import SMALL, SQUARE, Make, Run, called, over, vision

FEATURES = (1, 4, 16, 18)  # what heads read, repeated to 256 channels
SEGMENTS: dict[str, Any] = {"kind": "segmentation", "num_classes": 5, "weights_backbone": None}


def pyramid(levels: int) -> Run:
    """Of feature maps of 256 channels, of as many levels, each half the one before."""

    def run(m: Any, x: Tensor) -> Any:
        y = x.repeat(1, 256 // x.shape[1], 1, 1)
        return m([F.avg_pool2d(y, 1 << k, ceil_mode=True) if k else y for k in range(levels)])

    return run


def detector(name: str, shape: tuple[int, ...] = (1, 3, 64, 66), **settings: Any) -> Make:
    return vision(name, shape, "detection", weights_backbone=None, **settings)


def head(name: str, levels: int) -> Make:
    return over(detector(name, num_classes=4), lambda m: m.head, pyramid(levels), FEATURES)


def features(name: str, *shape: tuple[int, ...]) -> Make:
    """A detector's: lists of images are what its own forward takes."""
    return over(detector(name, *shape), lambda m: m.backbone, lambda m, x: [*m(x).values()])


def flow(name: str) -> Make:
    """Two images side by side; coordinates in their type, not in float32, which its own convolutions refuse beside
    float64."""

    def run(m: Any, x: Tensor) -> Any:
        home: Any = importlib.import_module("torchvision.models.optical_flow.raft")
        plain = home.make_coords_grid
        home.make_coords_grid = lambda *given, **named: plain(*given, **named).to(x.dtype)
        try:
            return m(x[:, :3], x[:, 3:], num_flow_updates=2)
        finally:
            home.make_coords_grid = plain

    return over(vision(name, (1, 6, 128, 136), "optical_flow"), lambda m: m, run)


# fmt: off
VISION: Mapping[str, Make] = {
    "resnet18": vision("resnet18"),
    "resnext50_32x4d": vision("resnext50_32x4d"),
    "wide_resnet50_2": vision("wide_resnet50_2"),
    "vgg16_bn": vision("vgg16_bn", num_classes=10),
    "alexnet": vision("alexnet", (3, 3, 80, 67), num_classes=10),
    "googlenet": vision("googlenet", (3, 3, 64, 66), init_weights=False, aux_logits=True, num_classes=10),
    "inception_v3": vision("inception_v3", (3, 3, 130, 107), init_weights=False, aux_logits=False, num_classes=10),
    "mobilenet_v2": vision("mobilenet_v2"),
    "densenet121": vision("densenet121"),
    "shufflenet_v2_x1_0": vision("shufflenet_v2_x1_0"),
    "convnext_tiny": vision("convnext_tiny"),
    "fcn_resnet50": vision("fcn_resnet50", (3, 3, 65, 50), **SEGMENTS),
    "deeplabv3_resnet50": vision("deeplabv3_resnet50", (3, 3, 65, 50), **SEGMENTS),
    "r3d_18": vision("r3d_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "mnasnet0_5": vision("mnasnet0_5"),
    "squeezenet1_0": vision("squeezenet1_0", num_classes=10),
    "efficientnet_b0": vision("efficientnet_b0", num_classes=10),
    "efficientnet_v2_s": vision("efficientnet_v2_s", num_classes=10),
    "regnet_x_400mf": vision("regnet_x_400mf"),
    "regnet_y_400mf": vision("regnet_y_400mf"),
    "swin_t": vision("swin_t", num_classes=10),
    "swin_v2_t": vision("swin_v2_t", num_classes=10),
    "vit_b_16": vision("vit_b_16", SQUARE, image_size=64, num_classes=10),
    "maxvit_t": vision("maxvit_t", (2, 3, 224, 224), num_classes=10),
    "lraspp": vision("lraspp_mobilenet_v3_large", SMALL, **SEGMENTS),
    "deeplabv3_mobilenet": vision("deeplabv3_mobilenet_v3_large", SMALL, **SEGMENTS),
    "mc3_18": vision("mc3_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "r2plus1d_18": vision("r2plus1d_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "mvit_v2_s": vision("mvit_v2_s", (1, 3, 16, 224, 224), "video", num_classes=7),
    "swin3d_t": vision("swin3d_t", (1, 3, 8, 64, 64), "video", num_classes=7),
    "resnet50": vision("resnet50", num_classes=10),
    "shufflenet_v2_x0_5": vision("shufflenet_v2_x0_5"),
    "squeezenet1_1": vision("squeezenet1_1", num_classes=10),
    "mnasnet1_3": vision("mnasnet1_3", num_classes=10),
    "inception_v3_aux": vision("inception_v3", (2, 3, 299, 299), init_weights=False, num_classes=10),
    "fcn_aux": vision("fcn_resnet50", (2, 3, 65, 50), **SEGMENTS, aux_loss=True),
    "s3d": vision("s3d", (1, 3, 16, 224, 224), "video", num_classes=7),
    "mvit_v1_b": vision("mvit_v1_b", (1, 3, 16, 224, 224), "video", num_classes=7),
    "fasterrcnn_fpn": features("fasterrcnn_resnet50_fpn"),
    "fasterrcnn_mobile_fpn": features("fasterrcnn_mobilenet_v3_large_fpn"),
    "retinanet_fpn": features("retinanet_resnet50_fpn"),
    "ssd_backbone": features("ssd300_vgg16", (1, 3, 300, 300)),
    "ssdlite_backbone": features("ssdlite320_mobilenet_v3_large", (1, 3, 320, 320)),
    "raft_features": over(vision("raft_small", (2, 3, 64, 66), "optical_flow"), lambda m: m.feature_encoder, called),
    "raft_small": flow("raft_small"),
    "raft_large": flow("raft_large"),
    "fcos_head": head("fcos_resnet50_fpn", 3),
    "retinanet_head": head("retinanet_resnet50_fpn", 3),
    "retinanet_v2_head": head("retinanet_resnet50_fpn_v2", 2),
    "rpn_head": over(detector("maskrcnn_resnet50_fpn", num_classes=4), lambda m: m.rpn.head, pyramid(3), FEATURES),
    "mask_head": over(detector("maskrcnn_resnet50_fpn_v2", num_classes=4),
        lambda m: nn.Sequential(m.roi_heads.mask_head, m.roi_heads.mask_predictor), called, (5, 256, 14, 14)),
    "box_head": over(detector("fasterrcnn_resnet50_fpn_v2", num_classes=4),
        lambda m: nn.Sequential(m.roi_heads.box_head), called, (5, 256, 7, 7)),
    "keypoint_head": over(detector("keypointrcnn_resnet50_fpn"),
        lambda m: nn.Sequential(m.roi_heads.keypoint_head, m.roi_heads.keypoint_predictor), called, (3, 256, 14, 14)),
    "quantizable_mobilenet": vision("mobilenet_v2", (2, 3, 64, 50), "quantization", quantize=False),
    "resnet34": vision("resnet34", num_classes=10),
    "vgg19": vision("vgg19", (2, 3, 64, 50), num_classes=10),
    "resnet18_gn": vision("resnet18", num_classes=10, norm_layer=lambda c: nn.GroupNorm(8, c)),
    "resnet50_dilated": vision("resnet50", replace_stride_with_dilation=[False, True, True], num_classes=10),
}
