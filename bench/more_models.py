"""Public models in small configurations: more of those of packages than bench/public_models.py has by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from public_makers import CUBE, IN_OUT, SMALL, SQUARE, VOLUME, Make, diffusers, monai, smp, timm, vision

IMAGE = (1, 3, 224, 224)


def by_image(name: str) -> Any:
    """A detector's features: lists of images are what its own forward takes."""

    def run(model: Any, x: torch.Tensor) -> Any:
        return [*getattr(model, name)(x).values()]

    return run


def backbone(make: Make) -> Make:
    def made() -> Any:
        from public_makers import Called

        model, shape = make()
        return Called(model.backbone, lambda m, x: [*m(x).values()]), shape

    return made


def _raft() -> Any:
    from public_makers import Called

    model, shape = vision("raft_small", (2, 3, 64, 66), "optical_flow")()
    return Called(model.feature_encoder, lambda m, x: m(x)), shape


VISION: Mapping[str, Make] = {
    "resnet50": vision("resnet50", num_classes=10),
    "shufflenet_v2_x0_5": vision("shufflenet_v2_x0_5"),
    "squeezenet1_1": vision("squeezenet1_1", num_classes=10),
    "mnasnet1_3": vision("mnasnet1_3", num_classes=10),
    "inception_v3_aux": vision("inception_v3", (2, 3, 299, 299), init_weights=False, num_classes=10),
    "fcn_aux": vision(
        "fcn_resnet50", (2, 3, 65, 50), "segmentation", num_classes=5, weights_backbone=None, aux_loss=True
    ),
    "s3d": vision("s3d", (1, 3, 16, 224, 224), "video", num_classes=7),
    "mvit_v1_b": vision("mvit_v1_b", (1, 3, 16, 224, 224), "video", num_classes=7),
    "fasterrcnn_fpn": backbone(vision("fasterrcnn_resnet50_fpn", (1, 3, 64, 66), "detection", weights_backbone=None)),
    "fasterrcnn_mobile_fpn": backbone(
        vision("fasterrcnn_mobilenet_v3_large_fpn", (1, 3, 64, 66), "detection", weights_backbone=None)
    ),
    "retinanet_fpn": backbone(vision("retinanet_resnet50_fpn", (1, 3, 64, 66), "detection", weights_backbone=None)),
    "ssd_backbone": backbone(vision("ssd300_vgg16", (1, 3, 300, 300), "detection", weights_backbone=None)),
    "ssdlite_backbone": backbone(
        vision("ssdlite320_mobilenet_v3_large", (1, 3, 320, 320), "detection", weights_backbone=None)
    ),
    "raft_features": _raft,
}


TIMM: Mapping[str, Make] = {
    f"timm_{name}": timm(name, shape)
    for name, shape in {
        "regnetx_002": SMALL,
        "regnety_002": SMALL,
        "regnetv_040": SMALL,
        "regnetz_005": SMALL,
        "hardcorenas_a": SMALL,
        "inception_resnet_v2": (1, 3, 96, 90),
        "inception_v3": (2, 3, 96, 90),
        "pnasnet5large": (1, 3, 64, 66),
        "xception": SMALL,
        "legacy_xception": SMALL,
        "rdnet_tiny": SMALL,
        "cspnext_tiny": SMALL,
        "fasternet_t0": SMALL,
        "lcnetv2_small": SMALL,
        "cpubone_nano": SQUARE,
        "efficientvim_m1": (2, 3, 224, 224),
        "efficientvit_m0": (2, 3, 224, 224),
        "iformer_t": SQUARE,
        "lowformer_b0": SQUARE,
        "mobilenetv5_base": (1, 3, 256, 256),
        "swiftformer_xs": SQUARE,
        "swin_tiny_patch4_window7_224": IMAGE,
        "swinv2_tiny_window8_256": (1, 3, 256, 256),
        "vit_small_resnet26d_224": IMAGE,
        "test_vit_relpos": (2, 3, 160, 160),
        "cait_xxs24_224": IMAGE,
        "tnt_s_patch16_224": IMAGE,
        "deit3_small_patch16_224": IMAGE,
        "beit_base_patch16_224": IMAGE,
        "eva02_tiny_patch14_224": IMAGE,
        "sam2_hiera_tiny": IMAGE,
        "efficientnetv2_rw_t": SMALL,
        "tf_efficientnetv2_b0": SMALL,
        "tf_efficientnet_b0": SMALL,
        "tf_mobilenetv3_small_075": SMALL,
        "mobilenetv3_small_050": SMALL,
        "mobilenetv2_035": SMALL,
        "ghostnetv2_100": SMALL,
        "ghostnetv3_100": SMALL,
        "hrnet_w18_small_v2": SQUARE,
        "res2next50": SMALL,
        "res2net50d": SMALL,
        "resnest26d": SMALL,
        "resnest50d_1s4x24d": SMALL,
        "skresnext50_32x4d": SMALL,
        "dla46x_c": SQUARE,
        "dla60_res2net": SQUARE,
        "dpn68b": SMALL,
        "nf_regnet_b0": SMALL,
        "nf_resnet26": SMALL,
        "nf_ecaresnet26": SMALL,
        "repvgg_b0": SMALL,
        "repvgg_d2se": (1, 3, 64, 50),
        "cs3darknet_s": SMALL,
        "cs3darknet_focus_s": SMALL,
        "cs3edgenet_x": (1, 3, 64, 50),
        "cspresnext50": SMALL,
        "xception65": (2, 3, 64, 50),
        "xception71": (1, 3, 64, 50),
        "mnasnet_small": SMALL,
        "semnasnet_050": SMALL,
        "fbnetv3_b": SMALL,
        "efficientnet_es": SMALL,
        "efficientnet_el_pruned": (1, 3, 64, 50),
        "efficientnet_cc_b0_4e": SMALL,
        "efficientnet_x_b3": (1, 3, 64, 50),
        "mixnet_m": SMALL,
        "tf_mixnet_s": SMALL,
        "tinynet_a": SMALL,
        "rexnetr_100": SMALL,
        "selecsls60": SMALL,
        "edgenext_x_small": SQUARE,
        "convmixer_1024_20_ks9_p14": (2, 3, 70, 56),
        "poolformerv2_s12": SMALL,
        "convformer_s18": SQUARE,
        "fastvit_sa12": SQUARE,
        "mobileone_s1": SMALL,
        "tresnet_v2_l": (1, 3, 64, 64),
        "ese_vovnet39b_evos": SMALL,
        "eca_vovnet39b": SMALL,
        "coatnet_pico_rw_224": IMAGE,
        "coatnext_nano_rw_224": IMAGE,
        "coatnet_bn_0_rw_224": IMAGE,
        "maxvit_pico_rw_256": (1, 3, 256, 256),
        "maxvit_rmlp_pico_rw_256": (1, 3, 256, 256),
        "levit_conv_128s": (2, 3, 224, 224),
        "gcresnext26ts": SMALL,
        "seresnext26ts": SMALL,
        "eca_botnext26ts_256": (1, 3, 256, 256),
        "eca_halonext26ts": (1, 3, 256, 256),
        "sehalonet33ts": (1, 3, 256, 256),
        "haloregnetz_b": (1, 3, 224, 224),
        "lamhalobotnet50ts_256": (1, 3, 256, 256),
        "lambda_resnet26rpt_256": (2, 3, 256, 256),
        "mobilevitv2_075": SQUARE,
        "efficientformerv2_s1": IMAGE,
        "inception_next_tiny": SMALL,
        "starnet_s050": SMALL,
        "focalnet_tiny_lrf": SQUARE,
        "pvt_v2_b2_li": SQUARE,
        "hgnetv2_b1": SMALL,
        "hiera_small_abswin_256": (1, 3, 256, 256),
        "mobilenetv4_conv_aa_large": (1, 3, 64, 50),
        "mobilenetv4_conv_blur_medium": SMALL,
        "mobilenetv1_100": SMALL,
        "mobilenet_edgetpu_v2_xs": SMALL,
        "resnetv2_50d_evos": (2, 3, 64, 50),
        "resnetv2_50d_gn": (2, 3, 64, 50),
        "resnetv2_50d_frn": (2, 3, 64, 50),
        "resnet50_gn": (2, 3, 64, 50),
        "resnetblur101d": (1, 3, 64, 50),
        "resnet33ts": SMALL,
        "resnext26ts": SMALL,
        "resnet51q": (1, 3, 64, 50),
        "resnet61q": (1, 3, 64, 50),
        "wide_resnet50_2": (1, 3, 64, 50),
        "legacy_senet154": (1, 3, 64, 50),
        "legacy_seresnext26_32x4d": SMALL,
        "convnext_atto_ols": SMALL,
        "convnext_atto_rms": SMALL,
        "convnext_zepto_rms_ols": SMALL,
        "densenetblur121d": SMALL,
        "vgg11_bn": (2, 3, 64, 50),
        "efficientvit_l1": (1, 3, 64, 64),
        "repvit_m0_9": SMALL,
        "shvit_s2": SQUARE,
        "test_resnet": SMALL,
        "test_byobnet": SMALL,
        "test_efficientnet_gn": SMALL,
        "test_efficientnet_ln": SMALL,
        "test_convnext2": SMALL,
        "test_convnext3": SMALL,
        "test_mambaout": SQUARE,
        "test_vit": (2, 3, 160, 160),
        "swinv2_cr_tiny_ns_224": IMAGE,
        "mvitv2_small_cls": IMAGE,
        "twins_pcpvt_small": SQUARE,
        "xcit_tiny_12_p16_224": SQUARE,
        "crossvit_tiny_240": (1, 3, 240, 240),
        "coat_lite_tiny": IMAGE,
        "poolformer_s24": (1, 3, 64, 50),
        "vit_pwee_patch16_reg1_gap_256": (1, 3, 256, 256),
        "vitamin_small_224": IMAGE,
        "mobilenetv3_rw": SMALL,
        "nextvit_base": (1, 3, 64, 64),
    }.items()
}


def _dints() -> Any:
    import importlib

    nets: Any = importlib.import_module("monai.networks.nets")
    space = nets.TopologySearch(channel_mul=0.2, num_blocks=2, num_depths=3, use_downsample=True, device="cpu")
    return nets.DiNTS(dints_space=space, in_channels=1, num_classes=2, use_downsample=True), (1, 1, 16, 16, 16)


MONAI: Mapping[str, Make] = {
    "monai_ahnet": monai("AHNet", (1, 1, 128, 128, 32), **IN_OUT),
    "monai_quicknat": monai("Quicknat", (2, 1, 64, 64), dims=0, num_channels=1, num_classes=3, num_filters=8),
    "monai_var_autoencoder": monai(
        "VarAutoEncoder",
        (2, 1, 16, 16, 16),
        run=lambda m, x: m.decode_forward(m.encode_forward(x)[1]),
        in_shape=(1, 16, 16, 16),
        out_channels=1,
        latent_size=4,
        channels=(4, 8),
        strides=(2, 2),
    ),
    "monai_generator": monai(
        "Generator", (2, 6), dims=0, latent_shape=(6,), start_shape=(4, 4, 4, 4), channels=(4, 4, 1), strides=(2, 2, 1)
    ),
    "monai_discriminator_dense": monai(
        "Discriminator", (2, 1, 16, 16, 16), dims=0, in_shape=(1, 16, 16, 16), channels=(4, 8), strides=(2, 2)
    ),
    "monai_regressor": monai(
        "Regressor",
        (2, 1, 16, 16, 16),
        dims=0,
        in_shape=(1, 16, 16, 16),
        out_shape=(3,),
        channels=(4, 8),
        strides=(2, 2),
    ),
    "monai_critic": monai(
        "Critic", (2, 1, 16, 16, 16), dims=0, in_shape=(1, 16, 16, 16), channels=(4, 8), strides=(2, 2)
    ),
    "monai_regunet": monai(
        "RegUNet",
        (1, 2, 16, 16, 16),
        in_channels=2,
        num_channel_initial=4,
        depth=2,
        out_channels=3,
        out_activation=None,
    ),
    "monai_vqvae": monai(
        "VQVAE",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m.decoder(m.encoder(x)),
        in_channels=1,
        out_channels=1,
        channels=(4, 8),
        num_res_layers=1,
        num_res_channels=(4, 8),
        downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
        upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
        num_embeddings=8,
        embedding_dim=4,
    ),
    "monai_seresnext50": monai("SEResNext50", (1, 1, 32, 32, 32), in_channels=1, num_classes=3),
    "monai_vit_autoenc": monai(
        "ViTAutoEnc",
        (1, 1, 32, 32, 32),
        run=lambda m, x: m(x)[0],
        in_channels=1,
        img_size=(32, 32, 32),
        patch_size=(16, 16, 16),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=4,
    ),
    "monai_multiscale_discriminator": monai(
        "MultiScalePatchDiscriminator",
        (1, 1, 64, 64),
        dims=2,
        num_d=2,
        channels=4,
        in_channels=1,
        num_layers_d=2,
        run=lambda m, x: m(x)[0],
    ),
    "monai_dints": _dints,
    "monai_controlnet": monai(
        "ControlNet",
        (1, 1, 16, 16, 16),
        run=lambda m, x: m(
            x, torch.full((x.shape[0],), 7.0, dtype=x.dtype), torch.nn.functional.interpolate(x, scale_factor=2.0)
        )[1],
        in_channels=1,
        channels=(8, 16),
        num_res_blocks=1,
        norm_num_groups=4,
        attention_levels=(False, True),
        num_head_channels=4,
        conditioning_embedding_in_channels=1,
        conditioning_embedding_num_channels=(8, 8),
    ),
    "monai_dynunet_ds": monai(
        "DynUNet",
        (2, 1, 16, 24, 16),
        **IN_OUT,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        filters=(4, 8, 16),
        deep_supervision=True,
        deep_supr_num=1,
    ),
    "monai_unet2d": monai("UNet", (3, 1, 32, 28), dims=2, **IN_OUT, channels=(4, 8, 16), strides=(2, 2)),
    "monai_unet_act_norm": monai(
        "UNet",
        VOLUME,
        **IN_OUT,
        channels=(4, 8, 16),
        strides=(2, 2),
        norm=("group", {"num_groups": 2}),
        act="MISH",
    ),
    "monai_resnet50": monai("resnet50", (1, 1, 32, 32, 32), n_input_channels=1, num_classes=2),
    "monai_densenet3d": monai("DenseNet121", CUBE, **IN_OUT),
    "monai_highresnet_bn": monai("HighResNet", (2, 1, 12, 10, 9), in_channels=1, out_channels=2, norm_type="instance"),
}


SMP: Mapping[str, Make] = {
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

LATENT = (1, 4, 3, 8, 6)
KL = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def decoded(m: Any, x: torch.Tensor) -> Any:
    return m.decode(x).sample


def coded(m: Any, x: torch.Tensor) -> Any:
    return m.encode(x).latent_dist.mode()


WAN = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
COGVIDEO = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "block_out_channels": (8, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "temporal_compression_ratio": 2,
}
HUNYUAN = {"latent_channels": 4, "block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
MOCHI = {
    "latent_channels": 4,
    "encoder_block_out_channels": (32, 32, 32, 32),
    "decoder_block_out_channels": (32, 32, 32, 32),
    "layers_per_block": (1,) * 5,
    "out_channels": 3,
    "latents_mean": (0.0,) * 4,
    "latents_std": (1.0,) * 4,
}
DIFFUSERS: Mapping[str, Make] = {
    "wan_decoder_3": diffusers("AutoencoderKLWan", (1, 4, 2, 8, 6), decoded, **WAN),
    "cogvideo_encoder": diffusers("AutoencoderKLCogVideoX", (1, 3, 5, 16, 12), coded, **COGVIDEO),
    "hunyuan_encoder": diffusers("AutoencoderKLHunyuanVideo", (1, 3, 5, 16, 16), coded, **HUNYUAN),
    "mochi_decoder": diffusers("AutoencoderKLMochi", (1, 4, 2, 4, 4), decoded, **MOCHI),
    "mochi_encoder": diffusers("AutoencoderKLMochi", (1, 3, 7, 16, 16), coded, **MOCHI),
    "ltx_encoder": diffusers(
        "AutoencoderKLLTXVideo",
        (1, 3, 9, 32, 32),
        coded,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    ),
    "allegro_encoder": diffusers(
        "AutoencoderKLAllegro",
        (1, 3, 8, 16, 16),
        lambda m, x: m.encoder(x),
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "cosmos_vae": diffusers(
        "AutoencoderKLCosmos",
        (1, 3, 9, 32, 32),
        lambda m, x: m.decode(m.encode(x).latent_dist.mode()).sample,
        latent_channels=4,
        encoder_block_out_channels=(8, 16),
        decode_block_out_channels=(8, 16),
        attention_resolutions=(8,),
        resolution=32,
        num_layers=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    ),
    "flux2_vae": diffusers("AutoencoderKLFlux2", (2, 3, 16, 24), coded, **KL),
    "hunyuan_image": diffusers(
        "AutoencoderKLHunyuanImage",
        (1, 3, 16, 16),
        coded,
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
    ),
    "hunyuan_image_decoder": diffusers(
        "AutoencoderKLHunyuanImage",
        (1, 8, 8, 8),
        decoded,
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
    ),
    "hunyuan15_decoder": diffusers(
        "AutoencoderKLHunyuanVideo15",
        (1, 8, 2, 4, 4),
        decoded,
        latent_channels=8,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    ),
    "oobleck": diffusers(
        "AutoencoderOobleck",
        (2, 2, 64),
        lambda m, x: m.decode(m.encode(x).latent_dist.mode()).sample,
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
        audio_channels=2,
    ),
    "vidtok": diffusers(
        "AutoencoderVidTok",
        (1, 3, 8, 16, 16),
        lambda m, x: m.encoder(x),
        ch=8,
        ch_mult=(1, 2),
        z_channels=4,
        num_res_blocks=1,
    ),
    "qwen_encoder": diffusers("AutoencoderKLQwenImage", (1, 3, 1, 16, 12), coded, **WAN),
    "unet2d_plain": diffusers(
        "UNet2DModel",
        (2, 3, 24, 16),
        lambda m, x: m(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype)).sample,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        in_channels=3,
        out_channels=3,
        attention_head_dim=8,
        down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        resnet_time_scale_shift="scale_shift",
    ),
    "unet2d_skip": diffusers(
        "UNet2DModel",
        (2, 3, 16, 16),
        lambda m, x: m(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype)).sample,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        in_channels=3,
        out_channels=3,
        attention_head_dim=8,
        down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"),
        freq_shift=1,
        flip_sin_to_cos=True,
        time_embedding_type="fourier",
    ),
    "unet_motion": diffusers(
        "UNetMotionModel",
        (1, 4, 2, 16, 16),
        lambda m, x: (
            m(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype), torch.zeros(x.shape[0], 4, 16, dtype=x.dtype)).sample
        ),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=4,
        num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        motion_num_attention_heads=2,
        motion_norm_num_groups=8,
    ),
    "ltx2_decoder": diffusers(
        "AutoencoderKLLTX2Video",
        (1, 8, 2, 4, 4),
        lambda m, x: m.decode(x).sample,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
    ),
    "t2i_adapter": diffusers(
        "T2IAdapter",
        (2, 3, 32, 32),
        lambda m, x: m(x),
        channels=[8, 16],
        num_res_blocks=1,
        downscale_factor=4,
        adapter_type="full_adapter",
    ),
}

PACKAGED: Mapping[str, Make] = {**VISION, **TIMM, **MONAI, **SMP, **DIFFUSERS}
