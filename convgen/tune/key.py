"""The key of a local problem: the problem as text, and back.

    bfloat16 channels_last forward N8 C64 F96 H:14>14 k3 s1 d1 b1 W:14>14 k3 s1 d1 b1 bias parts 2:1 rim 3 G4

Each dimension has its rows of x and of y, kernel, stride, dilation and zero rows below; usual values are left out.
"""

from __future__ import annotations

import re
from typing import cast

from convgen.errors import InputError
from convgen.kernels.problem import LocalDim, Problem
from convgen.program.nodes import PHASES, Phase
from convgen.spec.layer import DTYPES

_DIM = r"(?P<{0}>{0}):(?P<{0}x>\d+)>(?P<{0}y>\d+) k(?P<{0}k>\d+) s(?P<{0}s>\d+) d(?P<{0}d>\d+) b(?P<{0}b>-?\d+)"
_KEY = re.compile(
    rf"(?P<dtype>{'|'.join(DTYPES)}) (?P<form>contiguous|channels_last) (?P<phase>{'|'.join(PHASES)})"
    r" N(?P<n>\d+) C(?P<c>\d+) F(?P<f>\d+)"
    + "".join(rf"(?: {_DIM.format(name)})?" for name in ("D", "H", "W"))
    + r"(?P<bias> bias)?(?: parts (?P<xp>\d+):(?P<yp>\d+))?(?: rim (?P<rim>\d+))?(?: G(?P<g>\d+))?"
)

LONGEST = 1000  # the most characters of a key, so that Python reads its numbers


def key_of(p: Problem) -> str:
    """The problem as one line."""
    words = [p.dtype, p.memory_format, p.phase, f"N{p.batch}", f"C{p.channels}", f"F{p.filters}"]
    words += [f"{d.name}:{d.x}>{d.y} k{d.kernel} s{d.stride} d{d.dilation} b{d.below}" for d in p.dims]
    words += ["bias"] if p.bias else []
    words += [f"parts {p.x_parts}:{p.y_parts}"] if p.x_parts * p.y_parts > 1 else []
    words += [f"rim {p.rim}"] if p.rim is not None else []
    words += [f"G{p.groups}"] if p.groups > 1 else []
    return " ".join(words)


def problem_of(key: str) -> Problem:
    """The problem of a key, the inverse of `key_of`.

    Raises:
        InputError: the text is no problem's.
    """
    match = _KEY.fullmatch(key) if len(key) < LONGEST else None
    dims = [
        LocalDim(name, *(int(match[f"{name}{field}"]) for field in "xyksdb"))
        for name in ("D", "H", "W")
        if match and match[name]
    ]
    if match is None or not dims:
        raise InputError(f"{key!r} is no local problem", hint="convgen tune writes the keys of its files itself")
    made = Problem(
        phase=cast("Phase", match["phase"]),
        batch=int(match["n"]),
        channels=int(match["c"]),
        filters=int(match["f"]),
        groups=int(match["g"] or 1),
        dims=tuple(dims),
        dtype=match["dtype"],
        memory_format=match["form"],
        bias=bool(match["bias"]),
        x_parts=int(match["xp"] or 1),
        y_parts=int(match["yp"] or 1),
        rim=None if match["rim"] is None else int(match["rim"]),
    )
    if key_of(made) != key or not made.groups or any(not (d.kernel and d.stride and d.dilation) for d in made.dims):
        raise InputError(f"{key!r} is no local problem's own key", hint=f"{key_of(made)!r}, with nothing that is 0")
    return made
