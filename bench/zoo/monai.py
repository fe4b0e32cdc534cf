"""Models of MONAI, small: networks of volumes, segmenters, autoencoders, denoisers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.makers import CUBE, IN_OUT, VOLUME, Called, Made, Make, filled, monai, px, through

# fmt: off
CODER: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "channels": (8, 16), "num_res_blocks": 1,
    "norm_num_groups": 4, "attention_levels": (False, True)}
NARROW: dict[str, Any] = {"init_filters": 8, "in_channels": 1, "out_channels": 2}
VIT: dict[str, Any] = {"in_channels": 1, "img_size": (32, 32, 32), "patch_size": (16, 16, 16), "hidden_size": 24,
    "mlp_dim": 32, "num_layers": 2, "num_heads": 4}
SHAPE_IN: dict[str, Any] = {"in_shape": (1, 16, 16, 16), "channels": (4, 8), "strides": (2, 2)}
# fmt: on


def labels(x: Tensor, count: int) -> Tensor:
    """Masks of as many labels."""
    return torch.cat([(x[:, :1] > k / 2).to(x.dtype) for k in range(count)], 1)


def nets() -> Any:
    return importlib.import_module("monai.networks.nets")


def dints() -> Made:
    space = nets().TopologySearch(channel_mul=0.2, num_blocks=2, num_depths=3, use_downsample=True, device="cpu")
    model = nets().DiNTS(dints_space=space, in_channels=1, num_classes=2, use_downsample=True)
    return model, (1, 1, 16, 16, 16)


def voxelmorph() -> Made:
    unet = nets().VoxelMorphUNet(
        spatial_dims=3, in_channels=2, unet_out_channels=8, channels=(8, 8, 8, 8), final_conv_channels=(8,)
    )
    model = nets().VoxelMorph(backbone=unet, integration_steps=2)
    return Called(model, lambda m, x: m(x[:, :1], x[:, 1:])), (1, 2, 16, 16, 16)


def adapter() -> Made:
    home: Any = importlib.import_module("torchvision.models")
    return nets().NetAdapter(home.resnet18(weights=None), num_classes=3, use_conv=True, pool=None), (2, 3, 64, 50)


# fmt: off
MONAI: Mapping[str, Make] = {
    "monai_unet": monai("UNet", **IN_OUT, channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "monai_basic_unet": monai("BasicUNet", (3, 1, 32, 32, 16), features=(4, 4, 8, 8, 16, 4)),
    "monai_attention_unet": monai("AttentionUnet", **IN_OUT, channels=(4, 8, 16), strides=(2, 2)),
    "monai_segresnet": monai("SegResNet", (2, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2),
        blocks_up=(1,)),
    "monai_segresnet_vae": monai("SegResNetVAE", (1, 1, 16, 16, 16), run=px(0), dims=0, input_image_size=(16, 16, 16),
        vae_estimate_std=True, init_filters=8, **IN_OUT, blocks_down=(1, 2), blocks_up=(1,)),
    "monai_segresnet_ds": monai("SegResNetDS", (2, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2, 2),
        dsdepth=2),
    "monai_dynunet": monai("DynUNet", (2, 1, 16, 24, 16), **IN_OUT, kernel_size=(3, 3, 3), strides=(1, 2, 2),
        upsample_kernel_size=(2, 2), filters=(4, 8, 16), deep_supervision=False, res_block=True),
    "monai_vnet": monai("VNet", (1, 1, 32, 32, 16), **IN_OUT),
    "monai_unetr": monai("UNETR", (1, 1, 32, 32, 32), **IN_OUT, img_size=32, feature_size=4, hidden_size=24, mlp_dim=32,
        num_heads=4),
    "monai_swin_unetr": monai("SwinUNETR", (1, 1, 64, 64, 64), **IN_OUT, feature_size=12, depths=(1, 1, 1, 1)),
    "monai_swin_unetr2d": monai("SwinUNETR", (2, 1, 64, 64), dims=2, **IN_OUT, feature_size=12, depths=(2, 2, 1, 1)),
    "monai_highresnet": monai("HighResNet", (2, 1, 12, 10, 9), in_channels=1, out_channels=2),
    "monai_densenet": monai("DenseNet121", CUBE, **IN_OUT, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
    "monai_resnet": monai("resnet18", CUBE, n_input_channels=1, num_classes=2),
    "monai_flexible_unet": monai("FlexibleUNet", (2, 3, 64, 64), dims=2, in_channels=3, out_channels=2,
        backbone="efficientnet-b0"),
    "monai_unet_pp": monai("BasicUNetPlusPlus", (1, 1, 16, 32, 16), features=(4, 4, 8, 8, 16, 4)),
    "monai_autoencoder": monai("AutoEncoder", (2, 1, 16, 24, 16), **IN_OUT, channels=(4, 8), strides=(2, 2)),
    "monai_mednext": monai("MedNeXt", (1, 1, 32, 32, 16), init_filters=4, **IN_OUT, blocks_down=(1, 1, 1, 1),
        blocks_bottleneck=1, blocks_up=(1, 1, 1, 1)),
    "monai_voxelmorph": monai("VoxelMorphUNet", (1, 2, 16, 16, 16), in_channels=2, unet_out_channels=8,
        channels=(8, 8, 8, 8), final_conv_channels=(8,)),
    "monai_kl": monai("AutoencoderKL", (1, 1, 16, 16, 16), run=through, **CODER, latent_channels=2),
    "monai_diffusion": monai("DiffusionModelUNet", (1, 1, 16, 16, 16), run=lambda m, x: m(x, filled(x, value=7.0)),
        **CODER, num_head_channels=4),
    "monai_discriminator": monai("PatchDiscriminator", (1, 1, 32, 32, 32), channels=4, in_channels=1, num_layers_d=2),
    "monai_senet": monai("SENet154", (2, 1, 64, 64), dims=2, in_channels=1, num_classes=3),
    "monai_vista": monai("ViT", (1, 1, 32, 32, 32), run=px(0), **VIT, classification=False),
    "monai_efficientnet": monai("EfficientNetBN", (2, 1, 64, 64), dims=2, model_name="efficientnet-b0",
        pretrained=False, in_channels=1, num_classes=3),
    "monai_localnet": monai("LocalNet", (1, 2, 16, 16, 16), in_channels=2, num_channel_initial=4,
        extract_levels=(0, 1, 2), out_channels=3, out_kernel_initializer="zeros", out_activation=None),
    "monai_hovernet": monai("HoVerNet", (1, 3, 256, 256), dims=0, run=lambda m, x: next(iter(m(x).values())),
        mode="fast", out_classes=3),
    "monai_ahnet": monai("AHNet", (1, 1, 128, 128, 32), **IN_OUT),
    "monai_quicknat": monai("Quicknat", (2, 1, 64, 64), dims=0, num_channels=1, num_classes=3, num_filters=8),
    "monai_var_autoencoder": monai("VarAutoEncoder", (2, 1, 16, 16, 16),
        run=lambda m, x: m.decode_forward(m.encode_forward(x)[1]), **SHAPE_IN, out_channels=1, latent_size=4),
    "monai_generator": monai("Generator", (2, 6), dims=0, latent_shape=(6,), start_shape=(4, 4, 4, 4),
        channels=(4, 4, 1), strides=(2, 2, 1)),
    "monai_discriminator_dense": monai("Discriminator", (2, 1, 16, 16, 16), dims=0, **SHAPE_IN),
    "monai_regressor": monai("Regressor", (2, 1, 16, 16, 16), dims=0, **SHAPE_IN, out_shape=(3,)),
    "monai_critic": monai("Critic", (2, 1, 16, 16, 16), dims=0, **SHAPE_IN),
    "monai_regunet": monai("RegUNet", (1, 2, 16, 16, 16), in_channels=2, num_channel_initial=4, depth=2, out_channels=3,
        out_activation=None),
    "monai_vqvae": monai("VQVAE", (1, 1, 16, 16, 16), run=through, in_channels=1, out_channels=1, channels=(4, 8),
        num_res_layers=1, num_res_channels=(4, 8), downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
        upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)), num_embeddings=8, embedding_dim=4),
    "monai_seresnext50": monai("SEResNext50", (1, 1, 32, 32, 32), in_channels=1, num_classes=3),
    "monai_vit_autoenc": monai("ViTAutoEnc", (1, 1, 32, 32, 32), run=px(0), **VIT),
    "monai_multiscale_discriminator": monai("MultiScalePatchDiscriminator", (1, 1, 64, 64), dims=2, num_d=2, channels=4,
        in_channels=1, num_layers_d=2, run=px(0)),
    "monai_dints": dints,
    "monai_controlnet": monai("ControlNet", (1, 1, 16, 16, 16),
        run=lambda m, x: m(x, filled(x, value=7.0), F.interpolate(x, scale_factor=2.0))[1], in_channels=1,
        channels=(8, 16), num_res_blocks=1, norm_num_groups=4, attention_levels=(False, True), num_head_channels=4,
        conditioning_embedding_in_channels=1, conditioning_embedding_num_channels=(8, 8)),
    "monai_dynunet_ds": monai("DynUNet", (2, 1, 16, 24, 16), **IN_OUT, kernel_size=(3, 3, 3), strides=(1, 2, 2),
        upsample_kernel_size=(2, 2), filters=(4, 8, 16), deep_supervision=True, deep_supr_num=1),
    "monai_unet2d": monai("UNet", (3, 1, 32, 28), dims=2, **IN_OUT, channels=(4, 8, 16), strides=(2, 2)),
    "monai_unet_act_norm": monai("UNet", VOLUME, **IN_OUT, channels=(4, 8, 16), strides=(2, 2),
        norm=("group", {"num_groups": 2}), act="MISH"),
    "monai_resnet50": monai("resnet50", (1, 1, 32, 32, 32), n_input_channels=1, num_classes=2),
    "monai_densenet3d": monai("DenseNet121", CUBE, **IN_OUT),
    "monai_highresnet_bn": monai("HighResNet", (2, 1, 12, 10, 9), in_channels=1, out_channels=2, norm_type="instance"),
    "monai_daf3d": monai("DAF3D", (1, 1, 32, 32, 32), dims=0, **IN_OUT),
    "monai_segresnet_ds2": monai("SegResNetDS2", (1, 1, 16, 24, 16), init_filters=8, **IN_OUT, blocks_down=(1, 2, 2),
        dsdepth=2),
    "monai_voxelmorph_whole": voxelmorph,
    "monai_spadenet": monai("SPADENet", (2, 3, 16, 16), run=lambda m, x: m(labels(x, 2))[0], dims=2, in_channels=1,
        out_channels=1, label_nc=2, input_shape=[16, 16], channels=[8, 16], z_dim=6, is_vae=False,
        spade_intermediate_channels=8),
    "monai_spade_kl": monai("SPADEAutoencoderKL", (1, 1, 16, 16, 16),
        run=lambda m, x: m.decode(m.encode(x)[0], labels(x, 2)), label_nc=2, num_res_blocks=(1, 1), channels=(8, 16),
        attention_levels=(False, True), norm_num_groups=4, spade_intermediate_channels=8),
    "monai_spade_diffusion": monai("SPADEDiffusionModelUNet", (1, 1, 16, 16, 16),
        run=lambda m, x: m(x, filled(x, value=7.0), labels(x, 2)), in_channels=1, out_channels=1, label_nc=2,
        num_res_blocks=(1, 1), channels=(8, 16), attention_levels=(False, True), norm_num_groups=4, num_head_channels=4,
        spade_intermediate_channels=8),
    "monai_diffusion_words": monai("DiffusionModelUNet", (2, 1, 16, 16),
        run=lambda m, x: m(x, filled(x, value=7.0), torch.sin(torch.arange(12.0)).view(1, 3, 4).repeat(len(x), 1, 1)),
        dims=2, **CODER, num_head_channels=4, with_conditioning=True, cross_attention_dim=4, resblock_updown=True),
    "monai_resnet_features": monai("ResNetFeatures", (2, 1, 40, 40, 40), model_name="resnet10", pretrained=False,
        in_channels=1),
    "monai_efficientnet_features": monai("EfficientNetBNFeatures", (1, 1, 64, 64), dims=2, model_name="efficientnet-b0",
        pretrained=False, in_channels=1),
    "monai_net_adapter": adapter,
    "monai_mil": monai("MILModel", (2, 3, 3, 64, 64), dims=0, num_classes=2, mil_mode="att_trans", pretrained=False,
        trans_blocks=1),
    "monai_classifier": monai("Classifier", (2, 1, 16, 16, 16), dims=0, **SHAPE_IN, classes=3),
    "monai_vista3d": monai("vista3d132", (1, 1, 32, 32, 32), lambda m, x: m(x, class_vector=torch.arange(2)), 0,
        ".vista3d", encoder_embed_dim=8, in_channels=1),
    "monai_unet_1d": monai("UNet", (3, 1, 52), dims=1, **IN_OUT, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    "monai_segresnet_2d": monai("SegResNet", (2, 1, 24, 40), dims=2, **IN_OUT, upsample_mode="deconv"),
}
