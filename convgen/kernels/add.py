"""The kernel of ordered sums: a rank's pieces, one of each rank, read once, added in rank order, written once."""

from __future__ import annotations

from math import gcd
from typing import Any

from convgen.kernels.environment import environment

NAME = "add_pieces"
FILE = "ordered_sums"  # the file's name in a package
BLOCK = 1024


def add_source(dtype: str, name: str = NAME, *, open: bool = False) -> str:
    """The Triton function, for pieces of a layer's dtype; float64 is added in float64, all else in float32.

    Args:
        open: whether it is compiled once for any number of elements, but anew for what that is a multiple of.
    """
    wide = "tl.float64" if dtype == "float64" else "tl.float32"
    return (
        environment().get_template("kernels/add_pieces.py.jinja").render(wide=wide, name=name, open=open).rstrip("\n")
    )


def sums_module() -> str:
    """The text of a network's module, whose `add` sums equal pieces of any type of floats."""
    sources = [add_source("float32", open=True), add_source("float64", "add_doubles", open=True)]
    return environment().get_template("kernels/ordered_sums.py.jinja").render(sources=sources, block=BLOCK)


def add_module(dtype: str) -> str:
    """A module of nothing but this function, as `kernel`."""
    return f"import triton\nimport triton.language as tl\n\n\n{add_source(dtype)}\n\n\nkernel = {NAME}\n"


def unit(element_bytes: int) -> int:
    """The number of elements in 16 bytes; pieces that are a multiple of it are read by so many at a time."""
    return 16 // element_bytes


def add_arguments(elements: int, pieces: int, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and constants of a launch on tensors without memory.

    Args:
        elements: how many a piece has.
    """
    from convgen.kernels.torch_types import TORCH_DTYPES, torch

    given, out = (torch.empty(16, dtype=TORCH_DTYPES[dtype], device="meta") for _ in range(2))
    whole = gcd(elements, unit(given.element_size()))
    return (given, out, elements), {"PIECES": pieces, "UNIT": whole, "BLOCK": BLOCK, "num_warps": 4}


def moved_bytes(elements: int, pieces: int, element_bytes: int) -> int:
    """Bytes moved: every piece is read once, and the sum is written."""
    return (pieces + 1) * elements * element_bytes
