"""The words and the table of an algorithm: what they say, and that they add up."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
import sympy
from generate import random_problem

from convgen.algebra.blocks import Uneven
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.compiler import Compiled, compile_layer
from convgen.cost.symbolic import axis_size, formulas
from convgen.emit.volume import volume
from convgen.explain.formula import NO_FORM, formula_text
from convgen.explain.text import cost_json, cost_text, explain_text
from convgen.explain.words import bytes_text, seconds_text
from convgen.program.build import lower
from convgen.program.nodes import PHASES
from convgen.program.text import parse
from convgen.spec.layer import Distribution, Layer

ROWS = (Spatial("H", 14, 3, 1, 1, 1), Spatial("W", 14, 3, 1, 1, 1))


def compiled(algorithm: str, *, bias: bool = False, **grid: int) -> Compiled:
    conv = Conv(8, 64, 96, ROWS, bias=bias)
    return compile_layer(Layer(name="one", conv=conv, grid=Grid(tuple(grid.items())), algorithm=algorithm))


def test_words() -> None:
    text = explain_text(compiled("stationary-x", N=2, C=2))
    head = (
        "one: conv2d N=8 C=64 H=14 W=14 F=96 K=3x3 stride=1 padding=1 float32 (Ho=14 Wo=14)\ngrid(N=2, C=2), 4 ranks; "
    )
    assert text.startswith(head)
    for line in (
        "  x, dx     N over N, C over C; copies over none",
        "  w, dw     C over C; copies over N",
        "  forward          splits samples (N) over N, channels (C) over C",
        "held from forward to backward, besides x and w: nothing",
    ):
        assert line in text.splitlines(), line


def test_schedule_inside_reads_back() -> None:
    one = compiled("stationary-w", N=2, C=2, F=2)
    text = explain_text(one)
    inside = text[text.index("schedule one") : text.index("\n}\n") + 3]
    assert "# 12,544 elements sent" in inside  # a block of x: 4 samples, 16 channels, 14 x 14
    assert parse(inside) == one.schedule


def test_table_has_a_sum_for_each_phase_and_the_numbers_of_the_schedule() -> None:
    one = compiled("spatial", H=2, W=2, bias=True)
    text = cost_text(one)
    lines = text.splitlines()
    assert sum(bool(re.search(r" sum  ", line)) for line in lines) == 4
    assert [line.split()[0] for line in lines if re.match(r"(forward|backward|all)", line)] == [
        "forward",
        "backward-data",
        "backward-filter",
        "all",
    ]
    assert all(line == line.rstrip() and line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("algorithm", "grid"),
    [("stationary-x", {"N": 2, "C": 2}), ("spatial", {"H": 3, "W": 2}), ("stationary-w", {"H": 2, "C": 2, "F": 2})],
)
def test_json_agrees_with_volume_and_adds_up(algorithm: str, grid: dict[str, int]) -> None:
    one = compiled(algorithm, **grid)
    report = json.loads(json.dumps(cost_json(one)))
    sent = {r["step"]: r["sent_bytes"] for r in report["steps"] if r["axes"]}
    exact = volume(one.schedule, one.space, 4)
    assert sent == {r["step"]: max(r["bytes_sent_per_rank"]) for phase in PHASES for r in exact[phase]}
    for key in ("elements", "sent_bytes", "flops", "seconds"):
        by_phase = {phase: sum(r[key] for r in report["steps"] if r["phase"] == phase) for phase in PHASES}
        assert {p: report["totals"][p][key] for p in PHASES} == pytest.approx(by_phase)
        assert report["totals"]["all"][key] == pytest.approx(sum(by_phase.values()))
    cost = one.cost
    assert report["totals"]["all"]["sent_bytes"] == cost.total().sent_bytes
    assert report["totals"]["all"]["seconds"] == pytest.approx(cost.total().seconds)


def test_explicit_layout_with_copies_and_nested_axes() -> None:
    layer = Layer(
        name="one",
        conv=Conv(8, 64, 96, ROWS),
        grid=Grid((("a", 2), ("b", 2), ("c", 2))),
        algorithm=None,
        distribution=Distribution(x=(("a", "b"), (), (), ()), w=((), ()), y=(("a", "b"), (), (), ())),
    )
    text = explain_text(compile_layer(layer))
    assert "  x, dx     N over (a,b); copies over c" in text.splitlines()
    assert "  w, dw     whole on every rank; copies over a, b, c" in text.splitlines()


def test_numbers_with_units() -> None:
    assert [bytes_text(n) for n in (0, 512, 1536, 98_000_000)] == ["0 B", "512 B", "1.54 kB", "98 MB"]
    assert [seconds_text(t) for t in (0.0, 3e-9, 1.2e-5, 1e-3, 2.5)] == ["0 s", "3 ns", "12 µs", "1 ms", "2.5 s"]


@pytest.mark.parametrize(
    ("algorithm", "grid", "said"),
    [
        ("stationary-x", {"N": 2, "C": 2}, {"y": "(|C| - 1)*N*F*Ho*Wo/(|N|*|C|)", "dw": "18*(|N| - 1)*C*F/(|N|*|C|)"}),
        ("spatial", {"H": 2, "W": 2}, {"x_halo": "2*N*C*(H/|H| + W/|W| + 2)", "y": "18*N*C*F*Ho*Wo/(|H|*|W|)"}),
        ("integrated", {"N": 2, "F": 2}, {"dy_slice": "", "dx": "2*(|F| - 1)*N*C*H*W/(|N|*|F|)"}),
    ],
)
def test_formulas_as_people_write_them(algorithm: str, grid: dict[str, int], said: dict[str, str]) -> None:
    steps = {r["step"]: r["formula"] for r in cost_json(compiled(algorithm, **grid))["steps"]}
    assert {step: steps[step] for step in said} == said


@pytest.mark.parametrize("seed", range(15))
def test_formulas_read_back(seed: int) -> None:
    conv, grid, stored, roles = random_problem(Random(seed))
    schedule = lower("one", Space(conv, grid), stored, roles, bias=conv.bias)
    for f in formulas(schedule, conv, 4).values():
        text = formula_text(f, grid)
        value = f.flops if f.flops != 0 else f.elements
        if value is None or any(isinstance(n, Uneven) and axis_size(a) in value.free_symbols for a, n in grid.axes):
            assert text == NO_FORM
        elif value == 0:
            assert text == ""
        else:
            names = {re.sub(r"\|(\w+)\|", r"size_of_\1", str(s)): s for s in value.free_symbols}
            back = eval(re.sub(r"\|(\w+)\|", r"size_of_\1", text), {}, names)
            assert sympy.expand(back - value) == 0, text
