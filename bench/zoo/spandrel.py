"""Models of spandrel, small: networks that restore images and enlarge them."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.makers import Make, px, spandrel

SWIN = {"img_size": 16, "embed_dim": 12}

# fmt: off
RESTORATION: Mapping[str, Make] = {
    "sr_atd": spandrel("ATD", "atd_arch", "ATD", **SWIN, depths=(2,), num_heads=(2,), window_size=8, category_size=16,
        num_tokens=8, upscale=2, upsampler="pixelshuffledirect"),
    "sr_compact": spandrel("Compact", "SRVGG", "SRVGGNetCompact", num_feat=8, num_conv=3, upscale=2),
    "sr_ditn": spandrel("DITN", "DITN_Real", "DITN_Real", dim=12, ITL_blocks=1, SAL_blocks=1, UFONE_blocks=1,
        upscale=2),
    "sr_drct": spandrel("DRCT", "drct_arch", "DRCT", **SWIN, depths=(6,), num_heads=(2,), window_size=8, upscale=2,
        upsampler="pixelshuffle", gc=4, drop_path_rate=0.0),
    "sr_drunet": spandrel("DRUNet", "network_unet", "DRUNet", in_nc=3, out_nc=3, nc=[8, 8, 16, 16], nb=1),
    "sr_fdat": spandrel("FDAT", "fdat", "FDAT", scale=2, embed_dim=16, num_groups=1, depth_per_group=2, num_heads=2,
        drop_path_rate=0.0, mid_dim=8),
    "sr_fftformer": spandrel("FFTformer", "fftformer_arch", "FFTformer", (1, 3, 32, 32), dim=8, num_blocks=[1, 1, 1],
        num_refinement_blocks=1),
    "sr_grl": spandrel("GRL", "grl", "GRL", (1, 3, 16, 16), img_size=16, embed_dim=16, upscale=2,
        upsampler="pixelshuffledirect", depths=[2], num_heads_window=[2], num_heads_stripe=[2], window_size=8,
        stripe_size=[8, 8]),
    "sr_hat": spandrel("HAT", "HAT", "HAT", **SWIN, depths=(2,), num_heads=(2,), window_size=8, squeeze_factor=4,
        upscale=2, upsampler="pixelshuffle", drop_path_rate=0.0),
    "sr_kbnet_s": spandrel("KBNet", "kbnet_s", "KBNet_s", width=8, middle_blk_num=1, enc_blk_nums=[1, 1],
        dec_blk_nums=[1, 1]),
    "sr_mmrealsr": spandrel("MMRealSR", "mmrealsr_arch", "MMRRDBNet_test", num_in_ch=3, num_out_ch=3, num_feat=8,
        num_block=1, num_grow_ch=4, num_feats=[8, 8, 8, 8], num_blocks=[1, 1, 1, 1]),
    "sr_moesr": spandrel("MoESR", "MoESR", "MoESR", scale=2, dim=16, n_blocks=1, n_block=1, upsample_dim=8),
    "sr_mosr": spandrel("MoSR", "mosr_arch", "MoSR", upscale=2, n_block=2, dim=16),
    "sr_mosr_dys": spandrel("MoSR", "mosr_arch", "MoSR", upscale=2, n_block=2, dim=16, upsampler="dys"),
    "sr_mosr_gps": spandrel("MoSR", "mosr_arch", "MoSR", upscale=2, n_block=2, dim=16, upsampler="gps"),
    "sr_omnisr": spandrel("OmniSR", "OmniSR", "OmniSR", num_feat=16, res_num=1, up_scale=2),
    "sr_plksr": spandrel("PLKSR", "PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "sr_plksr_sparse": spandrel("PLKSR", "PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2,
        lk_type="RectSparsePLK", ccm_type="DCCM"),
    "sr_plksr_sparse2": spandrel("PLKSR", "PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2, lk_type="SparsePLK",
        ccm_type="ICCM", with_idt=True),
    "sr_realplksr": spandrel("PLKSR", "RealPLKSR", "RealPLKSR", dim=16, n_blocks=2, upscaling_factor=2, dysample=True),
    "sr_cugan2": spandrel("RealCUGAN", "upcunet_v3", "UpCunet2x", (1, 3, 24, 24)),
    "sr_cugan3": spandrel("RealCUGAN", "upcunet_v3", "UpCunet3x", (1, 3, 24, 24)),
    "sr_cugan4": spandrel("RealCUGAN", "upcunet_v3", "UpCunet4x", (1, 3, 24, 24)),
    "sr_restoreformer": spandrel("RestoreFormer", "restoreformer_arch", "RestoreFormer", (1, 3, 32, 32), px(0),
        n_embed=16, embed_dim=16, ch=32, ch_mult=(1, 2), num_res_blocks=1, attn_resolutions=(16,), resolution=32,
        z_channels=16, head_size=4),
    "sr_retinexformer": spandrel("RetinexFormer", "retinexformer_arch", "RetinexFormer", n_feat=8, stage=2),
    "sr_safmn": spandrel("SAFMN", "safmn", "SAFMN", dim=16, n_blocks=2, upscaling_factor=2),
    "sr_safmnbcie": spandrel("SAFMNBCIE", "safmn_bcie", "SAFMN_BCIE", dim=16, n_blocks=1, num_layers=1),
    "sr_span": spandrel("SPAN", "span", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2),
    "sr_seemore": spandrel("SeemoRe", "seemore_arch", "SeemoRe", scale=2, num_experts=3, num_layers=2,
        embedding_dim=16),
    "sr_swiftsrgan": spandrel("SwiftSRGAN", "SwiftSRGAN", "Generator", num_channels=8, num_blocks=2),
    "sr_swin2sr": spandrel("Swin2SR", "Swin2SR", "Swin2SR", **SWIN, depths=[2], num_heads=[2], window_size=4,
        upsampler="nearest+conv", upscale=4, drop_path_rate=0.0),
    "sr_swinir": spandrel("SwinIR", "SwinIR", "SwinIR", **SWIN, depths=[2], num_heads=[2], window_size=4,
        upsampler="pixelshuffle", upscale=2, resi_connection="3conv", drop_path_rate=0.0),
    "sr_uformer": spandrel("Uformer", "Uformer", "Uformer", (1, 3, 64, 64), img_size=64, embed_dim=8, depths=[1] * 9,
        num_heads=[1, 1, 2, 2, 2, 2, 2, 1, 1], win_size=2, drop_path_rate=0.0),
    "sr_ipt": spandrel("IPT", "ipt", "IPT", (1, 3, 12, 12), patch_size=12, patch_dim=3, n_feats=8, scale=[2],
        num_heads=2, num_layers=1),
    "sr_esrgan_plus": spandrel("ESRGAN", "RRDB", "RRDBNet", num_filters=8, num_blocks=1, plus=True),
}
