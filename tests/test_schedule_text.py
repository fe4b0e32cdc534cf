"""The schedule's text: read back what was printed, refuse what can't be read."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from generate import random_problem
from passing import passed

from convgen.algebra.algorithms import stored_layouts
from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.roles import Roles, nest
from convgen.algebra.space import Space
from convgen.errors import InputError
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.program.nodes import Schedule
from convgen.program.text import parse, show


def random_schedule(seed: int, max_ranks: int = 16) -> Schedule:
    conv, grid, stored, roles = random_problem(Random(seed), max_ranks)
    space = Space(conv, grid)
    schedule = lower(f"layer_{seed}", space, stored, roles, bias=conv.bias)
    return passed(schedule, space, HoldX(choice="stored" if seed % 3 == 0 else "gathered"), Share())


@pytest.mark.parametrize("chunk", range(10))
def test_what_is_printed_reads_back(chunk: int) -> None:
    for seed in range(chunk * 40, chunk * 40 + 40):
        schedule = random_schedule(seed)
        text = show(schedule)
        assert parse(text) == schedule
        assert show(parse(text)) == text
        assert hash(parse(text)) == hash(schedule)


TEXT = """\
schedule halo on grid(data=2, row=2) {
  stored: x[data, *, row, *] w[*, *] y[data, *, row, *]
  roles forward: N=data H=row
  roles backward_data: N=data H=row
  roles backward_filter: N=data H=row rows=input
  forward:
    %x_halo = exchange %x dim=H over=row                       : x[data, *, row+(1,1), *]
    %y = conv_forward %x_halo, %w                              : y[data, *, row, *]
  backward_data:
    %dy_halo = exchange %dy dim=H over=row                     : y[data, *, row+(1,1), *]
    %dx = conv_backward_data %dy_halo, %w                      : x[data, *, row, *]
  backward_filter:
    %dw_partial = conv_backward_filter %dy_halo, %x rows=input : w[*, *] partial(data,row)
    %dw = all_reduce %dw_partial over=data,row                 : w[*, *]
}
"""


def test_the_text_is_this() -> None:
    conv, grid = (
        Conv(4, 3, 5, (Spatial("H", 8, 3, 1, 1, 1), Spatial("W", 8, 3, 1, 1, 1))),
        Grid((("data", 2), ("row", 2))),
    )
    stored = stored_layouts("spatial", conv, {"N": ("data",), "H": ("row",)})
    roles = dict.fromkeys(PHASES, nest([("data", "N"), ("row", "H")]))
    roles["backward_filter"] = Roles(roles["forward"].nests, "input")
    space = Space(conv, grid)
    assert show(passed(lower("halo", space, stored, roles), space, Share())) == TEXT
    assert show(parse(TEXT)) == TEXT


def test_comments_and_space_do_not_matter() -> None:
    schedule = parse(TEXT)
    noisy = "\n# a schedule\n" + TEXT.replace("\n", "   # why\n\n").replace("    %", "%")
    assert parse(noisy) == schedule
    noted = show(schedule, {"dw": "20 elements", "y": "local"})
    assert [line.split("#")[1] for line in noted.splitlines() if "#" in line] == [" local", " 20 elements"]
    assert parse(show(schedule, {"dw": "20 elements"})) == schedule


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("schedule halo on", "schedule halo", 1),
        ("grid(data=2, row=2)", "grid(data=two, row=2)", 1),
        ("grid(data=2, row=2)", "grid(data=2 row=2)", 1),
        ("stored: x[data", "stored: z[data", 2),
        ("x[data, *, row, *] w[*, *]", "x[data, *, row, *] and w[*, *]", 2),
        ("x[data, *, row, *] w[*, *]", "x[data, * row, *] w[*, *]", 2),
        ("roles forward: N=data", "roles forward: Q=data", 3),
        ("  forward:", "  forwards:", 6),
        ("exchange %x dim=H over=row", "swap %x dim=H over=row", 7),
        ("exchange %x dim=H over=row", "exchange %x, %w dim=H over=row", 7),
        ("exchange %x dim=H over=row  ", "exchange x dim=H over=row", 7),
        (": x[data, *, row+(1,1), *]", ": x[data, *, row+(1), *]", 7),
        (": x[data, *, row+(1,1), *]", "", 7),
        ("conv_forward", "conv_sideways", 8),
        ("}\n", "", 14),
        ("}\n", "}\n}\n", 16),
        ("  roles forward: N=data H=row\n", "", 14),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old: str, new: str, line: int) -> None:
    assert old in TEXT
    with pytest.raises(InputError, match=f"line {line}:") as caught:
        parse(TEXT.replace(old, new, 1))
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "\n", "}", "forward:", "schedule s on grid() {"])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse(text)


def test_damaged_text_is_read_or_refused() -> None:
    """Characters dropped, doubled and swapped: a schedule or an InputError, nothing else."""
    rng = Random(4)
    for _ in range(600):
        text = list(TEXT)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(text))
            text[i : i + 1] = rng.choice(([], [text[i]] * 2, [rng.choice("%:=()[]{},+* ax1\n")]))
        with suppress(InputError):
            assert isinstance(parse("".join(text)), Schedule)
