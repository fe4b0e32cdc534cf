"""Filter gradients by boxes where a program makes several taps, or filters of several parts: right, and their bound."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import SM_90, interpret, operands, random_dim
from sampling import draws
from test_kernels_bound import of, square
from test_kernels_truth import DRAWS, assert_right, cases
from triton.tools.tensor_descriptor import TensorDescriptor

from convgen.kernels.box_tiles import filter_tiles, has_part, parts_together, taps_together, tile_pixels
from convgen.kernels.config import Config
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.families import box, depthwise, stem, tiled
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel
from convgen.kernels.work import Work
from convgen.spec.target import read_target


def drawn(rng: random.Random) -> tuple[Problem, Config]:
    """A filter gradient whose tile has 64 filters, and few channels or 64."""
    dims = tuple(
        replace(random_dim(rng, name, 6), kernel=rng.choice((1, 2, 3, 3, 4)), stride=1, dilation=rng.choice((1, 1, 2)))
        for name in rng.choice(("HW", "HW", "HW", "DHW", "W"))
    )
    dtype = rng.choice(("bfloat16", "bfloat16", "float16", "tfloat32", "float32"))
    filters = rng.choice((8, 16, 32, 32, 24, 64, 72))
    p = Problem(
        phase="backward_filter", batch=rng.randint(1, 3), channels=rng.choice((8, 16, 24, 64, 72)), filters=filters,
        dims=dims, dtype=dtype, memory_format="channels_last", x_parts=rng.choice((1, 1, 2)),
        y_parts=rng.choice((1, 2, 3, 5, 5)), rim=None,
    )  # fmt: skip
    if rng.random() < 0.2:
        p = replace(p, x_parts=1, y_parts=1, rim=0)
    if p.taps * p.x_parts * p.y_parts > 100:
        p = replace(p, channels=8)  # many programs, which the interpreter runs one by one
    tile = rng.choice(box.tiles(p, rng.choice((16, 32))) or [{"TN": 1} | {f"T{d.name}": 4 for d in dims}])
    return p, Config(
        box.NAME, (*tile.items(), ("BF", 64), ("BC", rng.choice((16, 32, 64)))), rng.choice((4, 8)), 3,
        rng.choice((1, 1, 3)),
    )  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_taps_and_parts_together_are_right(part: int) -> None:
    for seed in range(part, draws(90), 4):
        p, config = drawn(random.Random(f"together {seed}"))
        if box.refusal(p, SM_90) is None:
            assert_right(p, config, seed, integers=True)


def test_everything_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for seed in range(90):
        p, config = drawn(random.Random(f"together {seed}"))
        if box.refusal(p, SM_90) is not None:
            continue
        taps, parts = taps_together(p, config), parts_together(p, config)
        seen["all taps"] += taps == p.taps > p.dims[-1].kernel > 1
        seen["some taps"] += 1 < taps < p.taps
        seen["one tap of several"] += taps == 1 < p.taps
        seen["parts"] += parts > 1
        seen["parts that fill no tile"] += parts > 1 and p.y_parts % parts > 0
        seen["tiles of parts"] += parts > 1 and filter_tiles(p, config) > 1
        seen["parts and taps"] += parts > 1 and taps > 1
        seen["taps of a rim"] += p.rim is not None and taps > 1
        seen["dy is the columns"] += p.element_bytes == 4 and taps > 1 and config.tile["BC"] == 64
        seen["four bytes of few channels"] += p.element_bytes == 4 and taps > 1 and config.tile["BC"] < 64
    assert len(seen) == 10 and min(seen.values()) >= 1, seen


def test_parts_are_not_mixed_up() -> None:
    """What a part lies at decides which filters it makes: each part has its own dw."""
    d = LocalDim("W", 8, 8, 3, 1, 1, 1)
    for y_parts, filters in product((2, 3, 4, 7), (8, 16, 32)):
        p = Problem(
            phase="backward_filter", batch=1, channels=16, filters=filters, dims=(replace(d, name="H"), d),
            dtype="bfloat16", memory_format="channels_last", y_parts=y_parts,
        )  # fmt: skip
        config = Config(box.NAME, (("TN", 1), ("TH", 4), ("TW", 4), ("BF", 64), ("BC", 16)), 4, 3)
        assert parts_together(p, config) == 64 // filters
        assert_right(p, config, y_parts, integers=True)


def test_a_piece_without_a_box_adds_nothing() -> None:
    """Its program reads what lies behind the samples: here those of the next part, of both operands."""
    dims = tuple(LocalDim(name, 2, 2, 1, 1, 1, 0) for name in "DHW")
    p = Problem(
        phase="backward_filter", batch=2, channels=16, filters=16, dims=dims, dtype="bfloat16",
        memory_format="channels_last", x_parts=2, y_parts=2,
    )  # fmt: skip
    tile = (("TN", 1), ("TD", 2), ("TH", 2), ("TW", 4), ("BF", 16), ("BC", 16))
    assert not has_part(p, "x") and not has_part(p, "y")
    for split in (3, 5):  # of two boxes
        assert_right(p, Config(box.NAME, tile, 4, 3, split), split, integers=True)


def test_a_stem_is_summed_and_taken_by_one_launch() -> None:
    """Pieces of the gradient of blocks: w's gradient is taken from their sum where they are added."""
    done = 0
    for seed, p in enumerate(cases("stem", "backward_filter", int)):
        config = replace(stem.default(p, SM_90), split=3)
        names = [one.name for one in launches(Kernel((p,), config, SM_90), p)]
        assert names[-2:] == ["backward_filter_stem", "backward_filter_stem_result"]
        assert not any(name.endswith("_sum") for name in names)
        if done < draws(4):
            assert_right(p, config, seed, integers=True)
            done += 1
    assert done


@pytest.mark.parametrize(
    "name", ["pointer", "gemm", "packed", "depthwise", "box", "stem", "widened", "converted", "tiled"]
)
def test_many_pieces_are_added(name: str) -> None:
    """Several at once, empty ones among them; the same bits every time."""
    rng, family = random.Random(f"pieces {name}"), DRAWS[name][0]
    drawn = [p for p in cases(name, "backward_filter", int) if p.pixels < 100]
    found = [p for p in drawn if p.taps * p.groups * p.x_parts * p.y_parts <= 12] or drawn  # few programs a piece
    for seed, p in enumerate(found[: draws(3)]):
        config = replace(family.default(p, SM_90), split=rng.choice((rng.randint(2, 8), rng.randint(9, 40))))
        assert_right(p, config, seed, integers=p.dtype != "float64")
    given = operands(p, 1)
    assert torch.equal(interpret(p, config, given), interpret(p, config, given))


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "hip:gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_sums_compile(target: str, dtype: str) -> None:
    """For few pieces and for many; 16 bytes a thread, of which AMD's programs have more; no spills."""
    for split in (2, 16, 17, 264):
        p = square("backward_filter", size=8, channels=1, groups=16, dtype=dtype)
        config = replace(depthwise.default(p, read_target(target).known()), split=split)
        kernel = Kernel((p,), config, read_target(target))
        (launch,) = [one for one in launches(kernel, p) if one.name.endswith("_sum")]
        found = facts(launch, kernel.target.known())
        assert found.spill_bytes == 0 and found.shared_bytes <= kernel.target.known().shared_bytes
        assert found.widest_global_load_bytes == (8 if kernel.target.kind == "hip" and dtype == "bfloat16" else 16)


def counted(p: Problem, config: Config, family: Any) -> Any:
    """Bound and facts of a configuration's products."""
    kernel = Kernel((p,), config, SM_90)
    (main,) = [one for one in launches(kernel, p) if one.name == kernel.name]
    found = facts(main, SM_90, loops=True)
    b = bound(kernel, p, main, found)
    w: Work = family.work(p, config)
    assert b is not None and found.loop is not None and found.spill_bytes == 0 and found.loop.narrowest_copy == 16
    assert found.shared_bytes <= SM_90.shared_bytes, config
    assert b.step_bytes * config.stages <= SM_90.shared_bytes and w.tile[2] == tile_pixels(p, config)
    return b


def test_bound_of_few_channels() -> None:
    """A network's layer of 64 channels and filters, split four ways by channels: dy's parts of 16 filters fill a matrix
    instruction together, and all nine taps read them once."""
    p = square("backward_filter", size=56, channels=16, y_parts=4)
    b, spilled, narrowest = of(p)
    assert b.useful > 0.95 and b.share >= 0.6 and spilled == 0 and narrowest == 16
    assert b.us <= 2 * max(b.ideal_us, 4.0)  # two launches
    apart = replace(p, filters=64, y_parts=1)
    assert of(apart)[0].step_cycles["matrix"] == b.step_cycles["matrix"]


def test_bound_of_the_stem() -> None:
    """A first layer's: 16 taps of blocks together, and a launch less."""
    d = LocalDim("H", 224, 112, 7, 2, 1, 3)
    p = square("backward_filter", channels=3, filters=64, batch=8, dims=(d, replace(d, name="W")))
    b, spilled, narrowest = of(p)
    assert b.share_by_issue >= 0.8 and b.share_without_waits >= 0.6 and spilled == 0 and narrowest == 16
    assert b.share >= 0.75 and b.limit == "shared"
    assert b.times_us["around"] == pytest.approx(8.0)  # blocks before; the sum, which takes w's gradient, behind
    for launch in launches(kernel := Kernel((p,), stem.default(p, SM_90), SM_90), p):
        assert facts(launch, SM_90).spill_bytes == 0, (kernel, launch.name)


def test_bound_of_four_bytes_of_64_channels() -> None:
    """Three taps share the dy that is written back."""
    rounded = "round_f32_to_tf32" in TensorDescriptor.__annotations__
    for dtype, least in (("tfloat32", 0.45), ("float32", 0.9)):
        b, spilled, narrowest = of(square("backward_filter", size=56, channels=64, dtype=dtype))
        assert spilled == 0 and narrowest == 16, dtype
        assert b.share >= least or not rounded, (dtype, b)


def test_tiled_is_bound_by_the_matrix_units() -> None:
    """TF32's 3x3 of many channels: with dy laid out before, shared memory allows the peak; without, 0.73 of it."""
    if "round_f32_to_tf32" not in TensorDescriptor.__annotations__:
        pytest.skip("TF32 is rounded in registers before triton 3.7")
    for p in (square("backward_filter", size=56, dtype="tfloat32"), square("backward_filter", dtype="tfloat32")):
        laid, plain = (counted(p, family.default(p, SM_90), family) for family in (tiled, box))
        assert laid.share >= 0.95 and plain.share == pytest.approx(1 / (0.5 + 0.5 + 0.375), abs=0.01)
        assert laid.times_us["around"] > plain.times_us["around"]
