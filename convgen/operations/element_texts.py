"""Triton's text of elementwise operators, and of their gradients as ATen has them, also for a NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import frexp, pi
from typing import NamedTuple


class ElementText(NamedTuple):
    """The text of an operator of one element.

    Attributes:
        text: the result, from {x} and the numbers {0}, {1} that the operator takes.
        back: the gradient of what it reads, from {dy}, either its result {y} or {x}, and the numbers.
    """

    text: str
    back: str

    @property
    def is_of_result(self) -> bool:
        return "{y}" in self.back


class ElementStep(NamedTuple):
    """A row's step on one element of each operand.

    Attributes:
        text: the result, from the operands' elements {0}, {1}.
        backs: for each operand its gradient, from {dy}, {y} and the operands' elements.
        casts_to: if it only casts, the type to which it does.
        is_free: whether it takes no launch where it stands alone.
    """

    text: str
    backs: tuple[str, ...]
    casts_to: str = ""
    is_free: bool = False


ROOT_HALF, ROOT_2_PI = 0.5**0.5, (2 * pi) ** 0.5
GAUSS = f"0.5 * (1.0 + tl.erf({{x}} * {ROOT_HALF!r}))"
# 1 + tanh(u) = 2 / (1 + exp(-2u)), of 2u = x * (A + B * x * x).
A, B = 2 * (2 / pi) ** 0.5, 2 * (2 / pi) ** 0.5 * 0.044715
TANH = f"(1 / (1 + tl.exp(-({{x}} * ({A!r} + {B!r} * {{x}} * {{x}})))))"
RELU = "tl.where({x} < 0, 0.0, {x})"  # a NaN stays one
SIX = "tl.where({x} < -3, 0.0, tl.where({x} > 3, 6.0, {x} + 3)) / 6"
# Numbers that are compared, or chosen: Triton takes them as float32 where their type isn't said.
LOW, HIGH = (f"tl.full((), {{{k}}}, {{x}}.dtype)" for k in range(2))
LOW_BACK, HIGH_BACK = (f"tl.full((), {{{k}}}, {{dy}}.dtype)" for k in range(2))

# Operators of one element, by ATen's name.
ONE: Mapping[str, ElementText] = {
    "relu": ElementText(RELU, "tl.where({y} <= 0.0, 0.0, {dy})"),
    "hardtanh": ElementText(
        f"tl.where({{x}} < {LOW}, {LOW}, tl.where({{x}} > {HIGH}, {HIGH}, {{x}}))",
        f"tl.where(({{y}} <= {LOW_BACK}) | ({{y}} >= {HIGH_BACK}), 0.0, {{dy}})",
    ),
    "leaky_relu": ElementText("tl.where({x} > 0, {x}, {x} * {0})", "tl.where({y} > 0.0, {dy}, {dy} * {0})"),
    "sigmoid": ElementText("1 / (1 + tl.exp(-{x}))", "{dy} * (1.0 - {y}) * {y}"),
    "silu": ElementText(
        "{x} / (1 + tl.exp(-{x}))",
        "{dy} * (1 / (1 + tl.exp(-{x}))) * (1 + {x} * (1 - 1 / (1 + tl.exp(-{x}))))",
    ),
    "hardswish": ElementText(
        f"{{x}} * {SIX}", "tl.where({x} <= -3.0, 0.0, tl.where({x} < 3.0, {dy} * ({x} / 3 + 0.5), {dy}))"
    ),
    "gelu": ElementText(
        f"{{x}} * ({GAUSS})", f"{{dy}} * ({GAUSS} + {{x}} * tl.exp(-0.5 * {{x}} * {{x}}) / {ROOT_2_PI!r})"
    ),
    "gelu_tanh": ElementText(
        f"{{x}} * {TANH}", f"{{dy}} * ({TANH} + {{x}} * ({TANH} * (1 - {TANH})) * ({A!r} + {3 * B!r} * {{x}} * {{x}}))"
    ),
    "hardsigmoid": ElementText(SIX, "tl.where(({x} > -3.0) & ({x} < 3.0), {dy} / 6, 0.0)"),
}
# Operators of two elements.
SAME = ElementStep("{0}", ("{dy}",))
TWO: Mapping[str, ElementStep] = {
    "add": ElementStep("{0} + {1}", ("{dy}", "{dy}")),
    "sub": ElementStep("{0} - {1}", ("{dy}", "-{dy}")),
    "mul": ElementStep("{0} * {1}", ("{dy} * {1}", "{dy} * {0}")),
    "div": ElementStep("{0} / {1}", ("{dy} / {1}", "-{dy} * (({0} / {1}) / {1})")),
}
AFFINE = ElementStep("{0} * {1} + {2}", ("{dy} * {1}", "{dy} * {0}", "{dy}"))


def text_of(name: str, numbers: Sequence[float] = ()) -> ElementText:
    """The text of an operator in `ONE` with these numbers. Where its result does not say on which side of a number its
    operand was, its gradient is made from the operand: of a leaky rectifier that goes down on both sides, and of bounds
    that some type of floats rounds."""
    found = ONE[name]
    tells = name != "leaky_relu" or numbers[0] > 0
    tells = tells and (name != "hardtanh" or all(map(_is_exact, numbers)))
    return found if tells else found._replace(back=found.back.replace("{y}", "{x}"))


def _is_exact(number: float) -> bool:
    """Whether all types of floats have this number, also bfloat16 and float16."""
    mantissa, _ = frexp(number)
    return not number or ((mantissa * 2**8).is_integer() and 2**-14 <= abs(number) < 2**16)


def of_one(name: str, numbers: tuple[float, ...] = ()) -> ElementStep:
    """The step of an operator in `ONE` with these numbers."""
    text, back = text_of(name, numbers)
    given = [repr(float(n)) for n in numbers]
    return ElementStep(text.format(*given, x="{0}"), (back.format(*given, x="{0}", y="{y}", dy="{dy}"),))


def with_number(name: str, number: float) -> ElementStep:
    """The step of an operator in `TWO` whose second operand is a number."""
    text, backs = TWO[name][:2]
    if number == 1 and name in ("mul", "div"):
        return SAME
    there = repr(float(number))
    return ElementStep(text.format("{0}", there), (backs[0].format("{0}", there, dy="{dy}"),))
