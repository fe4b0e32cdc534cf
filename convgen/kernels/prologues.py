"""A batch norm's last step, which a product's kernel does element by element before it multiplies, as lines of its
text.

A product of pixels and weights reads what a norm makes; its kernel makes that itself, of what the norm reads, and
writes it for whoever reads it later. So a launch and a pass over memory are saved. Each tile of columns makes it again;
the first one writes it. Forward it is the normalised, scaled and activated value; backward it is the gradient of what
the norm normalises, which backward-data multiplies and the filter gradient reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from convgen.kernels.epilogues import lines, no_vector
from convgen.operations.row import Prologue

VECTORS = ("norm_mean", "norm_variance", "norm_scale", "norm_shift")  # the norm's, with a number for each channel


class Before(NamedTuple):
    """The steps that a kernel does on what it reads.

    Attributes:
        of: the norm's last step.
        back: of a gradient, Triton's text of the activation's, of the result's gradient {x} and of {0}: what the steps
            make, or where `of_input` says so what they read; nothing where another kernel has made it.
    """

    of: Prologue
    back: str = ""
    of_input: bool = False

    @property
    def operands(self) -> int:
        """How many tensors that lie as the activation does are read beside it."""
        return 1 if self.of.gradient else sum(len(step.operands) for step in self.of.steps)

    @property
    def tensors(self) -> list[str]:
        """Names of the kernel's arguments, in order; for a gradient the last one is a number."""
        beside = [f"beside_{n}" for n in range(self.operands)]
        return [*VECTORS, *beside, *(["found", "made", "total"] if self.of.gradient else ["made"])]


def prologue_lines(
    before: Before, channel: str, known: str, wide: str, across: Callable[[str], str], load: Callable[[str], str]
) -> Sequence[str]:
    """Lines that do the steps on the tile `a`, which keeps its type.

    Args:
        channel: the numbers of its channels; `known`: the end, with its mask, of a load of a vector over them.
        across: gives the text that spreads a vector of that name over pixels; `load`: gives a tensor's tile by its
            name.
    """

    def vector(name: str, start: str = "") -> str:
        return f"tl.load({name} + {start}{channel}{known}).to({wide})"

    count = channel.upper()
    lines = [
        f"center, inverse = {vector('norm_mean')}, 1 / tl.sqrt({vector('norm_variance')} + EPS)",
        f"factor, shifted = inverse * {vector('norm_scale')}, {vector('norm_shift')}",
    ]
    normalised = f"off * {across('factor')} + {across('shifted')}"
    if not before.of.gradient:
        lines += [f"off = a.to({wide}) - {across('center')}", f"v = {normalised}"]
        lines += _steps(before, lambda name: f"{load(name)}.to({wide})")
        return [*lines, "a = v.to(a.dtype)"]
    lines += [f"off, v = {load('beside_0')}.to({wide}) - {across('center')}, a.to({wide})"]
    if before.back:
        made = [] if before.of_input else _steps(before, load)
        lines += ["g = v", f"v = {normalised}", *made, f"v = {before.back.format('v', x='g')}"]
    times = f"inverse * {vector('found', f'{count} + ')} * per"
    return [
        *lines,
        f"per = 1 / tl.cast(total, {wide})",
        f"plain, times = {vector('found', f'2 * {count} + ')} * per, {times}",
        f"a = ({across('factor')} * (v - {across('plain')} - off * {across('times')})).to(a.dtype)",
    ]


def _steps(before: Before, element: Callable[[str], str]) -> list[str]:
    """Lines that do the steps on `v`."""
    return lines(before.of.steps, lambda name: element(name.replace("with", "beside")), no_vector, "", "v")
