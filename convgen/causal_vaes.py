"""Causal VAEs of diffusers as streams: functions of a VAE, a chunk and its caches, for `convgen.stream`.

| class | frames in the first chunk | in later chunks | caches |
|---|---|---|---|
| AutoencoderKLWan, AutoencoderKLQwenImage | n to decode, 1 + 4n to encode | n; 4n | two frames for each convolution |
| AutoencoderKLCogVideoX | its own first batch: 2 or 3; 8 or 9 | 2; 8 | two frames for each convolution |

The functions make the source's own calls with its own caches, so a stream makes what `_decode` and `_encode` make.
Other VAEs of diffusers have no caches from chunk to chunk: they decode whole videos, or tiles that are blended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from convgen.errors import InputError
from convgen.late import torch

FRAMES = 2  # frames of a cache: a kernel of three frames reads two before its own
REP = "Rep"  # the source's word for a cache that is still zeros


def adapter(module: Any, name: str) -> Callable[..., Any]:
    """The function that does `name` ("decode", "encode") with a VAE of the module's class.

    Raises:
        InputError: no such function is known.
    """
    kinds = [kind.__name__ for kind in type(module).__mro__]
    for kind in kinds:
        if name in KNOWN.get(kind, {}):
            return KNOWN[kind][name]
        if kind in WITHOUT:
            fact = f"{kind} has no caches from chunk to chunk: {WITHOUT[kind]}"
            raise InputError(fact, hint="parallelize its decoder for whole videos")
    known = ", ".join(f"{name} of {kind}" for kind, some in KNOWN.items() for name in some)
    fact = f"no stream is known of {name} of a {kinds[0]}"
    raise InputError(fact, hint=f"forward= with a function of the module, a chunk and caches=None; known: {known}")


# ---- Wan, Qwen-Image: a list with a cache for each convolution, which forward fills in place ----


def _through(part: Any, x: Any, feats: list[Any], **how: Any) -> Any:
    return part(x, feat_cache=feats, feat_idx=[0], **how)


def _feats(part: Any, caches: Any) -> list[Any]:
    count = sum(type(m).__name__.endswith("CausalConv3d") for m in part.modules())
    return [None] * count if caches is None else [REP if c is None else c for c in caches]


def _kept(feats: list[Any]) -> tuple[Any, ...]:
    """The caches as two frames each, the first one zeros where there is only one, as the convolutions pad; None for no
    cache, and for one that is still zeros."""

    def kept(cache: Any) -> Any:
        if cache is None or isinstance(cache, str):
            return None
        lacks = FRAMES - cache.shape[2]
        return torch.cat([torch.zeros_like(cache[:, :, :1])] * lacks + [cache], 2) if lacks > 0 else cache

    return tuple(map(kept, feats))


def _in_two(part: Any, x: Any, caches: Any, first: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Run a chunk through a VAE's part; the very first frame goes by itself."""
    feats = _feats(part, caches)
    made: list[Any] = []
    if caches is None:
        made.append(_through(part, x[:, :, :1], feats, **first))
        x = x[:, :, 1:]
    if x.shape[2]:
        made.append(_through(part, x, feats))
    return (torch.cat(made, 2) if len(made) > 1 else made[0]), _kept(feats)


def _beside(vae: Any) -> Any:
    """The library's file with the VAE's parts."""
    return sys.modules[type(vae.decoder).__module__]


def decode_wan(vae: Any, z: Any, caches: Any = None) -> Any:
    y, caches = _in_two(vae.decoder, vae.post_quant_conv(z), caches, {"first_chunk": True})
    if vae.config.patch_size is not None:
        y = _beside(vae).unpatchify(y, patch_size=vae.config.patch_size)
    return torch.clamp(y, min=-1.0, max=1.0), caches


def encode_wan(vae: Any, x: Any, caches: Any = None) -> Any:
    if vae.config.patch_size is not None:
        x = _beside(vae).patchify(x, patch_size=vae.config.patch_size)
    y, caches = _in_two(vae.encoder, x, caches, {})
    return vae.quant_conv(y), caches


def decode_qwen(vae: Any, z: Any, caches: Any = None) -> Any:
    y, caches = _in_two(vae.decoder, vae.post_quant_conv(z), caches, {})
    return torch.clamp(y, min=-1.0, max=1.0), caches


def encode_qwen(vae: Any, x: Any, caches: Any = None) -> Any:
    y, caches = _in_two(vae.encoder, x, caches, {})
    return vae.quant_conv(y), caches


# ---- CogVideoX: dicts of dicts, given and returned ----


def _last(cache: Any) -> Any:
    """The last two frames of each cache. Convolutions of one frame, which read none, return all frames of a chunk."""
    if isinstance(cache, dict):
        return {key: _last(one) for key, one in cast("dict[str, Any]", cache).items()}
    return None if cache is None else cache[:, :, -FRAMES:]


def decode_cogvideox(vae: Any, z: Any, caches: Any = None) -> Any:
    z = z if vae.post_quant_conv is None else vae.post_quant_conv(z)
    y, caches = vae.decoder(z, conv_cache=caches)
    return y, _last(caches)


def encode_cogvideox(vae: Any, x: Any, caches: Any = None) -> Any:
    y, caches = vae.encoder(x, conv_cache=caches)
    return (y if vae.quant_conv is None else vae.quant_conv(y)), _last(caches)


KNOWN: dict[str, dict[str, Callable[..., Any]]] = {
    "AutoencoderKLWan": {"decode": decode_wan, "encode": encode_wan},
    "AutoencoderKLQwenImage": {"decode": decode_qwen, "encode": encode_qwen},
    "AutoencoderKLCogVideoX": {"decode": decode_cogvideox, "encode": encode_cogvideox},
}
WITHOUT = {
    "AutoencoderKLHunyuanVideo": "the frames of its middle block attend to all before them",
    "AutoencoderKLLTXVideo": "each of its convolutions begins with copies of a chunk's own first frame",
}
