# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (triton and parts of torch have no types)
"""Calls of a GPU kernel's module on operands, and the check of what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.operations.layer import VALUES_READ
from convgen.tune.clock import Call
from convgen.tune.operands import Operands, Wrong, logical


@dataclass(frozen=True)
class Bound:
    """A kernel on operands.

    Attributes:
        run: the call that is timed.
        check: runs it on a result full of NaN and gives the error. Raises Wrong.
    """

    run: Call
    check: Callable[[], float]


def bind(work: Operands, p: Problem, text: str) -> Bound:
    """A GPU kernel's module, bound to operands."""
    module, last = load_text(text), p.channels_last
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    sizes = module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups)
    tensors = [work.flat(n, last) for n in VALUES_READ[p.phase]]
    rest: list[object] = []
    if p.rim is not None:
        own, buffer, boxes, place = work.rim
        tensors[VALUES_READ[p.phase].index("dy" if p.phase == "backward_data" else "x")] = own
        rest = [module.Rim(buffer, boxes, place, tuple(map(tuple, boxes.tolist())))]
    tensors += [work.flat("bias", last)] if p.bias else []
    args = (*tensors, work.out, sizes, *rest)
    function = getattr(module, p.phase)

    def check() -> float:
        work.whole.fill_(math.nan)
        function(*args)
        work.check_guards()
        _check_operands(work, p)
        return work.check_error(work.written(last))

    return Bound(lambda: function(*args), check)


def _check_operands(work: Operands, p: Problem) -> None:
    """Raises Wrong where a kernel wrote to what it reads."""
    for name in VALUES_READ[p.phase]:
        if p.rim is None:
            flat = logical(work.flat(name, p.channels_last), work.shapes[name], p.channels_last, work.parts(name))
            given = work.given[name]
            if not torch.equal(flat, given.unflatten(1, (flat.shape[0], -1)).movedim(1, 0)):
                raise Wrong(f"written to {name}")
