"""Backward-data by output phase: rows of x that are alike modulo the stride read the same taps of dy.

Row xh reads dy's row yh by tap kh where yh S = xh + pad - kh d. Of the rows with (xh + pad) mod S = phase, the taps are
kh = first + j S/g with g = gcd(S, d), or none if g does not divide the phase. Each phase is then a dense convolution
with stride 1, so no product is made of zeros between rows.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from math import gcd, prod

from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.words import Words, times

MOST_ORDERED = 15  # the most phases whose order is written down: as digits of a number of 63 bits


def taps_of(d: LocalDim, phase: int) -> int:
    """How many taps the rows of a phase read."""
    return sum((k * d.dilation - phase) % d.stride == 0 for k in range(d.kernel))


def heaviest_first(problem: Problem) -> list[int]:
    """Phases by falling number of taps; a phase's number has the first dimension as its highest digit."""
    every = list(product(*(range(d.stride) for d in problem.dims)))
    weights = [prod(taps_of(d, a) for d, a in zip(problem.dims, phase, strict=True)) for phase in every]
    return sorted(range(len(every)), key=lambda i: -weights[i])


class PhaseWords(Words):
    """The words of backward-data with a stride."""

    @cached_property
    def strided(self) -> tuple[LocalDim, ...]:
        return tuple(d for d in self.problem.dims if d.stride > 1)

    @property
    def shifts(self) -> str:
        """Parameters: the phase of x's row 0, taken from 0, per strided dimension."""
        return self.extent(", ".join(f"shift_{d.name.lower()}" for d in self.strided))

    @property
    def passed_shifts(self) -> str:
        places = [(i, d.stride) for i, d in enumerate(self.dims) if d.stride > 1]
        return ", ".join(f"-s.below[{i}] % {stride}" for i, stride in places)

    @property
    def most_rows(self) -> str:
        """The most rows of x that a phase has."""
        return ", ".join(
            f"ceil_div(s.x[{i}], {d.stride})" if d.stride > 1 else f"s.x[{i}]" for i, d in enumerate(self.dims)
        )

    @property
    def phase_count(self) -> int:
        return prod(d.stride for d in self.dims)

    def phases(self) -> list[str]:
        """Lines that find which phase a program makes, its rows of x, and its taps, for each of its pixels."""
        rows = self.split("m", self.phase_rows)
        own = [f"x{d.name.lower()} = first_{d.name.lower()} + {d.stride} * i{d.name.lower()}" for d in self.strided]
        return [*self.phase_taps_lines(), rows, *own, *self.last_rows()]

    @property
    def phase_rows(self) -> list[str]:
        """Coordinates of a pixel of a phase: `i` counts the phase's rows of a strided dimension."""
        return [f"i{d.letter}" if d.stride > 1 else d.x for d in self.dims]

    def last_rows(self) -> list[str]:
        """Rows of dy that a phase's first tap reads for rows ih, iw."""
        return [
            f"last_{a} = i{a} + (first_{a} + pad_{a} - {times(f'tap_{a}', d.dilation)}) // {d.stride}"
            for d, a in ((d, d.name.lower()) for d in self.strided)
        ]

    def phase_taps_lines(self) -> list[str]:
        """Lines that find which phase a program makes, and its taps."""
        order, count = heaviest_first(self.problem), prod(d.stride for d in self.strided)
        lines = ["phase = tl.program_id(2)"]
        if order != sorted(order) and count <= MOST_ORDERED:
            digits = sum(phase << 4 * slot for slot, phase in enumerate(order))
            lines = [
                f"phase = ({digits:#x} >> (tl.program_id(2) * 4).to(tl.int64) & 15).to(tl.int32)  # the heaviest first"
            ]
        inner = count
        for d in self.strided:
            a, s, g = d.name.lower(), d.stride, gcd(d.stride, d.dilation)
            inner //= s
            number = f"phase // {inner}" if inner > 1 else "phase"
            lines.append(f"phase_{a} = {number}" + (f" % {s}" if d is not self.strided[0] else ""))
            step = s // g
            inverse = pow(d.dilation // g, -1, step) if step > 1 else 0
            shared = f"phase_{a} // {g}" if g > 1 else f"phase_{a}"
            first = "0" if step == 1 else f"{times(shared, inverse)} % {step}" if inverse > 1 else f"{shared} % {step}"
            first = f"phase_{a}" if g == inverse == 1 else first
            taps = f"({d.kernel + step - 1} - tap_{a}) // {step}" if step > 1 else f"{d.kernel} - tap_{a}"
            lines.append(f"tap_{a} = {first}")
            lines.append(f"taps_{a} = " + (f"tl.where(phase_{a} % {g} == 0, {taps}, 0)" if g > 1 else taps))
            lines.append(f"first_{a}, I{a.upper()} = (phase_{a} + shift_{a}) % {s}, tl.cdiv(X{a.upper()}, {s})")
        return lines

    @property
    def made_pixels(self) -> str:
        """Pixels of one phase, as programs count them."""
        return "N * " + " * ".join(
            f"I{d.letter.upper()}" if d.stride > 1 else f"X{d.letter.upper()}" for d in self.dims
        )

    @property
    def inside_above(self) -> str:
        return " & ".join(f"(x{d.name.lower()} < X{d.name})" for d in self.strided)

    @property
    def phase_taps(self) -> str:
        """Number of taps of the phase at work."""
        return " * ".join(
            f"taps_{d.letter}" if d.stride > 1 else str(d.taps) for d in self.dims if d.stride > 1 or d.taps > 1
        )

    def phase_coordinates(self) -> list[str]:
        """Lines that find kh, kw by a tap number of the phase; `j` counts the phase's taps of a dimension."""
        names, parts = list[str](), list[str]()
        for i, d in enumerate(self.tapped):
            inner = [f"taps_{e.letter}" if e.stride > 1 else str(e.taps) for e in self.tapped[i + 1 :]]
            own = f"taps_{d.letter}" if d.stride > 1 else str(d.taps)
            text = f"tap // ({' * '.join(inner)})" if len(inner) > 1 else f"tap // {inner[0]}" if inner else "tap"
            names.append(f"j{d.letter}" if d.stride > 1 else d.k)
            parts.append(f"{text} % {own}" if i else text)
        lines = [f"{', '.join(names)} = {', '.join(parts)}"]
        strided = [(d, d.stride // gcd(d.stride, d.dilation)) for d in self.tapped if d.stride > 1]
        return lines + [f"{d.k} = tap_{d.letter} + {times(f'j{d.letter}', step)}" for d, step in strided]

    @property
    def phase_y_rows(self) -> str:
        texts: list[str] = []
        for d in self.dims:
            if d.stride == 1:
                texts.append(f"{d.x} + {d.pad}" + (f" - {times(d.k, d.dilation)}" if d.taps > 1 else ""))
            else:
                back = times(f"j{d.letter}", d.dilation // gcd(d.stride, d.dilation))
                texts.append(f"last_{d.letter}" + (f" - {back}" if d.taps > 1 else ""))
        return f"{', '.join(d.y for d in self.dims)} = {', '.join(texts)}"
