"""Models of timm: of each shape of an input the names, with random weights and ten classes."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.makers import SMALL, SQUARE, Make, timm

NAMES: Mapping[tuple[int, ...], str] = {
    SMALL: """
        convnextv2_atto efficientnet_lite0 mobilenetv4_conv_small ghostnet_100 res2net50_26w_4s resnest14d nfnet_l0
        resnetv2_50x1_bit regnetz_b16 repvgg_a0 dla34 dpn48b xception41 ese_vovnet19b_dw cspresnet50 cspdarknet53
        tresnet_m skresnet18 seresnet18 ecaresnet26t gernet_s lcnet_050 mobileone_s0 poolformer_s12
        inception_next_atto rexnet_100 selecsls42 gcresnet33ts repghostnet_050 starnet_s1 mambaout_femto hgnet_tiny
        hgnetv2_b0 repvit_m1 nasnetalarge densenet121 vovnet39a darknet53 mixnet_s fbnetc_100 legacy_seresnet18
        eca_nfnet_l0 dm_nfnet_f0 resnet26t resnetrs50 resnetaa50 resnetblur50 spnasnet_100 tinynet_e test_convnext
        test_efficientnet_evos test_nfnet regnetx_002 regnety_002 regnetv_040 regnetz_005 hardcorenas_a xception
        legacy_xception rdnet_tiny cspnext_tiny fasternet_t0 lcnetv2_small efficientnetv2_rw_t tf_efficientnetv2_b0
        tf_efficientnet_b0 tf_mobilenetv3_small_075 mobilenetv3_small_050 mobilenetv2_035 ghostnetv2_100
        ghostnetv3_100 res2next50 res2net50d resnest26d resnest50d_1s4x24d skresnext50_32x4d dpn68b nf_regnet_b0
        nf_resnet26 nf_ecaresnet26 repvgg_b0 cs3darknet_s cs3darknet_focus_s cspresnext50 mnasnet_small
        semnasnet_050 fbnetv3_b efficientnet_es efficientnet_cc_b0_4e mixnet_m tf_mixnet_s tinynet_a rexnetr_100
        selecsls60 poolformerv2_s12 mobileone_s1 ese_vovnet39b_evos eca_vovnet39b gcresnext26ts seresnext26ts
        inception_next_tiny starnet_s050 hgnetv2_b1 mobilenetv4_conv_blur_medium mobilenetv1_100
        mobilenet_edgetpu_v2_xs resnet33ts resnext26ts legacy_seresnext26_32x4d convnext_atto_ols convnext_atto_rms
        convnext_zepto_rms_ols densenetblur121d repvit_m0_9 test_resnet test_byobnet test_efficientnet_gn
        test_efficientnet_ln test_convnext2 test_convnext3 mobilenetv3_rw
    """,
    SQUARE: """
        mobilenetv4_hybrid_medium hrnet_w18_small edgenext_xx_small mobilevit_xxs mobilevitv2_050 fastvit_t8
        pvt_v2_b0 focalnet_tiny_srf davit_tiny xcit_nano_12_p8_224 nextvit_small caformer_s18 shvit_s1
        efficientvit_b0 twins_svt_small csatv2 cpubone_nano iformer_t lowformer_b0 swiftformer_xs hrnet_w18_small_v2
        dla46x_c dla60_res2net edgenext_x_small convformer_s18 fastvit_sa12 mobilevitv2_075 focalnet_tiny_lrf
        pvt_v2_b2_li shvit_s2 test_mambaout twins_pcpvt_small xcit_tiny_12_p16_224
    """,
    (1, 3, 224, 224): """
        hiera_tiny_224 gcvit_xxtiny pit_ti_224 sequencer2d_s convit_tiny nest_tiny resmlp_12_224 gmixer_24_224
        volo_d1_224 coat_tiny vitamin_small_224 swin_tiny_patch4_window7_224 vit_small_resnet26d_224 cait_xxs24_224
        tnt_s_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 sam2_hiera_tiny
        coatnet_pico_rw_224 coatnext_nano_rw_224 coatnet_bn_0_rw_224 haloregnetz_b efficientformerv2_s1
        swinv2_cr_tiny_ns_224 mvitv2_small_cls coat_lite_tiny
    """,
    (2, 3, 224, 224): """
        levit_128s efficientformer_l1 efficientformerv2_s0 mixer_s32_224 vit_tiny_patch16_224 coatnet_nano_rw_224
        swinv2_cr_tiny_224 tiny_vit_5m_224 mvitv2_tiny visformer_tiny efficientvim_m1 efficientvit_m0
        levit_conv_128s
    """,
    (1, 3, 64, 50): """
        repvgg_d2se cs3edgenet_x xception71 efficientnet_el_pruned efficientnet_x_b3 mobilenetv4_conv_aa_large
        resnetblur101d resnet51q resnet61q wide_resnet50_2 legacy_senet154 poolformer_s24
    """,
    (1, 3, 256, 256): """
        maxxvitv2_nano_rw_256 mobilenetv5_base swinv2_tiny_window8_256 maxvit_pico_rw_256 maxvit_rmlp_pico_rw_256
        eca_botnext26ts_256 eca_halonext26ts sehalonet33ts lamhalobotnet50ts_256 hiera_small_abswin_256
        vit_pwee_patch16_reg1_gap_256
    """,
    (2, 3, 64, 50): """
        vgg11 xception65 resnetv2_50d_evos resnetv2_50d_gn resnetv2_50d_frn resnet50_gn vgg11_bn
    """,
    (2, 3, 256, 256): "halonet26t lambda_resnet26t botnet26t_256 bat_resnext26ts lambda_resnet26rpt_256",
    (1, 3, 64, 64): "tresnet_v2_l efficientvit_l1 nextvit_base",
    (1, 3, 240, 240): "crossvit_9_240 crossvit_tiny_240",
    (2, 3, 160, 160): "test_vit_relpos test_vit",
    (2, 3, 56, 56): "convmixer_768_32",
    (2, 3, 96, 80): "inception_v4",
    (2, 3, 33, 40): "seresnextaa101d_32x8d",
    (1, 3, 128, 128): "samvit_base_patch16",
    (1, 3, 96, 90): "inception_resnet_v2",
    (2, 3, 96, 90): "inception_v3",
    (1, 3, 64, 66): "pnasnet5large",
    (2, 3, 70, 56): "convmixer_1024_20_ks9_p14",
}
TIMM: Mapping[str, Make] = {
    "timm_convnext": timm("convnext_atto"),
    **{f"timm_{name}": timm(name, shape) for shape, names in NAMES.items() for name in names.split()},
}
