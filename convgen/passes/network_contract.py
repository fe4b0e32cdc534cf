"""What a pass over networks is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from convgen.program.network import Program


@dataclass(frozen=True)
class NetworkPass(ABC):
    """A rewriting of a network's program; its fields are its options.

    A pass is pure, hands back the same object where nothing changes, and has nothing left to do when run twice.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, program: Program) -> Program:
        """The program rewritten, or the same object."""

    def __str__(self) -> str:
        """`bucket-gradients{mebibytes=1}`: the options that are not the defaults."""
        given = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"{{{' '.join(given)}}}" if given else "")
