"""Tensors in a file of the safetensors format, without its package.

A u64 (little-endian) with the header's length, a header in JSON that says dtype, shape and place of each tensor, and
their bytes, little-endian and in C order.

Source:
    https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.spec.text import open_bytes

if TYPE_CHECKING:
    import torch

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "uint8": "U8",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
DTYPES = {code: name for name, code in CODES.items()}
ALIGNMENT = 8  # bytes that a header's length is a multiple of, with spaces


def tensors_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file of some tensors; the same bytes for the same tensors.

    Raises:
        InputError: a dtype that the format or convgen doesn't have.
    """
    import torch

    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in CODES:
            raise InputError(f"{name} has the dtype {dtype}, which no file holds", hint=f"one of {', '.join(CODES)}")
        raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        header[name] = {"dtype": CODES[dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        parts.append(raw)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a file.

    Raises:
        InputError: it can't be read, or is none of the format.
    """
    try:
        raw = open_bytes(path, -1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"can't read {path}: {reason}", where=str(path), hint="convgen import ...") from None
    try:
        return _tensors(raw)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        fact = f"{path} is no whole safetensors file: {error}"
        raise InputError(fact, where=str(path), hint="write it again with convgen import") from None


def _tensors(raw: bytes) -> dict[str, torch.Tensor]:
    import torch

    start = 8 + int.from_bytes(raw[:8], "little")
    if len(raw) < start:
        raise ValueError(f"{len(raw)} bytes, its header alone ends at {start}")
    header = cast("dict[str, dict[str, Any]]", json.loads(raw[8:start]))
    found: dict[str, torch.Tensor] = {}
    for name, said in header.items():
        if name == "__metadata__":
            continue
        dtype = cast("torch.dtype", getattr(torch, DTYPES[said["dtype"]]))
        shape, (lo, hi) = [int(n) for n in said["shape"]], said["data_offsets"]
        part = bytearray(raw[start + lo : start + hi])
        if len(part) != hi - lo or len(part) != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} has {len(part)} bytes")
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    return found
