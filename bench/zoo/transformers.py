"""Models of transformers, small: its networks of images, video and sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zoo.makers import SMALL, SQUARE, Make, called, hf, maps, px, through

# fmt: off
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
LAYERS: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
V: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
SOUND: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32,
    "conv_dim": [8, 8, 8], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "attention_dropout": 0.0}
VOCODER: dict[str, Any] = {"upsample_initial_channel": 16, "upsample_rates": [4, 2], "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
SWIN: dict[str, Any] = {"image_size": 64, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SHORT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_frames": 4}
# fmt: on


def heard(m: Any, x: Tensor) -> Any:
    """Without asking for a gradient where the input has one."""
    m.feature_extractor._requires_grad = False
    return last(m, x)


logits, last, depth = (px(key) for key in ("logits", "last_hidden_state", "predicted_depth"))


# fmt: off
HF: Mapping[str, Make] = {
    "hf_resnet": hf("ResNetForImageClassification", "ResNetConfig", SMALL, logits, embedding_size=8,
        hidden_sizes=[8, 16], depths=[1, 2], num_labels=4),
    "hf_regnet": hf("RegNetForImageClassification", "RegNetConfig", SMALL, logits, embedding_size=8, **STAGES,
        groups_width=4),
    "hf_convnext": hf("ConvNextForImageClassification", "ConvNextConfig", SMALL, logits, **STAGES),
    "hf_convnextv2": hf("ConvNextV2ForImageClassification", "ConvNextV2Config", SMALL, logits, **STAGES),
    "hf_segformer": hf("SegformerForSemanticSegmentation", "SegformerConfig", SQUARE, logits, **STAGES,
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16),
    "hf_mobilevit": hf("MobileViTForSemanticSegmentation", "MobileViTConfig", SQUARE, logits, hidden_sizes=[24, 32, 40],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], num_attention_heads=4, image_size=64),
    "hf_mobilevitv2": hf("MobileViTV2ForImageClassification", "MobileViTV2Config", SQUARE, logits,
        width_multiplier=0.25, base_attn_unit_dims=[32, 48, 64], n_attn_blocks=[1, 1, 1], image_size=64),
    "hf_van": hf("PvtForImageClassification", "PvtConfig", SQUARE, logits, image_size=64, **STAGES,
        num_attention_heads=[1, 2, 2, 4]),
    "hf_pvtv2": hf("PvtV2ForImageClassification", "PvtV2Config", SQUARE, logits, image_size=64, **STAGES,
        num_attention_heads=[1, 2, 2, 4]),
    "hf_poolformer": hf("PoolFormerForImageClassification", "PoolFormerConfig", SMALL, logits, **STAGES),
    "hf_levit": hf("LevitForImageClassification", "LevitConfig", SQUARE, logits, image_size=64,
        hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 6], depths=[1, 1, 1], key_dim=[8, 8, 8]),
    "hf_focalnet": hf("FocalNetForImageClassification", "FocalNetConfig", SQUARE, logits, image_size=64, embed_dim=8,
        depths=[1, 1, 1, 1]),
    "hf_swin": hf("SwinForImageClassification", "SwinConfig", SQUARE, logits, **SWIN),
    "hf_swinv2": hf("Swinv2ForImageClassification", "Swinv2Config", SQUARE, logits, **SWIN),
    "hf_swin2sr": hf("Swin2SRForImageSuperResolution", "Swin2SRConfig", (2, 3, 16, 24), px("reconstruction"),
        image_size=16, embed_dim=12, depths=[2], num_heads=[2], window_size=4, upscale=2),
    "hf_donut": hf("DonutSwinModel", "DonutSwinConfig", SQUARE, last, image_size=64, embed_dim=12, depths=[1, 2],
        num_heads=[2, 4], window_size=4),
    "hf_hiera": hf("HieraForImageClassification", "HieraConfig", SQUARE, logits, image_size=[64, 64], embed_dim=8,
        depths=[1, 1, 2, 1]),
    "hf_vit": hf("ViTForImageClassification", "ViTConfig", SQUARE, logits, image_size=64, **V),
    "hf_vitdet": hf("VitDetModel", "VitDetConfig", SQUARE, last, image_size=64, patch_size=8, window_size=4,
        window_block_indices=[0], use_relative_position_embeddings=True, **LAYERS),
    "hf_beit": hf("BeitForSemanticSegmentation", "BeitConfig", SQUARE, logits, image_size=64, out_indices=[1, 2, 3, 4],
        hidden_size=24, num_hidden_layers=4, num_attention_heads=3, intermediate_size=48,
        use_relative_position_bias=True, pool_scales=[1, 2], use_auxiliary_head=False),
    "hf_data2vec": hf("Data2VecVisionModel", "Data2VecVisionConfig", SQUARE, last, image_size=64, **V,
        use_shared_relative_position_bias=True),
    "hf_dpt": hf("DPTForDepthEstimation", "DPTConfig", SQUARE, depth, image_size=64, patch_size=16,
        hidden_size=24, num_hidden_layers=4, num_attention_heads=3, intermediate_size=48,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8, is_hybrid=False),
    "hf_glpn": hf("GLPNForDepthEstimation", "GLPNConfig", SQUARE, depth, **STAGES,
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16),
    "hf_dinov2": hf("Dinov2Model", "Dinov2Config", (2, 3, 56, 70), last, image_size=56, patch_size=14, **LAYERS),
    "hf_dinov3": hf("DINOv3ConvNextModel", "DINOv3ConvNextConfig", SMALL, last, **STAGES),
    "hf_videomae": hf("VideoMAEForVideoClassification", "VideoMAEConfig", (2, 4, 3, 32, 32), logits, **SHORT, **V),
    "hf_vivit": hf("VivitForVideoClassification", "VivitConfig", (2, 4, 3, 32, 32), logits, image_size=32,
        tubelet_size=[2, 8, 8], num_frames=4, **V),
    "hf_timesformer": hf("TimesformerForVideoClassification", "TimesformerConfig", (2, 4, 3, 32, 32), logits, **SHORT,
        **V),
    "hf_vjepa2": hf("VJEPA2Model", "VJEPA2Config", (2, 4, 3, 32, 32), lambda m, x: m(x, skip_predictor=True)[0],
        crop_size=32, patch_size=8, frames_per_clip=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        pred_hidden_size=24, pred_num_attention_heads=2, pred_num_hidden_layers=1),
    "hf_mobilenet_v1": hf("MobileNetV1ForImageClassification", "MobileNetV1Config", SMALL, logits,
        depth_multiplier=0.25),
    "hf_mobilenet_v2": hf("MobileNetV2ForSemanticSegmentation", "MobileNetV2Config", SMALL, logits,
        depth_multiplier=0.35),
    "hf_bit": hf("BitForImageClassification", "BitConfig", SMALL, logits, embedding_size=16,
        hidden_sizes=[32, 32, 32, 64], depths=[1, 1, 1, 1], num_groups=4),
    "hf_swiftformer": hf("SwiftFormerForImageClassification", "SwiftFormerConfig", SQUARE, logits, image_size=64,
        embed_dims=[8, 16, 16, 32], depths=[1, 1, 1, 1]),
    "hf_superpoint": hf("SuperPointForKeypointDetection", "SuperPointConfig", (1, 3, 32, 40),
        lambda m, x: m.encoder(m.extract_one_channel_pixel_values(x))[0], encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16),
    "hf_yolos": hf("YolosForObjectDetection", "YolosConfig", SQUARE, logits, image_size=[64, 64], **V,
        num_detection_tokens=5),
    "hf_rtdetr_backbone": hf("RTDetrResNetBackbone", "RTDetrResNetConfig", SMALL, maps, embedding_size=8, **STAGES,
        out_features=["stage2", "stage4"]),
    "hf_hgnet": hf("HGNetV2ForImageClassification", "HGNetV2Config", SMALL, logits),
    "hf_sam": hf("SamVisionModel", "SamVisionConfig", SQUARE, px(0), image_size=64, patch_size=8, **LAYERS,
        window_size=3, global_attn_indexes=[1], output_channels=8, mlp_dim=32, num_pos_feats=8),
    "hf_clip": hf("CLIPVisionModel", "CLIPVisionConfig", SQUARE, last, image_size=64, patch_size=16, **V),
    "hf_siglip": hf("SiglipVisionModel", "SiglipVisionConfig", SQUARE, last, image_size=64, patch_size=16, **V),
    "hf_hifigan": hf("SpeechT5HifiGan", "SpeechT5HifiGanConfig", (2, 12, 8), called, model_in_dim=8, **VOCODER),
    "hf_univnet": hf("UnivNetModel", "UnivNetConfig", (2, 12, 8), lambda m, x: m(x, noise_sequence=x)[0],
        model_in_channels=8, model_hidden_channels=8, num_mel_bins=8, kernel_predictor_hidden_channels=8,
        resblock_kernel_sizes=[3, 3], resblock_stride_sizes=[2, 2], resblock_dilation_sizes=[[1, 3], [1, 3]],
        kernel_predictor_num_blocks=1),
    "hf_wav2vec2": hf("Wav2Vec2Model", "Wav2Vec2Config", (2, 1600), last, hidden_size=24, num_hidden_layers=1,
        num_attention_heads=3, intermediate_size=32, conv_dim=[8, 8, 8], conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3],
        num_feat_extract_layers=3, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
        layerdrop=0.0),
    "hf_encodec": hf("EncodecModel", "EncodecConfig", (2, 1, 640), through, num_filters=4, hidden_size=16,
        upsampling_ratios=[4, 2], codebook_size=16),
    "hf_hubert": hf("HubertModel", "HubertConfig", (2, 1600), heard, **SOUND),
    "hf_wavlm": hf("WavLMModel", "WavLMConfig", (2, 1600), heard, **SOUND),
    "hf_sew": hf("SEWModel", "SEWConfig", (2, 1600), heard, **SOUND, squeeze_factor=2),
    "hf_whisper": hf("WhisperModel", "WhisperConfig", (2, 8, 40), lambda m, x: m.encoder(x)[0], num_mel_bins=8,
        max_source_positions=20, d_model=24,
        **{f"{side}_{what}": n for side in ("encoder", "decoder")
           for what, n in (("layers", 1), ("attention_heads", 3), ("ffn_dim", 32))},
        **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")}, vocab_size=64),
    "hf_ast": hf("ASTForAudioClassification", "ASTConfig", (2, 64, 16), logits, num_mel_bins=16, max_length=64,
        patch_size=8, time_stride=8, frequency_stride=8, **V),
    "hf_vits": hf("VitsModel", "VitsConfig", (2, 12, 8), lambda m, x: m.decoder(x.transpose(1, 2)), flow_size=8,
        **VOCODER),
    "hf_patchtst": hf("PatchTSTModel", "PatchTSTConfig", (2, 32, 2), last, num_input_channels=2, context_length=32,
        patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, ffn_dim=32, num_hidden_layers=1),
    "hf_textnet": hf("TextNetForImageClassification", "TextNetConfig", SQUARE, logits),
    "hf_convnext_backbone": hf("ConvNextBackbone", "ConvNextConfig", SMALL, maps, **STAGES,
        out_features=["stage1", "stage3"]),
    "hf_vitpose": hf("VitPoseBackbone", "VitPoseBackboneConfig", (1, 3, 64, 48), maps, image_size=[64, 48],
        patch_size=[16, 16], **LAYERS),
    "hf_seggpt": hf("SegGptModel", "SegGptConfig", (1, 3, 32, 32), lambda m, x: m(x, x * 0.5, x * 0.25)[0],
        image_size=[64, 32], patch_size=16, **LAYERS, decoder_hidden_size=8, merge_index=0,
        intermediate_hidden_state_indices=[1], mlp_dim=32, pretrain_image_size=32),
    "hf_maskformer_swin": hf("MaskFormerSwinBackbone", "MaskFormerSwinConfig", SQUARE, maps, image_size=64,
        embed_dim=12, depths=[1, 2], num_heads=[2, 4], window_size=4, out_features=["stage1", "stage2"]),
    "hf_zoedepth": hf("ZoeDepthForDepthEstimation", "ZoeDepthConfig", (1, 3, 64, 64), depth,
        backbone_config={"model_type": "beit", "image_size": 64, "num_hidden_layers": 2, "hidden_size": 24,
            "intermediate_size": 32, "num_attention_heads": 2, "out_features": ["stage1", "stage2"],
            "reshape_hidden_states": False},
        neck_hidden_sizes=[8, 8], fusion_hidden_size=8, bottleneck_features=8, num_relative_features=8,
        reassemble_factors=[4, 2], hidden_size=24, backbone_out_indices=[1, 2]),
    "hf_align": hf("AlignVisionModel", "AlignVisionConfig", SMALL, last, width_coefficient=0.25, depth_coefficient=0.3,
        image_size=64, hidden_dim=64),
    "hf_clap": hf("ClapAudioModel", "ClapAudioConfig", (1, 1, 32, 16), px(0), spec_size=32, num_mel_bins=16,
        patch_embeds_hidden_size=8, patch_stride=4, patch_size=4, depths=[1, 1], num_attention_heads=[2, 2],
        window_size=4, hidden_size=16),
    "hf_perceiver": hf("PerceiverForImageClassificationConvProcessing", "PerceiverConfig", (1, 3, 224, 224), logits,
        num_latents=8, d_latents=16, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2,
        num_cross_attention_heads=1, num_labels=3),
}
