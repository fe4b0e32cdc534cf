"""Models of segmentation_models_pytorch: decoders beside encoders of several kinds, three classes."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.makers import Make, smp

# fmt: off
SMP: Mapping[str, Make] = {
    "smp_unet": smp("Unet"),
    "smp_unetpp": smp("UnetPlusPlus"),
    "smp_fpn": smp("FPN"),
    "smp_pspnet": smp("PSPNet"),
    "smp_deeplab": smp("DeepLabV3Plus"),
    "smp_linknet": smp("Linknet"),
    "smp_manet": smp("MAnet"),
    "smp_pan": smp("PAN", (2, 3, 128, 128)),
    "smp_upernet": smp("UPerNet"),
    "smp_segformer": smp("Segformer"),
    "smp_unet_scse": smp("Unet", decoder_attention_type="scse"),
    "smp_unet_mit": smp("Unet", encoder="mit_b0"),
    "smp_dpt": smp("DPT", (1, 3, 64, 64), encoder="tu-vit_tiny_patch16_224", dynamic_img_size=True),
    "smp_deeplabv3": smp("DeepLabV3"),
    "smp_unet_mobilenet": smp("Unet", encoder="mobilenet_v2"),
    "smp_unet_efficientnet": smp("Unet", encoder="efficientnet-b0"),
    "smp_unet_densenet": smp("Unet", (1, 3, 64, 64), encoder="densenet121"),
    "smp_unet_dpn": smp("Unet", (1, 3, 64, 64), encoder="dpn68"),
    "smp_unet_vgg": smp("Unet", (1, 3, 64, 64), encoder="vgg11_bn"),
    "smp_unet_inception": smp("Unet", (1, 3, 64, 64), encoder="inceptionv4"),
    "smp_unet_xception": smp("Unet", (1, 3, 64, 64), encoder="xception"),
    "smp_unet_timm_regnet": smp("Unet", encoder="timm-regnetx_002"),
    "smp_unet_mobileone": smp("Unet", encoder="mobileone_s0"),
    "smp_fpn_se": smp("FPN", encoder="se_resnext50_32x4d", shape=(1, 3, 64, 64)),
    "smp_unet_aux": smp("Unet", aux_params={"classes": 4, "dropout": None}),
    "smp_unetpp_scse": smp("UnetPlusPlus", decoder_attention_type="scse"),
    "smp_unet_convnext": smp("Unet", encoder="tu-convnext_atto"),
}
