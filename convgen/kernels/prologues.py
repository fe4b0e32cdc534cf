"""What stands before a product, element by element, as lines of its kernel's text: what a batch norm does last.

A product of pixels and weights reads what a norm makes; its kernel makes that itself, of what the norm reads, and
writes it for whoever reads it later. So a launch and a pass over memory are saved. Each tile of columns does it again,
the first one writes it. Forward it is what is normalised, scaled and activated; backward, the gradient of what is
normalised, which backward-data multiplies and the filter gradient reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from convgen.kernels.epilogues import lines, no_vector
from convgen.operations.row import Prologue

VECTORS = ("norm_mean", "norm_variance", "norm_scale", "norm_shift")  # of the norm, a number a channel


class Before(NamedTuple):
    """What a kernel does with what it reads.

    Attributes:
        of: what it is.
        back: of a gradient, Triton's text of the activation's, of the result's gradient {x} and of {0}: what the steps
            make, or where `of_input` says so what they read; nothing where another kernel has made it.
    """

    of: Prologue
    back: str = ""
    of_input: bool = False

    @property
    def operands(self) -> int:
        """Tensors that lie as what is read does, and are read beside it."""
        return 1 if self.of.gradient else sum(len(step.operands) for step in self.of.steps)

    @property
    def tensors(self) -> list[str]:
        """Names of a kernel's arguments, in order; of a gradient the last one is a number."""
        beside = [f"beside_{n}" for n in range(self.operands)]
        return [*VECTORS, *beside, *(["found", "made", "total"] if self.of.gradient else ["made"])]


def prologue_lines(
    before: Before, channel: str, known: str, wide: str, across: Callable[[str], str], load: Callable[[str], str]
) -> Sequence[str]:
    """What is done with the tile `a`, which is of one type before and behind.

    Args:
        channel: numbers of its channels; `known`: the end of a load of a vector over them, with its mask.
        across: of a vector's name the text that spreads it over pixels; `load`: of a tensor's the tile of it.
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
    """What the steps make of `v`."""
    return lines(before.of.steps, lambda name: element(name.replace("with", "beside")), no_vector, "", "v")
