"""Models of diffusers, small: autoencoders of images, video and sound, denoisers, vocoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.makers import (
    Make,
    both,
    by_decoder,
    by_encoder,
    by_time,
    by_words,
    called,
    coded,
    decoded,
    diffusers,
    filled,
    sample,
)

# fmt: off
DENOISER: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
    "in_channels": 3, "out_channels": 3, "attention_head_dim": 8}
KL: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "block_out_channels": (16, 32), "layers_per_block": 1,
    "norm_num_groups": 8}
WAN: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1,
    "temperal_downsample": [True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
COGVIDEO: dict[str, Any] = {"down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2, "block_out_channels": (8, 16), "latent_channels": 4,
    "layers_per_block": 1, "norm_num_groups": 4, "temporal_compression_ratio": 2}
HUNYUAN: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8, 8, 16, 16), "layers_per_block": 1,
    "norm_num_groups": 4}
MOCHI: dict[str, Any] = {"latent_channels": 4, "encoder_block_out_channels": (32, 32, 32, 32),
    "decoder_block_out_channels": (32, 32, 32, 32), "layers_per_block": (1,) * 5, "out_channels": 3,
    "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
UNET: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 8, "cross_attention_dim": 24,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
LTX: dict[str, Any] = {"latent_channels": 8, "block_out_channels": (8, 8, 8, 8), "layers_per_block": (1,) * 5}
WORDS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
    "cross_attention_dim": 24, "attention_head_dim": 4}
VQ: dict[str, Any] = {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8}
IMAGE: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "latent_channels": 8, "block_out_channels": (32, 64),
    "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 16}
ONES: dict[str, Any] = {"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
# fmt: on


def controlled(m: Any, x: Tensor) -> Any:
    return m(x, filled(x, value=7.0), filled(x, 4, 24), F.interpolate(x[:, :3], scale_factor=8.0))


def controlled_by_several(m: Any, x: Tensor) -> Any:
    images = [F.interpolate(x[:, :3], scale_factor=8.0)]
    return m(x, filled(x, value=7.0), filled(x, 4, 24), images, filled(x, 6), [1]).mid_block_res_sample


def by_class(m: Any, x: Tensor) -> Any:
    """A denoiser at a time step, of a class."""
    time, label = torch.full((x.shape[0],), 7, dtype=torch.int64), torch.zeros(x.shape[0], dtype=torch.int64)
    return m(x, time, label).sample


def of_image(m: Any, x: Tensor) -> Any:
    """A denoiser of a video, beside its first image and words."""
    words, image = filled(x, 3, 24, value=0.2), filled(x, 24, value=0.1)
    fps = filled(x, value=8.0)
    return m(
        x, filled(x, value=7.0), fps=fps, image_latents=x * 0.5, image_embeddings=image, encoder_hidden_states=words
    ).sample


# fmt: off
DIFFUSERS: Mapping[str, Make] = {
    "diffusers_encoder": diffusers("AutoencoderKL", (3, 3, 26, 20), by_encoder, **KL),
    "diffusers_decoder": diffusers("AutoencoderKL", (3, 4, 13, 10), by_decoder, **KL),
    "diffusers_unet2d": diffusers("UNet2DModel", (3, 3, 26, 20), by_time, **DENOISER,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    "kl_mid_attention": diffusers("AutoencoderKL", (2, 3, 16, 16), both, **KL),
    "tiny_vae": diffusers("AutoencoderTiny", (2, 3, 16, 24), lambda m, x: m.decode(m.encode(x).latents).sample,
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1)),
    "vq_model": diffusers("VQModel", (2, 3, 16, 24),
        lambda m, x: m.decode(m.encode(x).latents, force_not_quantize=True).sample, **VQ),
    "vq_model_lookup": diffusers("VQModel", (2, 3, 16, 24), sample, **VQ, num_vq_embeddings=16),
    "dc_ae": diffusers("AutoencoderDC", (1, 3, 32, 32), lambda m, x: m.decode(m.encode(x).latent).sample,
        latent_channels=4, attention_head_dim=8, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,))),
    "unet2d_condition": diffusers("UNet2DConditionModel", (2, 4, 16, 12), by_words(24), **UNET, layers_per_block=1,
        attention_head_dim=4, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    "unet3d_condition": diffusers("UNet3DConditionModel", (1, 4, 3, 16, 12), by_words(24), **WORDS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
    "wan_decoder": diffusers("AutoencoderKLWan", (1, 4, 1, 8, 6), decoded, **WAN),
    "wan_encoder": diffusers("AutoencoderKLWan", (1, 3, 5, 16, 12), coded, **WAN),
    "qwen_decoder": diffusers("AutoencoderKLQwenImage", (1, 4, 1, 8, 6), decoded, **WAN),
    "cogvideo_vae": diffusers("AutoencoderKLCogVideoX", (1, 4, 2, 8, 6), decoded, **COGVIDEO),
    "hunyuan_vae": diffusers("AutoencoderKLHunyuanVideo", (1, 4, 2, 8, 6), decoded, **HUNYUAN),
    "ltx_vae": diffusers("AutoencoderKLLTXVideo", (1, 8, 2, 4, 4), decoded, **LTX,
        decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1,) * 5),
    "magvit_vae": diffusers("AutoencoderKLMagvit", (1, 4, 1, 8, 6), decoded, **HUNYUAN),
    "allegro_vae": diffusers("AutoencoderKLAllegro", (1, 4, 6, 8, 6), by_decoder, **HUNYUAN),
    "temporal_decoder": diffusers("AutoencoderKLTemporalDecoder", (4, 4, 8, 6),
        lambda m, x: m.decode(x, num_frames=2).sample, down_block_types=("DownEncoderBlock2D",) * 2,
        block_out_channels=(32, 32), layers_per_block=1),
    "asymmetric_vae": diffusers("AsymmetricAutoencoderKL", (2, 3, 16, 24), by_encoder,
        down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(16, 32),
        up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(16, 32), norm_num_groups=8),
    "unet1d": diffusers("UNet1DModel", (2, 14, 32), by_time, block_out_channels=(16, 16), in_channels=14,
        out_channels=14, down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",), act_fn="mish", out_block_type="OutConv1DBlock",
        mid_block_type="MidResTemporalBlock1D", norm_num_groups=8, time_embedding_type="positional",
        use_timestep_embedding=True, layers_per_block=1),
    "controlnet": diffusers("ControlNetModel", (2, 4, 16, 16), lambda m, x: controlled(m, x).mid_block_res_sample,
        **UNET, layers_per_block=1, attention_head_dim=4, conditioning_embedding_out_channels=(8, 8, 8, 8)),
    "dit": diffusers("DiTTransformer2DModel", (2, 4, 16, 16), by_class, num_attention_heads=2, attention_head_dim=8,
        in_channels=4, out_channels=4, num_layers=1, sample_size=16, patch_size=2),
    "spatiotemporal": diffusers("UNetSpatioTemporalConditionModel", (1, 2, 4, 16, 16),
        lambda m, x: m(x, filled(x, value=7.0), filled(x, 1, 24), filled(x, 3)).sample, in_channels=4, out_channels=4,
        block_out_channels=(32, 32), down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), layers_per_block=1,
        cross_attention_dim=24, num_attention_heads=(2, 4), addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24),
    "stable_cascade": diffusers("ConsistencyDecoderVAE", (1, 4, 8, 8),
        lambda m, x: m.encoder(F.interpolate(x[:, :3], scale_factor=2.0)), encoder_block_out_channels=(16, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2, encoder_norm_num_groups=4, encoder_layers_per_block=1),
    "wan_decoder_3": diffusers("AutoencoderKLWan", (1, 4, 2, 8, 6), decoded, **WAN),
    "cogvideo_encoder": diffusers("AutoencoderKLCogVideoX", (1, 3, 5, 16, 12), coded, **COGVIDEO),
    "hunyuan_encoder": diffusers("AutoencoderKLHunyuanVideo", (1, 3, 5, 16, 16), coded, **HUNYUAN),
    "mochi_decoder": diffusers("AutoencoderKLMochi", (1, 4, 2, 4, 4), decoded, **MOCHI),
    "mochi_encoder": diffusers("AutoencoderKLMochi", (1, 3, 7, 16, 16), coded, **MOCHI),
    "ltx_encoder": diffusers("AutoencoderKLLTXVideo", (1, 3, 9, 32, 32), coded, **LTX,
        decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1,) * 5),
    "allegro_encoder": diffusers("AutoencoderKLAllegro", (1, 3, 8, 16, 16), by_encoder, **HUNYUAN),
    "cosmos_vae": diffusers("AutoencoderKLCosmos", (1, 3, 9, 32, 32), both, latent_channels=4,
        encoder_block_out_channels=(8, 16), decode_block_out_channels=(8, 16), attention_resolutions=(8,),
        resolution=32, num_layers=1, spatial_compression_ratio=4, temporal_compression_ratio=4),
    "flux2_vae": diffusers("AutoencoderKLFlux2", (2, 3, 16, 24), coded, **KL),
    "hunyuan_image": diffusers("AutoencoderKLHunyuanImage", (1, 3, 16, 16), coded, **IMAGE),
    "hunyuan_image_decoder": diffusers("AutoencoderKLHunyuanImage", (1, 8, 8, 8), decoded, **IMAGE),
    "hunyuan15_decoder": diffusers("AutoencoderKLHunyuanVideo15", (1, 8, 2, 4, 4), decoded, latent_channels=8,
        block_out_channels=(32, 32, 32), layers_per_block=1, spatial_compression_ratio=4, temporal_compression_ratio=2),
    "oobleck": diffusers("AutoencoderOobleck", (2, 2, 64), both, encoder_hidden_size=8, downsampling_ratios=[2, 4],
        channel_multiples=[1, 2], decoder_channels=8, decoder_input_channels=4, audio_channels=2),
    "vidtok": diffusers("AutoencoderVidTok", (1, 3, 8, 16, 16), by_encoder, ch=8, ch_mult=(1, 2), z_channels=4,
        num_res_blocks=1),
    "qwen_encoder": diffusers("AutoencoderKLQwenImage", (1, 3, 1, 16, 12), coded, **WAN),
    "unet2d_plain": diffusers("UNet2DModel", (2, 3, 24, 16), by_time, **DENOISER,
        down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"), resnet_time_scale_shift="scale_shift"),
    "unet2d_skip": diffusers("UNet2DModel", (2, 3, 16, 16), by_time, **DENOISER,
        down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"), freq_shift=1, flip_sin_to_cos=True,
        time_embedding_type="fourier"),
    "unet_motion": diffusers("UNetMotionModel", (1, 4, 2, 16, 16),
        lambda m, x: m(x, filled(x, value=7.0), filled(x, 4, 16)).sample, block_out_channels=(16, 32),
        layers_per_block=1, norm_num_groups=8, cross_attention_dim=16, attention_head_dim=4, num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), motion_num_attention_heads=2,
        motion_norm_num_groups=8),
    "ltx2_decoder": diffusers("AutoencoderKLLTX2Video", (1, 8, 2, 4, 4), decoded, **LTX,
        decoder_block_out_channels=(8, 8, 8), decoder_layers_per_block=(1,) * 4),
    "t2i_adapter": diffusers("T2IAdapter", (2, 3, 32, 32), called, channels=[8, 16], num_res_blocks=1,
        downscale_factor=4, adapter_type="full_adapter"),
    "hunyuan_refiner": diffusers("AutoencoderKLHunyuanImageRefiner", (1, 3, 5, 16, 16), both, latent_channels=8,
        block_out_channels=(32, 32), layers_per_block=1, spatial_compression_ratio=2, temporal_compression_ratio=2),
    "kvae": diffusers("AutoencoderKLKVAE", (1, 3, 16, 16), both, channels=32, num_enc_blocks=1, num_dec_blocks=1,
        z_channels=4, ch_mult=(1, 2)),
    "kvae_video": diffusers("AutoencoderKLKVAEVideo", (1, 3, 5, 16, 16), both, ch=32, ch_mult=(1, 2), num_res_blocks=1,
        z_channels=4, temporal_compress_times=2),
    "kvae_audio": diffusers("AutoencoderKLKVAEAudio", (1, 1, 72), both, encoder_dim=8, encoder_rates=[2, 3],
        latent_dim=16, codebook_dim=8, decoder_dim=16, decoder_rates=[3, 2], attn_num_heads=2),
    "ltx2_audio": diffusers("AutoencoderKLLTX2Audio", (1, 2, 16, 16), both, base_channels=16, ch_mult=(1, 2),
        num_res_blocks=1, resolution=16, latent_channels=4, mel_bins=16),
    "minimax_h3": diffusers("AutoencoderKLMiniMaxH3", (1, 3, 5, 16, 16), coded, latent_channels=4,
        block_out_channels=(16, 16), layers_per_block=1, spatial_downsample_factors=(2, 1),
        temporal_downsample_factors=(1, 2), norm_num_groups=8, decoder_num_layers=1, decoder_num_attention_heads=2,
        decoder_attention_head_dim=16, clip_length=5, token_drop=1, **ONES),
    "minimax_h3_audio": diffusers("AutoencoderKLMiniMaxH3Audio", (1, 1, 64), both, encoder_dim=8, encoder_rates=(2, 4),
        latent_dim=16, latent_channels=4, num_attention_heads=2, decoder_dim=16, decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4), resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3),)),
    "kandinsky_sr": diffusers("Kandinsky6SRVAE", (1, 3, 5, 16, 16), both, latent_channels=4,
        encoder_block_out_channels=(16, 32, 32), decoder_block_out_channels=(16, 32, 32), layers_per_block=1,
        temporal_compression_ratio=2),
    "longcat_audio": diffusers("LongCatAudioDiTVae", (1, 1, 64), by_encoder, channels=8, c_mults=[1, 2], strides=[2, 2],
        latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4),
    "mmaudio_vocoder": diffusers("MMAudioVocoder", (1, 8, 12), sample, num_mels=8, upsample_initial_channel=16,
        upsample_rates=(4, 2), upsample_kernel_sizes=(8, 4), resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3), (1, 3))),
    "minimax_vocoder": diffusers("MiniMaxMusic3Vocoder", (1, 8, 12), called, latent_channels=8, decoder_input_dim=16,
        decoder_hidden_dim=16, upsampling_ratios=(4, 2)),
    "same": diffusers("AutoencoderSAME", (1, 2, 128), sample, patch_size=4, encoder_channels=8, encoder_c_mults=[2],
        encoder_strides=[4], encoder_transformer_depths=[1], latent_dim=4, dim_heads=8),
    "consistency_decoder": diffusers("ConsistencyDecoderVAE", (1, 7, 16, 16),
        lambda m, x: m.decoder_unet(x, filled(x, value=3.0).long()).sample, encoder_block_out_channels=(16, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2, encoder_norm_num_groups=4,
        decoder_block_out_channels=(16, 32), decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2, decoder_norm_num_groups=4, decoder_layers_per_block=1),
    "controlnet_union": diffusers("ControlNetUnionModel", (1, 4, 16, 16), controlled_by_several, **UNET,
        layers_per_block=1, attention_head_dim=4, conditioning_embedding_out_channels=(8, 8, 8, 8),
        addition_time_embed_dim=8, num_trans_channel=16, num_trans_head=2, num_proj_channel=16),
    "controlnet_xs": diffusers("UNetControlNetXSModel", (1, 4, 16, 16), lambda m, x: controlled(m, x).sample, **UNET,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), num_attention_heads=4,
        ctrl_conditioning_embedding_out_channels=(8, 8, 8, 8), ctrl_block_out_channels=(8, 8),
        ctrl_num_attention_heads=2, ctrl_max_norm_num_groups=4),
    "i2vgen": diffusers("I2VGenXLUNet", (1, 4, 2, 16, 16), of_image, **WORDS, num_attention_heads=None,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
}
