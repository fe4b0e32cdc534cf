"""Targets: what a kernel is compiled for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import InputError


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture, or the CPU.

    Attributes:
        kind: cuda, hip or cpu.
        arch: 90 for sm_90, "gfx942" for AMD's.
        shared_bytes: of one program, at most.
        processors: of the device that the sizes of a launch are chosen for.
    """

    kind: str
    arch: int | str
    warp: int
    shared_bytes: int
    processors: int

    @property
    def float32_products(self) -> str:
        """How float32 is multiplied at float32 accuracy: split into TF32 where there are such units."""
        return "tf32x3" if self.kind == "cuda" else "ieee"

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu"
        return f"cuda:sm_{self.arch}" if self.kind == "cuda" else f"hip:{self.arch}"


# Shared memory of a block: CUDA C++ Programming Guide, table of compute capabilities; LDS: AMD CDNA ISA guides.
_CUDA = {
    80: (166912, 108),
    86: (101376, 84),
    89: (101376, 142),
    90: (232448, 132),
    100: (232448, 148),
    120: (101376, 188),
}
_HIP = {"gfx90a": (65536, 104), "gfx942": (65536, 304), "gfx950": (163840, 256)}
CPU = Target("cpu", "", 1, 0, 1)
DEFAULT = {"cuda": "sm_90", "hip": "gfx942"}


def parse_target(text: str) -> Target:
    """`cuda`, `cuda:sm_90`, `hip`, `hip:gfx942`, `cpu`.

    Raises:
        InputError: an architecture that kernels are not made for.
    """
    kind, _, name = text.partition(":")
    if kind == "cpu":
        return CPU
    name = name or DEFAULT[kind]
    if kind == "cuda":
        arch = int(name.removeprefix("sm_").rstrip("a"))
        if arch in _CUDA:
            return Target(kind, arch, 32, *_CUDA[arch])
        known = ", ".join(f"cuda:sm_{a}" for a in _CUDA)
    else:
        if name in _HIP:
            return Target(kind, name, 64, *_HIP[name])
        known = ", ".join(f"hip:{a}" for a in _HIP)
    raise InputError(f"target {text}: no kernels are made for {name}", ("target",), hint=known)
