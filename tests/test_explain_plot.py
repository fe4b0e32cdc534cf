"""Pictures of an algorithm: they are written, say what they should, and are the same every time."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from generate import random_problem

from convgen.algebra.conv import SPATIAL_NAMES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.compiler import Compiled, compile_layer
from convgen.errors import InputError
from convgen.explain.needs import interior_rank, owner, panels, parts_of, segments
from convgen.explain.ownership import holders
from convgen.explain.plot import plot
from convgen.explain.words import ranks_text
from convgen.pictures.colours import rank_colour
from convgen.pictures.tracks import Block, place, stretch
from convgen.spec.layer import Layer


def compiled(
    grid: dict[str, int],
    algorithm: str = "spatial",
    *,
    input: tuple[int, ...] = (2, 4, 12, 12),
    filters: int = 6,
    kernel: int = 3,
    stride: int = 1,
    pad: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> Compiled:
    names = SPATIAL_NAMES[len(input) - 2]
    spatial = tuple(Spatial(n, e, kernel, stride, pad, pad) for n, e in zip(names, input[2:], strict=True))
    conv = Conv(input[0], input[1], filters, spatial, groups, bias)
    return compile_layer(Layer(name="a_layer", conv=conv, grid=Grid(tuple(grid.items())), algorithm=algorithm))


def svg(one: Compiled, folder: Path) -> str:
    path = folder / "plot.svg"
    plot(one, path)
    return path.read_text(encoding="utf-8")


def test_spatial_picture_says_who_sends_the_halo(tmp_path: Path) -> None:
    text = svg(compiled({"H": 3, "W": 3}, bias=True), tmp_path)
    for said in (
        "a_layer",
        "conv2d N=2 C=4 H=12 W=12 F=6 K=3x3 stride=1 padding=1 bias float32  (Ho=12 Wo=12)",
        "What rank 4 reads and makes",  # the only one with neighbours on all sides
        "Of it, 160 elements come from ranks 0-3,5-8.",  # 6 * 6 - 4 * 4 rows and columns, 2 samples, 4 channels
        "dotted: zero padding",
        "H over H, W over W; copies over none",
        "whole on every rank; copies over H, W",
        "1 exchange",
        "2 conv_forward",
    ):
        assert said in text, said


def test_partial_sums_and_copies_are_said(tmp_path: Path) -> None:
    text = svg(compiled({"N": 2, "C": 2}, "stationary-x"), tmp_path)
    for said in ("0,2", "Σ 1", "2 copies of each block", "2 reduce_scatter", "uses dy_gathered, made before"):
        assert said in text, said


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_same_picture_same_bytes(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    plot(compiled({"C": 2}, "stationary-x"), first)
    plot(compiled({"C": 2}, "stationary-x"), second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "one",
    [
        {"grid": {"W": 3}, "input": (1, 2, 31)},
        {"grid": {"D": 2, "H": 2}, "input": (1, 2, 6, 8, 5)},
        {"grid": {"N": 2, "D": 2, "H": 2, "W": 2}, "input": (2, 2, 6, 8, 5)},
        {"grid": {"N": 4, "H": 2, "W": 2, "C": 2, "F": 2}, "algorithm": "stationary-w", "input": (8, 8, 12, 12)},
        {"grid": {"N": 64}, "algorithm": "sample", "input": (64, 2, 8, 8)},
        {"grid": {"H": 4}, "input": (2, 3, 32, 32), "kernel": 7, "stride": 2, "pad": 3},
        {"grid": {"G": 2, "H": 2}, "filters": 4, "groups": 4},
        {"grid": {"H": 5}, "input": (1, 2, 3, 3)},  # two ranks have no rows
        {"grid": {"N": 1}, "algorithm": "sample"},
    ],
)
def test_every_shape_of_layer_can_be_drawn(tmp_path: Path, one: dict[str, object]) -> None:
    assert "backward-filter" in svg(compiled(**one), tmp_path)  # type: ignore[arg-type]


def test_interior_rank_has_most_neighbours() -> None:
    one = compiled({"H": 4, "W": 4}, input=(1, 2, 16, 16))
    assert interior_rank(one.schedule, one.space) == 5


def test_conv1_window() -> None:
    """Exact rows: forward needs 3 below and 2 above, backward-data 1 and 2 (stride 2, K=7, P=3)."""
    one = compiled({"H": 4}, input=(1, 3, 224, 8), kernel=7, stride=2, pad=3)
    x = parts_of(one.schedule, one.space, "forward", 1)[0]
    dy = parts_of(one.schedule, one.space, "backward_data", 1)[0]
    assert x.own[2] == (56, 112) and x.used[2] == (53, 114) and x.others == (0, 2)
    assert dy.own[2] == (28, 56) and dy.used[2] == (27, 58) and dy.others == (0, 2)


def test_panels_cover_what_is_used_and_name_true_owners() -> None:
    one = compiled({"N": 2, "H": 3, "C": 2}, "stationary-x", input=(4, 4, 9, 7))
    held = one.space.held(dict(one.schedule.stored)["y"])
    dy = parts_of(one.schedule, one.space, "backward_data", 2)[0]
    assert panels(one.space, dy, True) == ((0, 1), (2, 3))
    for dim, (lo, hi) in enumerate(dy.frame):
        cuts = {v for b in segments(one.space, dy, dim) for v in (b.lo, b.hi)}
        assert {lo, hi} <= cuts
    for point in np.ndindex(4, 6, 9, 7):
        rank = owner(one.space, dy, 2, point)
        assert rank is not None and all(a <= i < b for i, (a, b) in zip(point, held[rank].tolist(), strict=True))


def test_holders_have_every_rank_once() -> None:
    for seed in range(20):
        conv, grid, stored, _ = random_problem(Random(seed))
        for layout in stored.values():
            ranks = [r for found in holders(Space(conv, grid), layout).values() for r in found]
            assert len(ranks) == len(set(ranks)) <= grid.ranks


def test_other_suffixes_and_too_many_ranks_are_refused(tmp_path: Path) -> None:
    one = compiled({"N": 2}, "sample")
    for name in ("plot.jpg", "plot"):
        with pytest.raises(InputError, match="no format of a plot") as caught:
            plot(one, tmp_path / name)
        assert ".png, .svg or .pdf" in caught.value.hint
    with pytest.raises(InputError, match="cannot write"):
        plot(one, tmp_path / "nowhere" / "plot.svg")
    with pytest.raises(InputError, match="up to 512 ranks"):
        plot(compiled({"N": 1024}, "sample", input=(1024, 1, 2, 2)), tmp_path / "plot.svg")


def test_missing_matplotlib_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [n for n in sys.modules if n.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError) as caught:
        plot(compiled({"N": 2}, "sample"), tmp_path / "plot.svg")
    assert "pip install '.[plot]'" in caught.value.hint


def test_blocks_stand_in_order_and_narrow_ones_stay_visible() -> None:
    blocks = [Block(0, 1), Block(1, 100), Block(100, 101)]
    placed = stretch(blocks, 1.0, 2.0, 0.25)
    assert [p.end - p.start for p in placed] == pytest.approx([0.25, 1.5, 0.25])
    nested = place([Block(i, i + 1, (i // 2, i % 2)) for i in range(4)], 0.0, 4.0, 0.1)
    gaps = [b.start - a.end for a, b in pairwise(nested)]
    assert gaps == pytest.approx([0.1, 0.2, 0.1]) and nested[-1].end == pytest.approx(4.0)


def test_colours_tell_64_ranks_apart() -> None:
    assert len({rank_colour(r, 64) for r in range(64)}) == 64


def test_sets_of_ranks_in_short() -> None:
    assert [ranks_text(r) for r in ([3], range(4), [0, 2], range(0, 32, 4))] == ["3", "0-3", "0,2", "0,4,…,28"]
