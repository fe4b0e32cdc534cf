"""What a module decides by sizes stays a condition of its graph, at small sizes and at large ones."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convgen.errors import InputError
from convgen.spec.exported import exported
from convgen.spec.extents import condition_from_sympy


class Decides(nn.Module):
    """A convolution; twice its result where a question of its input says so."""

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.conv, self.question = nn.Conv2d(1, 1, 3, padding=1), question

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return 2 * y if self.question(x) else y


QUESTIONS = {
    "few": (lambda x: x.shape[2] < 40, (20, 9), "H <= 39"),
    "many": (lambda x: x.shape[2] >= 100, (120, 9), "H >= 100"),
    "a multiple": (lambda x: x.shape[3] % 4 == 0, (9, 12), "W%4 == 0"),
    "a quotient": (lambda x: x.numel() / 1000 > 2.5, (9, 9), "H*N*W <= 2500"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_of_sizes_is_a_condition(name: str) -> None:
    question, shape, said = QUESTIONS[name]
    module = Decides(question).eval()  # type: ignore[arg-type]
    graph = exported(module, (torch.randn(2, 1, *shape),), name="net", opened={"x": {"H": 2, "W": 3}}).graph
    assert said in map(str, graph.conditions)
    for h, w in [(1, 1), (2, 3), (39, 8), (40, 8), (99, 4), (100, 5), (41, 41), (150, 12)]:
        sizes = {"N": 2, "H": h, "W": w}
        holds = all(c.holds(sizes) for c in graph.conditions)
        alike = question(torch.empty(2, 1, h, w)) == question(torch.empty(2, 1, *shape))
        assert holds == alike, sizes


def test_a_question_that_is_no_condition_is_refused_by_its_letters() -> None:
    module = Decides(lambda x: torch.sym_max(x.shape[2], x.shape[3]) < 40).eval()
    with pytest.raises(InputError, match=r"depends on H, W by .*Max\(H, W\)"):
        exported(module, (torch.randn(2, 1, 20, 9),), name="net", opened={"x": {"H": 2, "W": 3}})


def test_a_resnets_row_of_the_last_level_needs_no_condition() -> None:
    """Torch guards against one row behind a stride of 32: up to 32 rows of the input, where all is right."""
    layers = [nn.Conv2d(1, 1, 3, 2, 1) for _ in range(5)]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)).eval()
    graph = exported(module, (torch.randn(2, 1, 70, 66),), name="net", opened={"input": {"H": 2, "W": 3}}).graph
    assert graph.conditions == ()


@pytest.mark.parametrize("bound", [Fraction(5, 2), Fraction(2), Fraction(1, 4)])
def test_a_quotient_is_compared_without_rounding_it(bound: Fraction) -> None:
    from torch.utils._sympy.functions import IntTrueDiv

    n = sympy.Symbol("N", positive=True, integer=True)
    found = condition_from_sympy(sympy.LessThan(IntTrueDiv(n, sympy.Integer(8)), sympy.Float(float(bound))), {n: "N"})
    assert found is not None
    for size in range(1, 64):
        assert found.holds({"N": size}) == (Fraction(size, 8) <= bound), size


class Asks(nn.Module):
    """A convolution that asks about its samples and rows, and answers by what is given here."""

    def __init__(self, answers: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.answers = nn.Conv2d(1, 1, 3, padding=1), answers

    def forward(self, x: Tensor) -> Tensor:
        return self.answers(x, self.conv(x))


ANSWERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[str]]] = {
    "alike": (lambda x, y: y.contiguous() if x.shape[0] >= 64 else y, []),
    "alike on both of two bounds": (
        lambda x, y: (y.contiguous() if x.shape[0] >= 64 else y) + (y if x.shape[2] < 100 else y.contiguous()),
        [],
    ),
    "otherwise": (lambda x, y: 2 * y if x.shape[0] >= 64 else y, ["N <= 63"]),
    "otherwise beyond a second bound": (
        lambda x, y: y if x.shape[0] < 64 else (y.contiguous() if x.shape[0] < 128 else 2 * y),
        ["N <= 63"],
    ),
    "alike but for one of two": (
        lambda x, y: (y.contiguous() if x.shape[0] >= 64 else y) * (2 if x.shape[2] >= 100 else 3),
        ["H <= 99"],
    ),
    "each alike, both together not": (
        lambda x, y: 2 * y if x.shape[0] >= 64 and x.shape[2] >= 100 else y,
        ["N <= 63"],
    ),
    "a few samples too": (lambda x, y: y.contiguous() if x.shape[0] > 3 else y.clone(), []),
    "beyond what anybody has": (lambda x, y: y.contiguous() if x.numel() > 2**31 else y, ["H*N*W <= 2147483648"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_bound_goes_where_the_graph_is_the_same_on_its_other_side(name: str) -> None:
    answers, said = ANSWERS[name]
    module = Asks(answers).eval()  # type: ignore[arg-type]
    graph = exported(module, (torch.randn(2, 1, 20, 9),), name="net", opened={"x": {"H": 2, "W": 3}}).graph
    assert [*map(str, graph.conditions)] == said


class Arranges(nn.Module):
    """What is computed is the same for many samples; how it lies in memory isn't. With `once_more` few rows are another
    matter there."""

    def __init__(self, once_more: bool) -> None:
        super().__init__()
        self.conv, self.once_more = nn.Conv2d(1, 1, 3, padding=1), once_more

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 64:
            x = x.contiguous()
            if self.once_more and x.shape[2] >= 300:
                return self.conv(x) + 1
        return F.relu(self.conv(x))


@pytest.mark.parametrize("once_more", [False, True])
def test_a_bound_that_changes_nothing_is_dropped(once_more: bool) -> None:
    """After a trial on both sides of it; not where the module decides something else there, far from what is tried."""
    module = Arranges(once_more).eval()
    graph = exported(module, (torch.randn(2, 1, 20, 9),), name="net", opened={"x": {"N": 0, "H": 2, "W": 3}}).graph
    assert [str(c) for c in graph.conditions] == (["N <= 63"] if once_more else [])
