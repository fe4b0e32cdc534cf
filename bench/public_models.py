"""Public models at small configurations with random weights: what bench/networks.py imports and checks.

A model is a function that makes a module and the shape of its input; packages that are not installed leave theirs out.
The first samples' extent, 3, and most rows divide by no grid, so ragged blocks and empty ranks are among the cases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from convgen.spec.torchvision_ops import declare_operators

Made = tuple[nn.Module, tuple[int, ...]]
Make = Callable[[], Made]

SMALL = (3, 3, 64, 50)
SQUARE = (3, 3, 64, 64)  # of models that want all rows of the extent they are made for
VOLUME = (3, 1, 16, 20, 12)
CUBE = (2, 1, 32, 32, 32)


class Called(nn.Module):
    """A model by a call of one tensor, whatever it takes and gives."""

    def __init__(self, model: nn.Module, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.model, x)


def vision(name: str, shape: tuple[int, ...] = SMALL, kind: str = "", **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        home: Any = importlib.import_module(f"torchvision.models{kind and '.' + kind}")
        return getattr(home, name)(weights=None, **settings), shape

    return make


def timm(name: str, shape: tuple[int, ...] = SMALL, **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package = importlib.import_module("timm")
        return package.create_model(name, pretrained=False, **({"num_classes": 10} | settings)), shape

    return make


def monai(name: str, shape: tuple[int, ...] = VOLUME, run: Any = None, dims: int = 3, **settings: Any) -> Make:
    def make() -> Made:
        nets: Any = importlib.import_module("monai.networks.nets")
        model = getattr(nets, name)(**({"spatial_dims": dims} if dims else {}), **settings)
        return (Called(model, run) if run else model), shape

    return make


def smp(name: str, shape: tuple[int, ...] = SQUARE, encoder: str = "resnet18", **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package: Any = importlib.import_module("segmentation_models_pytorch")
        return getattr(package, name)(encoder, encoder_weights=None, classes=3, **settings), shape

    return make


def diffusers(name: str, shape: tuple[int, ...], run: Callable[[Any, torch.Tensor], Any], **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package: Any = importlib.import_module("diffusers")
        return Called(getattr(package, name)(**settings), run), shape

    return make


def by_time(model: Any, x: torch.Tensor) -> Any:
    """A denoiser at a time step."""
    return model(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype, device=x.device)).sample


def by_words(width: int) -> Callable[[Any, torch.Tensor], Any]:
    """A denoiser at a time step, beside words: here all alike, a function of nothing."""

    def run(model: Any, x: torch.Tensor) -> Any:
        words = torch.sin(torch.arange(4 * width, dtype=x.dtype, device=x.device)).reshape(1, 4, width)
        time = torch.full((x.shape[0],), 7.0, dtype=x.dtype, device=x.device)
        return model(x, time, words.expand(x.shape[0], -1, -1)).sample

    return run


KL = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
DENOISER = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "in_channels": 3,
    "out_channels": 3,
    "attention_head_dim": 8,
}
IN_OUT = {"in_channels": 1, "out_channels": 2}

# Those that the issue of breadth names.
NAMED: Mapping[str, Make] = {
    "resnet18": vision("resnet18"),
    "resnext50_32x4d": vision("resnext50_32x4d"),
    "wide_resnet50_2": vision("wide_resnet50_2"),
    "vgg16_bn": vision("vgg16_bn", num_classes=10),
    "alexnet": vision("alexnet", (3, 3, 80, 67), num_classes=10),
    "googlenet": vision("googlenet", (3, 3, 64, 66), init_weights=False, aux_logits=True, num_classes=10),
    "inception_v3": vision("inception_v3", (3, 3, 96, 80), init_weights=False, aux_logits=False, num_classes=10),
    "mobilenet_v2": vision("mobilenet_v2"),
    "densenet121": vision("densenet121"),
    "shufflenet_v2_x1_0": vision("shufflenet_v2_x1_0"),
    "convnext_tiny": vision("convnext_tiny"),
    "fcn_resnet50": vision("fcn_resnet50", (3, 3, 65, 50), "segmentation", num_classes=5, weights_backbone=None),
    "deeplabv3_resnet50": vision(
        "deeplabv3_resnet50", (3, 3, 65, 50), "segmentation", num_classes=5, weights_backbone=None
    ),
    "r3d_18": vision("r3d_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "monai_unet": monai("UNet", **IN_OUT, channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "monai_basic_unet": monai("BasicUNet", (3, 1, 32, 32, 16), features=(4, 4, 8, 8, 16, 4)),
    "monai_attention_unet": monai("AttentionUnet", **IN_OUT, channels=(4, 8, 16), strides=(2, 2)),
    "smp_unet": smp("Unet"),
    "diffusers_encoder": diffusers("AutoencoderKL", (3, 3, 26, 20), lambda m, x: m.encoder(x), **KL),
    "diffusers_decoder": diffusers("AutoencoderKL", (3, 4, 13, 10), lambda m, x: m.decoder(x), **KL),
    "diffusers_unet2d": diffusers(
        "UNet2DModel",
        (3, 3, 26, 20),
        by_time,
        **DENOISER,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "timm_convnext": timm("convnext_atto"),
}

# Others, that nobody named.
VISION: Mapping[str, Make] = {
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
    "lraspp": vision("lraspp_mobilenet_v3_large", SMALL, "segmentation", num_classes=5, weights_backbone=None),
    "deeplabv3_mobilenet": vision(
        "deeplabv3_mobilenet_v3_large", SMALL, "segmentation", num_classes=5, weights_backbone=None
    ),
    "mc3_18": vision("mc3_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "r2plus1d_18": vision("r2plus1d_18", (2, 3, 8, 34, 27), "video", num_classes=7),
    "mvit_v2_s": vision("mvit_v2_s", (1, 3, 16, 224, 224), "video", num_classes=7),
    "swin3d_t": vision("swin3d_t", (1, 3, 8, 64, 64), "video", num_classes=7),
}

TIMM: Mapping[str, Make] = {
    f"timm_{name}": timm(name, shape)
    for name, shape in {
        "convnextv2_atto": SMALL,
        "efficientnet_lite0": SMALL,
        "mobilenetv4_conv_small": SMALL,
        "mobilenetv4_hybrid_medium": SQUARE,
        "ghostnet_100": SMALL,
        "hrnet_w18_small": SQUARE,
        "res2net50_26w_4s": SMALL,
        "resnest14d": SMALL,
        "nfnet_l0": SMALL,
        "resnetv2_50x1_bit": SMALL,
        "regnetz_b16": SMALL,
        "repvgg_a0": SMALL,
        "dla34": SMALL,
        "dpn48b": SMALL,
        "xception41": SMALL,
        "ese_vovnet19b_dw": SMALL,
        "cspresnet50": SMALL,
        "cspdarknet53": SMALL,
        "tresnet_m": SMALL,
        "skresnet18": SMALL,
        "seresnet18": SMALL,
        "ecaresnet26t": SMALL,
        "gernet_s": SMALL,
        "lcnet_050": SMALL,
        "edgenext_xx_small": SQUARE,
        "mobilevit_xxs": SQUARE,
        "mobilevitv2_050": SQUARE,
        "mobileone_s0": SMALL,
        "fastvit_t8": SQUARE,
        "poolformer_s12": SMALL,
        "levit_128s": (2, 3, 224, 224),
        "pvt_v2_b0": SQUARE,
        "efficientformer_l1": (2, 3, 224, 224),
        "efficientformerv2_s0": (2, 3, 224, 224),
        "inception_next_atto": SMALL,
        "focalnet_tiny_srf": SQUARE,
        "davit_tiny": SQUARE,
        "mixer_s32_224": (2, 3, 224, 224),
        "convmixer_768_32": (2, 3, 56, 56),
        "rexnet_100": SMALL,
        "selecsls42": SMALL,
        "halonet26t": (2, 3, 256, 256),
        "lambda_resnet26t": (2, 3, 256, 256),
        "botnet26t_256": (2, 3, 256, 256),
        "gcresnet33ts": SMALL,
        "xcit_nano_12_p8_224": SQUARE,
        "repghostnet_050": SMALL,
        "starnet_s1": SMALL,
        "mambaout_femto": SMALL,
        "hgnet_tiny": SMALL,
        "hgnetv2_b0": SMALL,
        "vit_tiny_patch16_224": (2, 3, 224, 224),
        "coatnet_nano_rw_224": (2, 3, 224, 224),
        "maxxvitv2_nano_rw_256": (1, 3, 256, 256),
        "inception_v4": (2, 3, 96, 80),
        "nextvit_small": SQUARE,
        "swinv2_cr_tiny_224": (2, 3, 224, 224),
        "tiny_vit_5m_224": (2, 3, 224, 224),
        "mvitv2_tiny": (2, 3, 224, 224),
        "caformer_s18": SQUARE,
        "hiera_tiny_224": (1, 3, 224, 224),
        "shvit_s1": SQUARE,
        "efficientvit_b0": SQUARE,
        "repvit_m1": SMALL,
        "gcvit_xxtiny": (1, 3, 224, 224),
        "twins_svt_small": SQUARE,
        "crossvit_9_240": (1, 3, 240, 240),
        "nasnetalarge": SMALL,
        "densenet121": SMALL,
        "vovnet39a": SMALL,
        "darknet53": SMALL,
        "mixnet_s": SMALL,
        "fbnetc_100": SMALL,
        "legacy_seresnet18": SMALL,
        "pit_ti_224": (1, 3, 224, 224),
        "visformer_tiny": (2, 3, 224, 224),
        "sequencer2d_s": (1, 3, 224, 224),
        "convit_tiny": (1, 3, 224, 224),
        "nest_tiny": (1, 3, 224, 224),
        "resmlp_12_224": (1, 3, 224, 224),
        "gmixer_24_224": (1, 3, 224, 224),
        "eca_nfnet_l0": SMALL,
        "bat_resnext26ts": (2, 3, 256, 256),
        "dm_nfnet_f0": SMALL,
        "resnet26t": SMALL,
        "resnetrs50": SMALL,
        "resnetaa50": SMALL,
        "resnetblur50": SMALL,
        "seresnextaa101d_32x8d": (2, 3, 33, 40),
        "spnasnet_100": SMALL,
        "tinynet_e": SMALL,
        "vgg11": (2, 3, 64, 50),
        "volo_d1_224": (1, 3, 224, 224),
        "coat_tiny": SQUARE,
        "samvit_base_patch16": (1, 3, 128, 128),
        "vitamin_small_224": (1, 3, 224, 224),
        "test_convnext": SMALL,
        "test_efficientnet_evos": SMALL,
        "test_nfnet": SMALL,
        "csatv2": SQUARE,
    }.items()
}

MONAI: Mapping[str, Make] = {
    "monai_segresnet": monai(
        "SegResNet", (2, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2), blocks_up=(1,)
    ),
    "monai_segresnet_vae": monai(
        "SegResNetVAE",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m(x)[0],
        dims=0,
        input_image_size=(16, 16, 16),
        vae_estimate_std=True,
        init_filters=8,
        **IN_OUT,
        blocks_down=(1, 2),
        blocks_up=(1,),
    ),
    "monai_segresnet_ds": monai(
        "SegResNetDS", (2, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2, 2), dsdepth=2
    ),
    "monai_dynunet": monai(
        "DynUNet",
        (2, 1, 16, 24, 16),
        **IN_OUT,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        filters=(4, 8, 16),
        deep_supervision=False,
        res_block=True,
    ),
    "monai_vnet": monai("VNet", (1, 1, 32, 32, 16), **IN_OUT),
    "monai_unetr": monai(
        "UNETR", (1, 1, 32, 32, 32), **IN_OUT, img_size=32, feature_size=4, hidden_size=24, mlp_dim=32, num_heads=4
    ),
    "monai_swin_unetr": monai("SwinUNETR", (1, 1, 64, 64, 64), **IN_OUT, feature_size=12, depths=(1, 1, 1, 1)),
    "monai_swin_unetr2d": monai("SwinUNETR", (2, 1, 64, 64), dims=2, **IN_OUT, feature_size=12, depths=(2, 2, 1, 1)),
    "monai_highresnet": monai("HighResNet", (2, 1, 12, 10, 9), in_channels=1, out_channels=2),
    "monai_densenet": monai("DenseNet121", CUBE, **IN_OUT, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
    "monai_resnet": monai("resnet18", CUBE, n_input_channels=1, num_classes=2),
    "monai_flexible_unet": monai(
        "FlexibleUNet", (2, 3, 64, 64), dims=2, in_channels=3, out_channels=2, backbone="efficientnet-b0"
    ),
    "monai_unet_pp": monai("BasicUNetPlusPlus", (1, 1, 16, 32, 16), features=(4, 4, 8, 8, 16, 4)),
    "monai_autoencoder": monai("AutoEncoder", (2, 1, 16, 24, 16), **IN_OUT, channels=(4, 8), strides=(2, 2)),
    "monai_mednext": monai(
        "MedNeXt",
        (1, 1, 32, 32, 16),
        init_filters=4,
        **IN_OUT,
        blocks_down=(1, 1, 1, 1),
        blocks_bottleneck=1,
        blocks_up=(1, 1, 1, 1),
    ),
    "monai_voxelmorph": monai(
        "VoxelMorphUNet",
        (1, 2, 16, 16, 16),
        in_channels=2,
        unet_out_channels=8,
        channels=(8, 8, 8, 8),
        final_conv_channels=(8,),
    ),
    "monai_kl": monai(
        "AutoencoderKL",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m.decoder(m.encoder(x)),
        in_channels=1,
        out_channels=1,
        channels=(8, 16),
        latent_channels=2,
        num_res_blocks=1,
        norm_num_groups=4,
        attention_levels=(False, True),
    ),
    "monai_diffusion": monai(
        "DiffusionModelUNet",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype)),
        in_channels=1,
        out_channels=1,
        channels=(8, 16),
        num_res_blocks=1,
        norm_num_groups=4,
        attention_levels=(False, True),
        num_head_channels=4,
    ),
    "monai_discriminator": monai("PatchDiscriminator", (1, 1, 32, 32, 32), channels=4, in_channels=1, num_layers_d=2),
    "monai_senet": monai("SENet154", (2, 1, 64, 64), dims=2, in_channels=1, num_classes=3),
    "monai_vista": monai(
        "ViT",
        (1, 1, 32, 32, 32),
        run=lambda m, x: m(x)[0],
        in_channels=1,
        img_size=(32, 32, 32),
        patch_size=(16, 16, 16),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=4,
        classification=False,
    ),
    "monai_efficientnet": monai(
        "EfficientNetBN",
        (2, 1, 64, 64),
        dims=2,
        model_name="efficientnet-b0",
        pretrained=False,
        in_channels=1,
        num_classes=3,
    ),
    "monai_localnet": monai(
        "LocalNet",
        (1, 2, 16, 16, 16),
        in_channels=2,
        num_channel_initial=4,
        extract_levels=(0, 1, 2),
        out_channels=3,
        out_kernel_initializer="zeros",
        out_activation=None,
    ),
    "monai_hovernet": monai(
        "HoVerNet", (1, 3, 256, 256), dims=0, run=lambda m, x: next(iter(m(x).values())), mode="fast", out_classes=3
    ),
}

SMP: Mapping[str, Make] = {
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
}

LATENT_VIDEO = (1, 4, 3, 8, 6)
VIDEO = (1, 3, 5, 16, 16)
DIFFUSERS: Mapping[str, Make] = {
    "kl_mid_attention": diffusers(
        "AutoencoderKL", (2, 3, 16, 16), lambda m, x: m.decode(m.encode(x).latent_dist.mode()).sample, **KL
    ),
    "tiny_vae": diffusers(
        "AutoencoderTiny",
        (2, 3, 16, 24),
        lambda m, x: m.decode(m.encode(x).latents).sample,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    ),
    "vq_model": diffusers(
        "VQModel",
        (2, 3, 16, 24),
        lambda m, x: m.decode(m.encode(x).latents, force_not_quantize=True).sample,
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ),
    "vq_model_lookup": diffusers(
        "VQModel",
        (2, 3, 16, 24),
        lambda m, x: m(x).sample,
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        num_vq_embeddings=16,
    ),
    "dc_ae": diffusers(
        "AutoencoderDC",
        (1, 3, 32, 32),
        lambda m, x: m.decode(m.encode(x).latent).sample,
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    ),
    "unet2d_condition": diffusers(
        "UNet2DConditionModel",
        (2, 4, 16, 12),
        by_words(24),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=24,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "unet3d_condition": diffusers(
        "UNet3DConditionModel",
        (1, 4, 3, 16, 12),
        by_words(24),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=24,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    "wan_decoder": diffusers(
        "AutoencoderKLWan",
        (1, 4, 1, 8, 6),
        lambda m, x: m.decode(x).sample,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "wan_encoder": diffusers(
        "AutoencoderKLWan",
        (1, 3, 5, 16, 12),
        lambda m, x: m.encode(x).latent_dist.mode(),
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "qwen_decoder": diffusers(
        "AutoencoderKLQwenImage",
        (1, 4, 1, 8, 6),
        lambda m, x: m.decode(x).sample,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "cogvideo_vae": diffusers(
        "AutoencoderKLCogVideoX",
        (1, 4, 2, 8, 6),
        lambda m, x: m.decode(x).sample,
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=2,
    ),
    "hunyuan_vae": diffusers(
        "AutoencoderKLHunyuanVideo",
        (1, 4, 2, 8, 6),
        lambda m, x: m.decode(x).sample,
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "ltx_vae": diffusers(
        "AutoencoderKLLTXVideo",
        (1, 8, 2, 4, 4),
        lambda m, x: m.decode(x).sample,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    ),
    "magvit_vae": diffusers(
        "AutoencoderKLMagvit",
        (1, 4, 1, 8, 6),
        lambda m, x: m.decode(x).sample,
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "allegro_vae": diffusers(
        "AutoencoderKLAllegro",
        (1, 4, 6, 8, 6),
        lambda m, x: m.decoder(x),
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "temporal_decoder": diffusers(
        "AutoencoderKLTemporalDecoder",
        (4, 4, 8, 6),
        lambda m, x: m.decode(x, num_frames=2).sample,
        down_block_types=("DownEncoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        layers_per_block=1,
    ),
    "asymmetric_vae": diffusers(
        "AsymmetricAutoencoderKL",
        (2, 3, 16, 24),
        lambda m, x: m.encoder(x),
        down_block_types=("DownEncoderBlock2D",) * 2,
        down_block_out_channels=(16, 32),
        up_block_types=("UpDecoderBlock2D",) * 2,
        up_block_out_channels=(16, 32),
        norm_num_groups=8,
    ),
    "unet1d": diffusers(
        "UNet1DModel",
        (2, 14, 32),
        by_time,
        block_out_channels=(16, 16),
        in_channels=14,
        out_channels=14,
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",),
        act_fn="mish",
        out_block_type="OutConv1DBlock",
        mid_block_type="MidResTemporalBlock1D",
        norm_num_groups=8,
        time_embedding_type="positional",
        use_timestep_embedding=True,
        layers_per_block=1,
    ),
    "controlnet": diffusers(
        "ControlNetModel",
        (2, 4, 16, 16),
        lambda m, x: (
            m(
                x,
                torch.full((x.shape[0],), 7.0, dtype=x.dtype),
                torch.zeros(x.shape[0], 4, 24, dtype=x.dtype),
                torch.nn.functional.interpolate(x[:, :3], scale_factor=8.0),
            ).mid_block_res_sample
        ),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=24,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(8, 8, 8, 8),
    ),
    "dit": diffusers(
        "DiTTransformer2DModel",
        (2, 4, 16, 16),
        lambda m, x: (
            m(x, torch.full((x.shape[0],), 7, dtype=torch.int64), torch.zeros(x.shape[0], dtype=torch.int64)).sample
        ),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        sample_size=16,
        patch_size=2,
    ),
    "spatiotemporal": diffusers(
        "UNetSpatioTemporalConditionModel",
        (1, 2, 4, 16, 16),
        lambda m, x: (
            m(
                x,
                torch.full((x.shape[0],), 7.0, dtype=x.dtype),
                torch.zeros(x.shape[0], 1, 24, dtype=x.dtype),
                torch.zeros(x.shape[0], 3, dtype=x.dtype),
            ).sample
        ),
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=1,
        cross_attention_dim=24,
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
    ),
    "stable_cascade": diffusers(
        "ConsistencyDecoderVAE",
        (1, 4, 8, 8),
        lambda m, x: m.encoder(torch.nn.functional.interpolate(x[:, :3], scale_factor=2.0)),
        encoder_block_out_channels=(16, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_norm_num_groups=4,
        encoder_layers_per_block=1,
    ),
}

MODELS: Mapping[str, Make] = {**NAMED, **VISION, **TIMM, **MONAI, **SMP, **DIFFUSERS}
