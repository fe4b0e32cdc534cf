"""What a kernel's sizes must serve: ranks whose shares of channels or filters are unlike, and operands in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernel_cases import PHASES, SM_90, three_by_three

from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.kernels.box_tiles import parts_together
from convgen.kernels.choose import choose, choose_kernels
from convgen.kernels.config import Config
from convgen.kernels.families import box
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel
from convgen.spec.reader import layer_from_dict
from convgen.tune.candidates import source_of
from convgen.tune.database import Database, Entry
from convgen.tune.device import Device, versions
from convgen.tune.key import key_of
from convgen.tune.lookup import Remembered
from convgen.verify.check import check


def spec(**changes: Any) -> dict[str, Any]:
    """A stride of 2, which has two rows' channels side by side, of 64 and 32 channels."""
    values = {
        "name": "two_shares", "layer": "conv2d", "input": [2, 96, 8, 8], "out_channels": 64, "kernel_size": 3,
        "stride": 2, "padding": 1, "dtype": "bfloat16", "memory_format": "channels_last", "grid": {"C": [2, 1]},
        "algorithm": "stationary-x", "target": "cuda:sm_90",
    }  # fmt: skip
    return values | changes


def strided(phase: Any, channels: int, filters: int = 64, **changes: Any) -> Problem:
    p = three_by_three(phase, channels=channels, filters=filters, dtype="bfloat16", **changes)
    return replace(p, batch=64, dims=tuple(replace(d, x=16, y=8, stride=2) for d in p.dims))


def test_steps_divide_the_channels_of_every_rank() -> None:
    compiled = compile_layer(layer_from_dict(spec()))
    kernels = choose_kernels(compiled.layer, compiled.schedule, compiled.space)
    assert [k.config.family for k in kernels] == ["box"] * 3
    assert kernels[0].config.tile["BC"] == 32 and kernels[2].config.tile["BC"] <= 32
    assert check(compiled, interpret=True).ok


def test_a_pinned_kernel_that_does_not_serve_a_rank_is_refused() -> None:
    kernels = {"forward": "box TN=1 TH=8 TW=8 BF=64 BC=64 warps=4 stages=3"}
    layer = layer_from_dict(spec(options={"kernels": kernels}))
    with pytest.raises(InputError, match="BC=64 does not divide 32 channels") as caught:
        compile_layer(layer)
    assert "BC=32" in str(caught.value.hint)


def test_a_pinned_box_of_several_samples_is_refused_where_parts_follow_each_other() -> None:
    """A box of two samples would write over the next part's first one, where samples are odd."""
    kernels = {"forward": "box TN=2 TD=2 TH=4 TW=4 BF=16 BC=32 warps=4 stages=3"}
    changes = {"layer": "conv3d", "input": [3, 64, 4, 4, 4], "out_channels": 32, "stride": 1, "grid": {"C": 2}}
    layer = layer_from_dict(spec(**changes, options={"kernels": kernels}))
    with pytest.raises(InputError, match="TN=2, where the next part's samples lie behind a part's: TN=1"):
        compile_layer(layer)


@pytest.mark.parametrize("phase", ["forward", "backward_filter"])
def test_a_measured_kernel_that_does_not_serve_a_rank_is_not_taken(phase: Any, tmp_path: Any) -> None:
    problems = strided(phase, 64), strided(phase, 32)
    config = next(c for c in box.configs(problems[0], SM_90) if c.tile["BC"] == 64)
    entry = Entry(
        kernel=str(config), ms=1, p20=1, p80=1, aten_ms=None, ratio=None, share=0.5, bound="memory", error=0, tried=1,
        of=1, effort="full", versions=versions(SM_90), source=source_of(problems[0], config, SM_90),
    )  # fmt: skip
    database = Database(device="one", target=str(SM_90), entries={key_of(problems[0]): entry})
    known = Remembered(SM_90, Device("one", str(SM_90)), ((tmp_path, database),))
    assert known.kernel(problems[:1]).config == config
    found = known.kernel(problems).config
    assert found is None or found.tile["BC"] <= 32


def test_tiles_hold_as_many_parts_on_every_rank() -> None:
    p = replace(three_by_three("backward_filter", channels=128, filters=32, dtype="bfloat16"), batch=64, y_parts=4)
    alone, both = choose((p,), SM_90), choose((p, replace(p, filters=16)), SM_90)
    assert parts_together(p, alone.config) == 2
    assert parts_together(p, both.config) == parts_together(replace(p, filters=16), both.config)


@pytest.mark.parametrize("phase", PHASES[:2])
def test_a_kernel_is_told_of_steps_that_every_rank_has(phase: Any) -> None:
    """Pieces of a tile: of 64 channels each has a step, of 32 one has none, and what is told otherwise may run one."""
    one = three_by_three(phase, channels=64, filters=64, dtype="bfloat16")
    one = replace(one, dims=tuple(replace(d, kernel=1, below=0) for d in one.dims))
    few = replace(one, channels=32, filters=32)
    made, read = ("BC", "BF") if phase == "backward_data" else ("BF", "BC")
    config = Config("box", (("TN", 1), ("TH", 8), ("TW", 8), (made, 64), (read, 32)), 4, 3, 2)
    assert "tl.assume(first < last)" in Kernel((one, one), config, SM_90).source()
    assert "tl.assume(first < last)" not in Kernel((one, few), config, SM_90).source()
