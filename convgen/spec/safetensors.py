"""Tensors in a file of the safetensors format, without its package.

The file is a u64 (little-endian) with the header's length; a header in JSON with the dtype, shape and place of each
tensor; and the tensors' bytes, little-endian and in C order.

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
from convgen.spec.text import once, open_bytes, shown

if TYPE_CHECKING:
    import torch

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "uint8": "U8",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
DTYPES = {code: name for name, code in CODES.items()}
ALIGNMENT = 8  # bytes; spaces make a header's length a multiple of it


def tensors_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file with some tensors, as bytes; equal tensors give equal bytes.

    Raises:
        InputError: a tensor has a dtype that the format or convgen lacks.
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
        InputError: the file can't be read, or has another format.
    """
    try:
        raw = open_bytes(path, -1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"can't read {path}: {reason}", where=str(path), hint="convgen import ...") from None
    try:
        return _tensors(raw)
    except (ValueError, RecursionError, RuntimeError) as error:  # extents may be more than torch multiplies
        fact = f"{path} is no whole safetensors file: {error}"
        raise InputError(fact, where=str(path), hint="write it again with convgen import") from None


def _tensors(raw: bytes) -> dict[str, torch.Tensor]:
    """The tensors in a file's bytes, which must stand one behind the other, each of exactly one tensor."""
    import torch

    start = 8 + int.from_bytes(raw[:8], "little")
    if len(raw) < start:
        raise ValueError(f"{len(raw)} bytes, its header alone ends at {start}")
    header: object = json.loads(raw[8:start], object_pairs_hook=once)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    said = {str(k): v for k, v in cast("dict[object, object]", header).items() if k != "__metadata__"}
    places = sorted((_place(name, one) for name, one in said.items()), key=lambda p: p[3:])
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, code, shape, lo, hi in places:
        dtype = cast("torch.dtype", getattr(torch, DTYPES[code]))
        if lo != at or hi > len(raw) - start:
            raise ValueError(f"{name} can't have bytes {lo} to {hi} of {len(raw) - start}, the one before ends at {at}")
        if hi - lo != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} has {hi - lo} bytes")
        part = bytearray(memoryview(raw)[start + lo : start + hi])
        if code == "BOOL" and part.strip(b"\0\1"):
            raise ValueError(f"{name} has truth values other than 0 and 1")
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
        at = hi
    if at != len(raw) - start:
        raise ValueError(f"{len(raw) - start - at} bytes are of no tensor")
    return {name: found[name] for name in said}


def _place(name: str, said: object) -> tuple[str, str, list[int], int, int]:
    """A tensor's name, dtype code and shape, and where its bytes begin and end."""
    known = cast("dict[str, object]", said if isinstance(said, dict) else {})
    code, shape, ends = (known.get(key) for key in ("dtype", "shape", "data_offsets"))
    if len(known) == 3 and isinstance(code, str) and isinstance(shape, list) and isinstance(ends, list):
        sizes, places = cast("list[object]", shape), cast("list[object]", ends)
        numbers = [n for n in (*sizes, *places) if type(n) is int and 0 <= n < 1 << 63]
        if code in DTYPES and len(places) == 2 and len(numbers) == len(sizes) + 2:
            return name, code, numbers[:-2], numbers[-2], numbers[-1]
    raise ValueError(f"{name} can't be {shown(cast('object', said))}")
