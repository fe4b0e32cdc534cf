"""A row of a network by its steps: formulas are what ranks far from the edges send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from sampling import cases_of
from test_one_row import as_a_network

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.symbolic import axis_size, symbol
from convgen.explain.row import row_lines
from convgen.spec.layer import Distribution, Layer

AXES: dict[str, int] = {"a": 3, "b": 4}


def divided(draw: Random) -> tuple[Layer, dict[str, int]]:
    """A convolution whose extents its axes divide, and numbers for its symbols."""
    stride, kernel = draw.choice((1, 2)), draw.choice((1, 3, 5))
    rows = 96 * stride
    pad = (kernel - stride + 1) // 2
    space = Spatial("W", rows, kernel, stride, pad, kernel - stride - pad if kernel >= stride else 0)
    conv = Conv(12, 12, 24, (space,), draw.choice((1, 1, 4)))
    if space.out * stride != rows:
        return divided(draw)

    def axes(dims: int) -> tuple[tuple[str, ...], ...]:
        places: list[tuple[str, ...]] = [()] * dims
        for a in AXES:
            if (d := draw.randrange(-1, dims)) >= 0:
                places[d] = (*places[d], a)
        return tuple(places)

    roles = {a: draw.choice(("N", "C", "F", "W", "none")) for a in AXES}
    layer = Layer(
        name="one", conv=conv, dtype="float64", grid=Grid(tuple(AXES.items())), algorithm=None,
        distribution=Distribution(x=axes(3), w=axes(2), y=axes(3)), roles=(("forward", tuple(roles.items())),),
    )  # fmt: skip
    return layer, {"N": 12, "C": 12, "F": 24, "G": conv.groups, "W": rows, "Wo": space.out}


@pytest.mark.parametrize("seed", cases_of(24, "test_formulas_are_what_ranks_send"))
def test_formulas_are_what_ranks_send(seed: int, tmp_path: Path) -> None:
    """Of all that has a form the busiest rank sends just that: an interior one has neighbours on all sides."""
    draw, checked = Random(f"formula {seed}"), 0
    while checked < 3:
        layer, numbers = divided(draw)
        if layer.conv.groups > 1:
            layer = replace(layer, distribution=Distribution(x=((), (), ("b",)), w=((), ()), y=((), (), ("b",))))
            layer = replace(layer, roles=(("forward", (("b", "W"), ("a", "none"))),))
        program = as_a_network(layer, tmp_path).program
        known: dict[Any, int] = {symbol(name): n for name, n in numbers.items()}
        known |= {axis_size(a): n for a, n in AXES.items()}
        for line in row_lines(program, 0):
            formula = line["formula"]
            if not line["axes"] or formula.elements is None:
                continue
            assert formula.elements.subs(known) == line["elements"], line
            checked += line["elements"] > 0


def test_explain_prints_a_row(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    node = "{name: a, kind: conv, out_channels: 4, kernel_size: 3, padding: 1}"
    file.write_text(f"name: net\ninput: [2, 4, 12, 6]\nnodes:\n- {node}\n")
    told = CliRunner().invoke(cli, ["explain", str(file), "--grid", "H=3", "--row", "a"])
    assert told.exit_code == 0, told.output
    assert "exchange over H" in told.output and "2*N*C*W" in told.output and "18*N*C*F*Ho*Wo/|H|" in told.output
    wrong = CliRunner().invoke(cli, ["explain", str(file), "--grid", "H=3", "--row", "b"])
    assert "no row b" in str(wrong.exception)
    layer = CliRunner().invoke(cli, ["explain", "examples/spatial_2x2.yaml", "--row", "a"])
    assert "--row is of networks" in str(layer.exception)
    for flag in (["--json"], ["--plot", str(tmp_path / "row.svg")]):
        both = CliRunner().invoke(cli, ["explain", str(file), "--grid", "H=3", "--row", "a", *flag])
        assert f"{flag[0]} is of the whole network" in str(both.exception), both.output
