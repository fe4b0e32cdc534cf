"""More public models of transformers: sound, depth, backbones of detectors and segmenters, in small configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from public_makers import SMALL, SQUARE, Make
from torch import Tensor
from transformers_models import STAGES, V, hf, last, logits, px

SOUND: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "conv_dim": [8, 8, 8],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "attention_dropout": 0.0,
}
VOCODER: dict[str, Any] = {
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
}
BOTH = {"encoder": 1, "decoder": 1}


def maps(m: Any, x: Tensor) -> Any:
    return m(x).feature_maps


def heard(m: Any, x: Tensor) -> Any:
    """Without asking for a gradient where the input has one."""
    m.feature_extractor._requires_grad = False
    return last(m, x)


MORE_HF: Mapping[str, Make] = {
    "hf_encodec": hf(
        "EncodecModel",
        "EncodecConfig",
        (2, 1, 640),
        lambda m, x: m.decoder(m.encoder(x)),
        num_filters=4,
        hidden_size=16,
        upsampling_ratios=[4, 2],
        codebook_size=16,
    ),
    "hf_hubert": hf("HubertModel", "HubertConfig", (2, 1600), heard, **SOUND),
    "hf_wavlm": hf("WavLMModel", "WavLMConfig", (2, 1600), heard, **SOUND),
    "hf_sew": hf("SEWModel", "SEWConfig", (2, 1600), heard, **SOUND, squeeze_factor=2),
    "hf_whisper": hf(
        "WhisperModel",
        "WhisperConfig",
        (2, 8, 40),
        lambda m, x: m.encoder(x)[0],
        num_mel_bins=8,
        max_source_positions=20,
        d_model=24,
        **{
            f"{side}_{what}": n for side in BOTH for what, n in (("layers", 1), ("attention_heads", 3), ("ffn_dim", 32))
        },
        **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")},
        vocab_size=64,
    ),
    "hf_ast": hf(
        "ASTForAudioClassification",
        "ASTConfig",
        (2, 64, 16),
        logits,
        num_mel_bins=16,
        max_length=64,
        patch_size=8,
        time_stride=8,
        frequency_stride=8,
        **V,
    ),
    "hf_vits": hf(
        "VitsModel", "VitsConfig", (2, 12, 8), lambda m, x: m.decoder(x.transpose(1, 2)), flow_size=8, **VOCODER
    ),
    "hf_patchtst": hf(
        "PatchTSTModel",
        "PatchTSTConfig",
        (2, 32, 2),
        last,
        num_input_channels=2,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=32,
        num_hidden_layers=1,
    ),
    "hf_textnet": hf("TextNetForImageClassification", "TextNetConfig", SQUARE, logits),
    "hf_convnext_backbone": hf(
        "ConvNextBackbone", "ConvNextConfig", SMALL, maps, **STAGES, out_features=["stage1", "stage3"]
    ),
    "hf_vitpose": hf(
        "VitPoseBackbone",
        "VitPoseBackboneConfig",
        (1, 3, 64, 48),
        maps,
        image_size=[64, 48],
        patch_size=[16, 16],
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
    ),
    "hf_seggpt": hf(
        "SegGptModel",
        "SegGptConfig",
        (1, 3, 32, 32),
        lambda m, x: m(x, x * 0.5, x * 0.25)[0],
        image_size=[64, 32],
        patch_size=16,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        decoder_hidden_size=8,
        merge_index=0,
        intermediate_hidden_state_indices=[1],
        mlp_dim=32,
        pretrain_image_size=32,
    ),
    "hf_maskformer_swin": hf(
        "MaskFormerSwinBackbone",
        "MaskFormerSwinConfig",
        SQUARE,
        maps,
        image_size=64,
        embed_dim=12,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
        out_features=["stage1", "stage2"],
    ),
    "hf_zoedepth": hf(
        "ZoeDepthForDepthEstimation",
        "ZoeDepthConfig",
        (1, 3, 64, 64),
        px("predicted_depth"),
        backbone_config={
            "model_type": "beit",
            "image_size": 64,
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "out_features": ["stage1", "stage2"],
            "reshape_hidden_states": False,
        },
        neck_hidden_sizes=[8, 8],
        fusion_hidden_size=8,
        bottleneck_features=8,
        num_relative_features=8,
        reassemble_factors=[4, 2],
        hidden_size=24,
        backbone_out_indices=[1, 2],
    ),
    "hf_align": hf(
        "AlignVisionModel",
        "AlignVisionConfig",
        SMALL,
        last,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        image_size=64,
        hidden_dim=64,
    ),
    "hf_clap": hf(
        "ClapAudioModel",
        "ClapAudioConfig",
        (1, 1, 32, 16),
        lambda m, x: m(x)[0],
        spec_size=32,
        num_mel_bins=16,
        patch_embeds_hidden_size=8,
        patch_stride=4,
        patch_size=4,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        window_size=4,
        hidden_size=16,
    ),
    "hf_perceiver": hf(
        "PerceiverForImageClassificationConvProcessing",
        "PerceiverConfig",
        (1, 3, 224, 224),
        logits,
        num_latents=8,
        d_latents=16,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=1,
        num_labels=3,
    ),
}
