"""A layer's dtypes as torch has them."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
