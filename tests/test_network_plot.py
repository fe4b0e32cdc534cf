"""The picture of a network: lines of modules, what they hold and move, and the same every time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import boxes_of, meet
from small_networks import compiled, exported, resnet, unet

from convgen.commands.main import cli
from convgen.explain.network_lines import network_lines
from convgen.explain.network_plot import MOVES, SUMS, draw_network
from convgen.explain.program import steps
from convgen.pictures.canvas import Canvas
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


@pytest.mark.parametrize("grid", [{"N": 2, "H": 2}, {"C": 2, "F": 2}], ids=str)
def test_no_bar_runs_under_words_and_no_words_under_others(grid: dict[str, int]) -> None:
    one, _ = compiled(resnet, **grid)
    page = draw_network(one)
    words, filled = boxes_of(page)
    bars = [box for colour, box in filled if colour in (MOVES, SUMS)]
    assert bars and not [text for text, box in words for bar in bars if meet(box, bar)]
    assert not [(a[0], b[0]) for i, a in enumerate(words) for b in words[:i] if meet(a[1], b[1])]
    edge = page._figure.bbox
    assert all(box.x0 >= 0 and box.x1 <= edge.x1 and box.y0 >= 0 and box.y1 <= edge.y1 for _, box in (*words, *filled))


def test_shares_are_linear_and_the_largest_comes_first() -> None:
    one, _ = compiled(resnet, N=2, H=2)
    lines = network_lines(one)
    sizes: dict[str, int] = {}
    for line in lines:
        name = ".".join(filter(None, (line.box, line.name)))
        sizes[name] = sizes.get(name, 0) + sum(s.total for s in (*line.forward, *line.backward))
    words, filled = boxes_of(draw_network(one))
    top = next(box.y0 for text, box in words if "the largest first" in text)
    rows = [(text, box) for text, box in words if box.y1 < top]
    names = [text for text, _ in rows if text in sizes]
    assert names == sorted(names, key=lambda name: -sizes[name]) and len(names) >= 5
    whole = sum(sizes.values())
    lengths: dict[str, float] = {}
    for name in names:
        y = next((box.y0 + box.y1) / 2 for text, box in rows if text == name)
        parts = [box for colour, box in filled if colour in (MOVES, SUMS) and box.y0 < y < box.y1]
        lengths[name] = sum(box.width for box in parts)
        assert any(text.startswith(f"{sizes[name] / whole:.1%} ") and box.y0 < y < box.y1 for text, box in rows)
    scale = lengths[names[0]] / sizes[names[0]]
    assert all(length == pytest.approx(scale * sizes[name]) for name, length in lengths.items())


def test_scales_of_many_decades_have_room_for_their_labels() -> None:
    page, bars = Canvas(4, 2), Bars(1, 10**11, 0.95, 1.0)
    bars.draw_scale(page, 0.5, 0.5, 1.5)
    words, _ = boxes_of(page)
    assert len(words) >= 2 and not [a for i, (_, a) in enumerate(words) for _, b in words[:i] if meet(a, b)]
