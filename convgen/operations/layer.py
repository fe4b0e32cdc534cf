"""One convolution's training: what its operations read and make, by name, and the layouts that roles ask for."""

from __future__ import annotations

from functools import lru_cache

from convgen.algebra.conv import PHASES, Conv, Phase
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.signature import Signature
from convgen.algebra.space import Space
from convgen.algebra.wants import layouts
from convgen.operations.convolution import Convolution

PHASE: dict[str, Phase] = {p: p for p in PHASES}


@lru_cache(maxsize=4096)
def signature_of(conv: Conv, phase: str, rows: str = "output") -> Signature:
    """Of a phase, with groups as nests. `rows`: whose rows are the blocks of backward_filter."""
    return Convolution(PHASE[phase], conv).signatures[phase == "backward_filter" and rows == "input"]


def operands(conv: Conv, phase: str) -> tuple[str, str, str]:
    """Tensors that a phase reads and the one that it makes: forward x, w, y; backward_data dy, w, dx as y, w, x."""
    signature = signature_of(conv, phase)
    first, second, made = (*signature.inputs, *signature.results)
    return first.name, second.name, made.name


def values(conv: Conv, phase: str) -> tuple[str, str, str]:
    """Names of the values that a phase reads and makes: x, w, y; dy, w, dx; dy, x, dw."""
    first, second, made = operands(conv, phase)
    first, second = ("dy" if t == "y" else t for t in (first, second))
    return first, second, made if phase == "forward" else f"d{made}"


def wanted(space: Space, phase: str, roles: Roles) -> tuple[Layout, Layout, Layout]:
    """Layouts that a phase's convolution reads and makes: (first input, second input, output)."""
    first, second, made = layouts(space, signature_of(space.conv, phase, roles.rows), dict(roles.nests))
    return first, second, made
