"""Pack and unpack kernels: boxes of a tensor to and from the buffer of a collective, where nothing is fused.

The address of an element is printed from an index map, as those of convolutions are.
"""

from __future__ import annotations

from typing import Any

from convgen.kernels.environment import environment
from convgen.kernels.index import IndexMap


def copy_source(dims: int) -> str:
    """The Triton function that copies boxes of tensors of so many dimensions, in memory order."""
    places = range(dims)
    tensor = IndexMap(tuple((f"i{d}", f"E{d}") for d in places))
    return (
        environment()
        .get_template("kernels/copy_boxes.py.jinja")
        .render(
            dims=dims,
            name=copy_name(dims),
            extents=[f"E{d}" for d in places[1:]],
            boxes=[f"B{d}" for d in places],
            place=tensor.text(**{f"i{d}": f"i{d}" for d in places}),
            indices=[_index(d, dims) for d in places],
        )
    )


def copy_name(dims: int) -> str:
    return f"copy_boxes_{dims}d"


def _index(d: int, dims: int) -> str:
    """Coordinate d of element i of a box."""
    inner = " * ".join(f"B{e}" for e in range(d + 1, dims))
    text = f"i // ({inner})" if d < dims - 2 else f"i // {inner}" if inner else "i"
    return f"{text} % B{d}" if d else text


def copy_module(dims: int) -> str:
    """A module of nothing but this function, as `kernel`."""
    head = "import triton\nimport triton.language as tl\n\n\n"
    return f"{head}{copy_source(dims)}\n\nkernel = {copy_name(dims)}\n"


def copy_launches(dims: int, dtype: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a pack and of an unpack, on tensors without memory: (pack or unpack, arguments, constants)."""
    import torch

    kind = torch.float32 if dtype == "tfloat32" else getattr(torch, dtype)
    flat, tensor = (torch.empty(16, dtype=kind, device="meta") for _ in range(2))
    boxes = torch.empty(16, dtype=torch.int64, device="meta")
    args = (flat, tensor, boxes, *[3] * (dims - 1))
    return [("pack" if not unpack else "unpack", args, {"UNPACK": unpack, "BLOCK": 1024}) for unpack in (False, True)]
