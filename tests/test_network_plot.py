"""The picture of a network: lines of modules, what they hold and move, and the same every time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_networks import compiled, exported, resnet, unet

from convgen.commands.main import cli
from convgen.explain.network_lines import network_lines
from convgen.explain.network_plot import draw_network
from convgen.explain.program import steps
from convgen.pictures.cells import Bars, bytes_text
from convgen.spec.graph_file import write_graph


def test_lines_leave_out_no_byte() -> None:
    for made in (resnet, unet):
        one, _ = compiled(made, N=2, H=2)
        lines = network_lines(one)
        program = one.program
        for said, sent in (
            ([s for line in lines for s in line.forward], steps(program, program.forward())),
            ([s for line in lines for s in line.backward], steps(program, program.backward())),
        ):
            assert sum(s.total for s in said) == sum(s.total for s in sent) > 0


def test_a_batch_norm_is_a_line_and_what_follows_in_place_stands_beside() -> None:
    one, _ = compiled(resnet, N=2, H=2)
    lines = network_lines(one)
    norms = [line for line in lines if line.name.rpartition(".")[2].startswith("bn")]
    modules = {line.module for line in norms}
    assert norms and len(norms) == len(modules)  # moments, statistics, coefficients and centred are one
    assert any("relu" in line.after for line in norms)


def test_the_page_says_what_is_held_and_moved(tmp_path: Path) -> None:
    one, _ = compiled(unet, H=2)
    path = tmp_path / "plot.svg"
    draw_network(one).save(path)
    text = path.read_text(encoding="utf-8")
    for said in ("UNet", "on grid(H=2): 2 ranks", "split over H (2)", "20/H", "exchange H", "all-reduce H", "→ out"):
        assert said in text, said
    again = tmp_path / "again.svg"
    draw_network(one).save(again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_explain_draws_and_still_prints(tmp_path: Path) -> None:
    graph, _ = exported(resnet)
    file = tmp_path / "resnet.yaml"
    file.write_text(write_graph(graph))
    command = ["explain", str(file), "--grid", "N=2,H=2", "--plot", str(tmp_path / "r.png")]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert re.search(r"^  in all +[\d,]+", done.stdout, re.MULTILINE)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_as_long_as_their_bytes_say() -> None:
    bars = Bars(1_000, 10_000_000, 2.0, 1.0)
    assert [round(bars.at(10**n), 6) for n in (3, 5, 7)] == [0.04, 1.0, 2.0]
    assert [bytes_text(n) for n in (12, 65_536, 999_900, 1_850_000, 3_230_000_000)] == [
        "12 B", "65.5 kB", "1 MB", "1.85 MB", "3.23 GB"
    ]  # fmt: skip
