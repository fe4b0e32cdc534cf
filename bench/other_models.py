"""Public models in small configurations: heads and whole models that take several tensors, and newer autoencoders."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from public_makers import IN_OUT, Called, Make, diffusers, monai, vision
from torch import Tensor, nn


def over(make: Make, part: Callable[[Any], nn.Module], run: Callable[[Any, Tensor], Any], shape: Any = None) -> Make:
    """A part of a model, by a call of one tensor."""

    def made() -> Any:
        model, of_model = make()
        return Called(part(model), run), shape or of_model

    return made


def pyramid(x: Tensor, channels: int, levels: int) -> list[Tensor]:
    """Feature maps of as many levels, each half the one before."""
    y = x.repeat(1, channels // x.shape[1], 1, 1)
    return [nn.functional.avg_pool2d(y, 1 << k, ceil_mode=True) if k else y for k in range(levels)]


def filled(x: Tensor, *shape: int, value: float = 0.0) -> Tensor:
    return torch.full((x.shape[0], *shape), value, dtype=x.dtype, device=x.device)


def detector(name: str) -> Make:
    return vision(name, (1, 3, 64, 66), "detection", weights_backbone=None, num_classes=4)


def _raft(name: str) -> Make:
    """Two images side by side; coordinates in their type, not in float32, which its own convolutions refuse beside
    float64."""
    raft = vision(name, (1, 6, 128, 136), "optical_flow")

    def run(m: Any, x: Tensor) -> Any:
        home: Any = importlib.import_module("torchvision.models.optical_flow.raft")
        plain = home.make_coords_grid
        home.make_coords_grid = lambda *given, **named: plain(*given, **named).to(x.dtype)
        try:
            return m(x[:, :3], x[:, 3:], num_flow_updates=2)
        finally:
            home.make_coords_grid = plain

    return over(raft, lambda m: m, run)


FEATURES = (1, 4, 16, 18)
VISION: Mapping[str, Make] = {
    "raft_small": _raft("raft_small"),
    "raft_large": _raft("raft_large"),
    "fcos_head": over(detector("fcos_resnet50_fpn"), lambda m: m.head, lambda m, x: m(pyramid(x, 256, 3)), FEATURES),
    "retinanet_head": over(
        detector("retinanet_resnet50_fpn"), lambda m: m.head, lambda m, x: m(pyramid(x, 256, 3)), FEATURES
    ),
    "retinanet_v2_head": over(
        detector("retinanet_resnet50_fpn_v2"), lambda m: m.head, lambda m, x: m(pyramid(x, 256, 2)), FEATURES
    ),
    "rpn_head": over(
        detector("maskrcnn_resnet50_fpn"), lambda m: m.rpn.head, lambda m, x: m(pyramid(x, 256, 3)), FEATURES
    ),
    "mask_head": over(
        detector("maskrcnn_resnet50_fpn_v2"),
        lambda m: nn.Sequential(m.roi_heads.mask_head, m.roi_heads.mask_predictor),
        lambda m, x: m(x),
        (5, 256, 14, 14),
    ),
    "box_head": over(
        detector("fasterrcnn_resnet50_fpn_v2"),
        lambda m: nn.Sequential(m.roi_heads.box_head),
        lambda m, x: m(x),
        (5, 256, 7, 7),
    ),
    "keypoint_head": over(
        vision("keypointrcnn_resnet50_fpn", (1, 3, 64, 66), "detection", weights_backbone=None),
        lambda m: nn.Sequential(m.roi_heads.keypoint_head, m.roi_heads.keypoint_predictor),
        lambda m, x: m(x),
        (3, 256, 14, 14),
    ),
    "quantizable_mobilenet": vision("mobilenet_v2", (2, 3, 64, 50), "quantization", quantize=False),
    "resnet34": vision("resnet34", num_classes=10),
    "vgg19": vision("vgg19", (2, 3, 64, 50), num_classes=10),
    "resnet18_gn": vision("resnet18", num_classes=10, norm_layer=lambda c: nn.GroupNorm(8, c)),
    "resnet50_dilated": vision("resnet50", replace_stride_with_dilation=[False, True, True], num_classes=10),
}


def _voxelmorph() -> Any:
    nets: Any = importlib.import_module("monai.networks.nets")
    unet = nets.VoxelMorphUNet(
        spatial_dims=3, in_channels=2, unet_out_channels=8, channels=(8, 8, 8, 8), final_conv_channels=(8,)
    )
    model = nets.VoxelMorph(backbone=unet, integration_steps=2)
    return Called(model, lambda m, x: m(x[:, :1], x[:, 1:])), (1, 2, 16, 16, 16)


def labels(x: Tensor, count: int) -> Tensor:
    """Masks of as many labels."""
    return torch.cat([(x[:, :1] > k / 2).to(x.dtype) for k in range(count)], 1)


def _vista() -> Any:
    nets: Any = importlib.import_module("monai.networks.nets.vista3d")
    return Called(
        nets.vista3d132(encoder_embed_dim=8, in_channels=1),
        lambda m, x: m(x, class_vector=torch.arange(2)),
    ), (1, 1, 32, 32, 32)


def _adapter() -> Any:
    nets: Any = importlib.import_module("monai.networks.nets")
    home: Any = importlib.import_module("torchvision.models")
    return nets.NetAdapter(home.resnet18(weights=None), num_classes=3, use_conv=True, pool=None), (2, 3, 64, 50)


MONAI: Mapping[str, Make] = {
    "monai_daf3d": monai("DAF3D", (1, 1, 32, 32, 32), dims=0, **IN_OUT),
    "monai_segresnet_ds2": monai(
        "SegResNetDS2", (1, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2, 2), dsdepth=2
    ),
    "monai_voxelmorph_whole": _voxelmorph,
    "monai_spadenet": monai(
        "SPADENet",
        (2, 3, 16, 16),
        run=lambda m, x: m(labels(x, 2))[0],
        dims=2,
        in_channels=1,
        out_channels=1,
        label_nc=2,
        input_shape=[16, 16],
        channels=[8, 16],
        z_dim=6,
        is_vae=False,
        spade_intermediate_channels=8,
    ),
    "monai_spade_kl": monai(
        "SPADEAutoencoderKL",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m.decode(m.encode(x)[0], labels(x, 2)),
        label_nc=2,
        num_res_blocks=(1, 1),
        channels=(8, 16),
        attention_levels=(False, True),
        norm_num_groups=4,
        spade_intermediate_channels=8,
    ),
    "monai_spade_diffusion": monai(
        "SPADEDiffusionModelUNet",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype), labels(x, 2)),
        in_channels=1,
        out_channels=1,
        label_nc=2,
        num_res_blocks=(1, 1),
        channels=(8, 16),
        attention_levels=(False, True),
        norm_num_groups=4,
        num_head_channels=4,
        spade_intermediate_channels=8,
    ),
    "monai_diffusion_words": monai(
        "DiffusionModelUNet",
        (2, 1, 16, 16),
        run=lambda m, x: m(x, filled(x, value=7.0), torch.sin(torch.arange(12.0)).view(1, 3, 4).repeat(len(x), 1, 1)),
        dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 16),
        num_res_blocks=1,
        norm_num_groups=4,
        attention_levels=(False, True),
        num_head_channels=4,
        with_conditioning=True,
        cross_attention_dim=4,
        resblock_updown=True,
    ),
    "monai_resnet_features": monai(
        "ResNetFeatures", (2, 1, 40, 40, 40), model_name="resnet10", pretrained=False, in_channels=1
    ),
    "monai_efficientnet_features": monai(
        "EfficientNetBNFeatures", (1, 1, 64, 64), dims=2, model_name="efficientnet-b0", pretrained=False, in_channels=1
    ),
    "monai_net_adapter": _adapter,
    "monai_mil": monai(
        "MILModel", (2, 3, 3, 64, 64), dims=0, num_classes=2, mil_mode="att_trans", pretrained=False, trans_blocks=1
    ),
    "monai_classifier": monai(
        "Classifier", (2, 1, 16, 16, 16), dims=0, in_shape=(1, 16, 16, 16), classes=3, channels=(4, 8), strides=(2, 2)
    ),
    "monai_vista3d": _vista,
    "monai_unet_1d": monai("UNet", (3, 1, 52), dims=1, **IN_OUT, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    "monai_segresnet_2d": monai("SegResNet", (2, 1, 24, 40), dims=2, **IN_OUT, upsample_mode="deconv"),
}

ONES = {"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}


def decoded(m: Any, x: Tensor) -> Any:
    return m.decode(x).sample


def both(m: Any, x: Tensor) -> Any:
    return m.decode(m.encode(x).latent_dist.mode()).sample


UNET: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
DIFFUSERS: Mapping[str, Make] = {
    "hunyuan_refiner": diffusers(
        "AutoencoderKLHunyuanImageRefiner",
        (1, 3, 5, 16, 16),
        both,
        latent_channels=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        temporal_compression_ratio=2,
    ),
    "kvae": diffusers(
        "AutoencoderKLKVAE",
        (1, 3, 16, 16),
        both,
        channels=32,
        num_enc_blocks=1,
        num_dec_blocks=1,
        z_channels=4,
        ch_mult=(1, 2),
    ),
    "kvae_video": diffusers(
        "AutoencoderKLKVAEVideo",
        (1, 3, 5, 16, 16),
        both,
        ch=32,
        ch_mult=(1, 2),
        num_res_blocks=1,
        z_channels=4,
        temporal_compress_times=2,
    ),
    "kvae_audio": diffusers(
        "AutoencoderKLKVAEAudio",
        (1, 1, 72),
        both,
        encoder_dim=8,
        encoder_rates=[2, 3],
        latent_dim=16,
        codebook_dim=8,
        decoder_dim=16,
        decoder_rates=[3, 2],
        attn_num_heads=2,
    ),
    "ltx2_audio": diffusers(
        "AutoencoderKLLTX2Audio",
        (1, 2, 16, 16),
        both,
        base_channels=16,
        ch_mult=(1, 2),
        num_res_blocks=1,
        resolution=16,
        latent_channels=4,
        mel_bins=16,
    ),
    "minimax_h3": diffusers(
        "AutoencoderKLMiniMaxH3",
        (1, 3, 5, 16, 16),
        lambda m, x: m.encode(x).latent_dist.mode(),
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_downsample_factors=(2, 1),
        temporal_downsample_factors=(1, 2),
        norm_num_groups=8,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        clip_length=5,
        token_drop=1,
        **ONES,
    ),
    "minimax_h3_audio": diffusers(
        "AutoencoderKLMiniMaxH3Audio",
        (1, 1, 64),
        both,
        encoder_dim=8,
        encoder_rates=(2, 4),
        latent_dim=16,
        latent_channels=4,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
    ),
    "kandinsky_sr": diffusers(
        "Kandinsky6SRVAE",
        (1, 3, 5, 16, 16),
        both,
        latent_channels=4,
        encoder_block_out_channels=(16, 32, 32),
        decoder_block_out_channels=(16, 32, 32),
        layers_per_block=1,
        temporal_compression_ratio=2,
    ),
    "longcat_audio": diffusers(
        "LongCatAudioDiTVae",
        (1, 1, 64),
        lambda m, x: m.encoder(x),
        channels=8,
        c_mults=[1, 2],
        strides=[2, 2],
        latent_dim=4,
        encoder_latent_dim=8,
        downsampling_ratio=4,
    ),
    "mmaudio_vocoder": diffusers(
        "MMAudioVocoder",
        (1, 8, 12),
        lambda m, x: m(x).sample,
        num_mels=8,
        upsample_initial_channel=16,
        upsample_rates=(4, 2),
        upsample_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3), (1, 3)),
    ),
    "minimax_vocoder": diffusers(
        "MiniMaxMusic3Vocoder",
        (1, 8, 12),
        lambda m, x: m(x),
        latent_channels=8,
        decoder_input_dim=16,
        decoder_hidden_dim=16,
        upsampling_ratios=(4, 2),
    ),
    "same": diffusers(
        "AutoencoderSAME",
        (1, 2, 128),
        lambda m, x: m(x).sample,
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=[2],
        encoder_strides=[4],
        encoder_transformer_depths=[1],
        latent_dim=4,
        dim_heads=8,
    ),
    "consistency_decoder": diffusers(
        "ConsistencyDecoderVAE",
        (1, 7, 16, 16),
        lambda m, x: m.decoder_unet(x, filled(x, value=3.0).long()).sample,
        encoder_block_out_channels=(16, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_norm_num_groups=4,
        decoder_block_out_channels=(16, 32),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        decoder_norm_num_groups=4,
        decoder_layers_per_block=1,
    ),
    "controlnet_union": diffusers(
        "ControlNetUnionModel",
        (1, 4, 16, 16),
        lambda m, x: (
            m(
                x,
                filled(x, value=7.0),
                filled(x, 4, 24),
                [nn.functional.interpolate(x[:, :3], scale_factor=8.0)],
                filled(x, 6),
                [1],
            ).mid_block_res_sample
        ),
        **UNET,
        layers_per_block=1,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(8, 8, 8, 8),
        addition_time_embed_dim=8,
        num_trans_channel=16,
        num_trans_head=2,
        num_proj_channel=16,
    ),
    "controlnet_xs": diffusers(
        "UNetControlNetXSModel",
        (1, 4, 16, 16),
        lambda m, x: (
            m(
                x,
                filled(x, value=7.0),
                filled(x, 4, 24),
                nn.functional.interpolate(x[:, :3], scale_factor=8.0),
            ).sample
        ),
        **UNET,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        num_attention_heads=4,
        ctrl_conditioning_embedding_out_channels=(8, 8, 8, 8),
        ctrl_block_out_channels=(8, 8),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
    ),
    "i2vgen": diffusers(
        "I2VGenXLUNet",
        (1, 4, 2, 16, 16),
        lambda m, x: (
            m(
                x,
                filled(x, value=7.0),
                fps=filled(x, value=8.0),
                image_latents=x * 0.5,
                image_embeddings=filled(x, 24, value=0.1),
                encoder_hidden_states=filled(x, 3, 24, value=0.2),
            ).sample
        ),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=24,
        layers_per_block=1,
        attention_head_dim=4,
        num_attention_heads=None,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
}

OTHERS: Mapping[str, Make] = {**VISION, **MONAI, **DIFFUSERS}
