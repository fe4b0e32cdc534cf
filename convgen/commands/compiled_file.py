"""What commands have of a compiled file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from convgen.network_compiler import CompiledNetwork


@dataclass(frozen=True)
class CompiledFile:
    """A graph file, compiled, and the tensors that stand beside it."""

    file: str
    compiled: CompiledNetwork
    tensors: dict[str, Tensor]
