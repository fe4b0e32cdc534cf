"""The class CompiledFile, by which commands know a compiled file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from convgen.network_compiler import CompiledNetwork


@dataclass(frozen=True)
class CompiledFile:
    """A compiled graph file, with the tensors that lie beside it."""

    file: str
    compiled: CompiledNetwork
    tensors: dict[str, Tensor]
