"""The kernel of ordered sums: a rank's pieces, one of each rank, read once, added in rank order, written once."""

from __future__ import annotations

from math import gcd
from typing import Any

from convgen.kernels.environment import environment

NAME = "add_pieces"
FILE = "ordered_sums"  # a network's module of it
BLOCK = 1024


def add_source(dtype: str, name: str = NAME, *, open: bool = False) -> str:
    """The Triton function, for pieces of a layer's dtype; float64 is added in float64, all else in float32.

    Args:
        open: it is compiled once for any number of elements, but for what that is a multiple of.
    """
    wide = "tl.float64" if dtype == "float64" else "tl.float32"
    return (
        environment().get_template("kernels/add_pieces.py.jinja").render(wide=wide, name=name, open=open).rstrip("\n")
    )


def sums_module() -> str:
    """A network's module: `add` of equal pieces of any type of floats."""
    sources = [add_source("float32", open=True), add_source("float64", "add_doubles", open=True)]
    return environment().get_template("kernels/ordered_sums.py.jinja").render(sources=sources, block=BLOCK)


def add_module(dtype: str) -> str:
    """A module of nothing but this function, as `kernel`."""
    return f"import triton\nimport triton.language as tl\n\n\n{add_source(dtype)}\n\n\nkernel = {NAME}\n"


def unit(element_bytes: int) -> int:
    """Elements of 16 bytes, which pieces are read by where they are a multiple of them."""
    return 16 // element_bytes


def add_arguments(elements: int, pieces: int, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a launch on tensors without memory: arguments and constants.

    Args:
        elements: of a piece.
    """
    from convgen.kernels.torch_types import TORCH_DTYPES, torch

    given, out = (torch.empty(16, dtype=TORCH_DTYPES[dtype], device="meta") for _ in range(2))
    whole = gcd(elements, unit(given.element_size()))
    return (given, out, elements), {"PIECES": pieces, "UNIT": whole, "BLOCK": BLOCK, "num_warps": 4}


def moved_bytes(elements: int, pieces: int, element_bytes: int) -> int:
    """Every piece read once, and their sum written."""
    return (pieces + 1) * elements * element_bytes
