"""Targets: what a module is made for. A target is made once, where a layer is read; only this file parses its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from convgen.errors import InputError
from convgen.spec.text import shown

Kind = Literal["cpu", "cuda", "hip", "sw26010"]
MemoryFormat = Literal["contiguous", "channels_last"]

KINDS: tuple[Kind, ...] = get_args(Kind)  # each has a machine of its name: one node of that kind
WRITTEN = "cpu, cuda[:sm_NN], hip[:gfxNNN] or sw26010"
_TARGET = re.compile(r"cpu|cuda(:sm_[1-9][0-9]{1,2})?|hip(:gfx[1-9][0-9a-f]{2,3})?|sw26010", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU, a GPU architecture, or the SW26010.

    Attributes:
        kind: where local code comes from, and which machine models it.
        arch: 90 for sm_90, "gfx942" for AMD's; "" where there is only one.
        shared_bytes: shared memory that one program may use; 0 where no kernels are made for the target.
        processors: those of the device for which a launch's size is chosen.
        text: as written: `cuda` means `cuda:sm_90`, and a module prints what its layer file says.
    """

    kind: Kind
    arch: int | str = ""
    warp: int = 1
    shared_bytes: int = 0
    processors: int = 1
    text: str = field(default="", compare=False)

    @property
    def is_cpu(self) -> bool:
        """Whether local convolutions are ATen's, or arrangements of its calls."""
        return self.kind == "cpu"

    @property
    def is_gpu(self) -> bool:
        """Whether local convolutions are Triton kernels."""
        return self.kind in ("cuda", "hip")

    @property
    def is_mesh(self) -> bool:
        """Whether local convolutions are programs of an SW26010's CPEs."""
        return self.kind == "sw26010"

    @property
    def has_programs(self) -> bool:
        """Whether local convolutions are generated, not ATen's."""
        return self.is_gpu or self.is_mesh

    @property
    def has_families(self) -> bool:
        """Whether local convolutions may be kernels of families (kernels/families), which the tuner measures."""
        return self.is_cpu or self.is_gpu

    @property
    def pads_virtually(self) -> bool:
        """Whether local convolutions take any zero padding by themselves, as ATen's don't."""
        return self.has_programs

    @property
    def reads_parts(self) -> bool:
        """Whether local kernels read what collectives deliver, and write what they take, without a copy."""
        return self.is_gpu

    @property
    def device(self) -> str:
        """The type of torch device that has its tensors."""
        return "cuda" if self.is_gpu else "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of tensors that its local convolutions take."""
        wide = ("float64", "float32")
        return wide if self.is_mesh else (*wide, "tfloat32", "bfloat16", "float16")

    @property
    def float32_products(self) -> str:
        """How float32 is multiplied with float32's accuracy: split into TF32 where there are units for that."""
        return "tf32x3" if self.kind == "cuda" else "ieee"

    @property
    def tf32_products(self) -> str:
        """How factors that are rounded to TF32 are multiplied: of AMD's GPUs gfx942 alone has units for TF32; others
        multiply them as float32, which has these products exactly."""
        return "tf32" if self.kind == "cuda" or self.arch == "gfx942" else "ieee"

    @property
    def switches_tf32(self) -> bool:
        """Whether torch multiplies float32 as TF32 there if its switches say so: not on AMD's."""
        return self.kind == "cuda"

    @property
    def multiplies_float64(self) -> bool:
        """Whether matrices of float64 can be multiplied: for gfx942, Triton 3.6 and 3.7 stop at an assertion."""
        return self.arch != "gfx942"

    def memory_format(self, spatial: int) -> MemoryFormat:
        """The format of a layer that names none, with so many spatial dimensions: the one its kernels read fastest."""
        return "channels_last" if self.is_gpu and spatial > 1 else "contiguous"

    def known(self) -> Target:
        """The target itself, if kernels are made and tuned for it.

        Raises:
            InputError: none are made for its architecture, or it has no families of kernels.
        """
        if not self.has_families:
            fact = f"{self.kind} has no families of kernels: its plans are chosen by counts"
            raise InputError(fact, ("target",), hint="convgen sw26010 conv")
        if self.is_gpu and not self.shared_bytes:
            others = (f"cuda:sm_{a}" for a in _CUDA) if self.kind == "cuda" else (f"hip:{a}" for a in _HIP)
            name = self.text.partition(":")[2]
            fact = f"target {self.text}: no kernels are made for {name}"
            raise InputError(fact, ("target",), hint=", ".join(others))
        return self

    def for_networks(self) -> Target:
        """The target itself, if networks are compiled for it. Raises InputError: they are not, for its architecture."""
        return self if self.is_mesh else self.known()

    def __str__(self) -> str:
        """The target with its architecture, however it was written."""
        if not self.is_gpu:
            return self.kind
        return f"cuda:sm_{self.arch}" if self.kind == "cuda" else f"hip:{self.arch}"


# (bytes, processors). Shared memory of a block: CUDA C++ Programming Guide, table of compute capabilities; LDS: AMD
# CDNA ISA guides.
_CUDA = {
    80: (166912, 108),
    86: (101376, 84),
    89: (101376, 142),
    90: (232448, 132),
    100: (232448, 148),
    120: (101376, 188),
}
_HIP = {"gfx90a": (65536, 104), "gfx942": (65536, 304), "gfx950": (163840, 256)}
_DEFAULT = {"cuda": "sm_90", "hip": "gfx942"}
CPU = Target("cpu", text="cpu")


def read_target(text: str) -> Target:
    """A target as WRITTEN says, such as `cuda:sm_90`; whether kernels are made for it is not asked here.

    Raises:
        InputError: the text names no target.
    """
    if not _TARGET.fullmatch(text):
        raise InputError(f"target {shown(text)} is unknown", ("target",), hint=f"{WRITTEN}; e.g. cuda:sm_90")
    kind, _, name = text.partition(":")
    match kind:
        case "cuda":
            arch = int((name or _DEFAULT[kind]).removeprefix("sm_"))
            return Target(kind, arch, 32, *_CUDA.get(arch, (0, 1)), text=text)
        case "hip":
            name = name or _DEFAULT[kind]
            return Target(kind, name, 64, *_HIP.get(name, (0, 1)), text=text)
        case "sw26010":
            return Target(kind, text=text)
        case _:
            return CPU
