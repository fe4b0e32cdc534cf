"""Programs that share a tile: whoever comes last, the same bits; counters that are zero again, and nobody else's."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import SM_90, interpret, operands
from runtime_parts import ROOT
from sampling import draws
from test_kernels_bound import square
from test_kernels_truth import assert_right
from triton.runtime import interpreter

from convgen.kernels.config import Config
from convgen.kernels.families import of_gpu
from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.kernels.sharing import MOST_BYTES, added, addends, adds_last, bunches, second_sum
from convgen.kernels.source import Kernel, kernel_module
from convgen.tune.clock import own_counters

from runtime import graphs  # isort: skip
from runtime.mesh import shared  # isort: skip

assert (ROOT / "templates").is_dir(), "which runtime_parts has put on the path"

TILES = {
    "box": (("TN", 1), ("TH", 2), ("TW", 4), ("BF", 64), ("BC", 16)),
    "converted": (("TN", 1), ("TH", 2), ("TW", 4), ("BF", 16), ("BC", 64)),
    "tiled": (("TN", 1), ("TH", 2), ("TW", 4), ("BF", 16), ("BC", 64)),
    "gemm": (("BF", 32), ("BC", 16), ("BP", 16)),
    "pointer": (("BF", 32), ("BC", 16), ("BP", 16)),
}


def drawn(rng: random.Random, family: str) -> tuple[Problem, Config]:
    """A small problem of a family's filter gradient, or of boxes' other phases, and in how many pieces."""
    by_boxes = family in ("box", "converted", "tiled")
    phase = rng.choice(("forward", "backward_data", "backward_filter")) if family == "box" else "backward_filter"
    dtype = {"tiled": "tfloat32"}.get(family, rng.choice(("bfloat16", "float32", "tfloat32")))
    memory_format = {"converted": "contiguous"}.get(family, "channels_last")
    p = square(
        phase, size=rng.randint(3, 6), kernel=1 if family == "gemm" else 3, batch=rng.randint(1, 3), dtype=dtype,
        channels=64 if family == "tiled" else rng.choice((8, 24)), filters=rng.choice((8, 40)),
        memory_format=memory_format if by_boxes else rng.choice(("contiguous", "channels_last")),
    )  # fmt: skip
    count = rng.choice((2, 3, rng.randint(4, 8), rng.randint(9, 30)))
    if phase != "backward_filter":
        across = "BF" if phase == "forward" else "BC"
        tiles = (*TILES["box"][:3], (across, 16), ({"BF": "BC", "BC": "BF"}[across], 16))
        return p, Config(family, tiles, 4, 3, min(count, 8))
    return p, Config(family, TILES[family], 4, 3, count)


@pytest.mark.parametrize("family", list(TILES))
def test_whoever_comes_last(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that run in another order give the same bits, those of the sum in the order of pieces."""
    rng = random.Random(f"last {family}")
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    for seed in range(draws(4)):
        p, config = drawn(rng, family)
        assert of_gpu(config).refusal(p, SM_90) is None and addends(p, config) == config.split, (p, config)
        assert second_sum(p, config) == 1
        assert_right(p, config, seed, integers=True)
        given, order = operands(p, seed), rng.sample(range(config.split), config.split)
        plain, pieces_along = interpret(p, config, given), 2 if p.phase == "backward_filter" else 1

        def elsewhere(*at: int, mixed: bool, order: list[int] = order, along: int = pieces_along) -> None:
            here = list(at)
            if builder.grid_dim[along] == len(order):  # not a launch before
                here[along] = (order[::-1] if mixed and at[0] % 2 else order)[at[along]]
            place(*here)

        for mixed in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(builder, "set_grid_idx", partial(elsewhere, mixed=mixed))
                assert torch.equal(interpret(p, config, given), plain), (p, config, order)


@pytest.mark.parametrize("family", ["gemm", "pointer"])
def test_groups_in_many_pieces(family: str) -> None:
    """A convolution's groups, and bunches of pieces: neither takes the other's place."""
    for seed, split in enumerate((3, 9, 26)):
        kernel = 1 if family == "gemm" else 3
        p = square("backward_filter", size=5, kernel=kernel, batch=2, groups=3, channels=5, filters=20, dtype="float64")
        config = Config(family, TILES[family], 4, 3, split)
        assert of_gpu(config).refusal(p, SM_90) is None and addends(p, config) == split
        assert_right(p, config, seed)


def test_bunches_cover_the_pieces() -> None:
    for count in range(2, 400):
        each, many = bunches(count)
        assert (many - 1) * each < count <= many * each
        assert added(count) == (count if many == 1 else each + many) <= max(8, 2 * count**0.5 + 2)


def test_large_tiles_are_added_by_a_launch() -> None:
    """What one program would read for too long."""
    p = square("backward_filter")
    wide = Config("box", (("TN", 1), ("TH", 2), ("TW", 16), ("BF", 128), ("BC", 128)), 8, 3, 3)
    assert adds_last(p, wide) and MOST_BYTES == 3 * 128 * 128 * 4
    assert not adds_last(p, replace(wide, split=4)) and second_sum(p, replace(wide, split=4)) == 4
    assert not adds_last(replace(p, phase="forward"), wide) and not adds_last(p, replace(wide, split=1))


def test_counters_are_a_streams_or_a_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    p, config = drawn(random.Random(3), "gemm")
    module: Any = load_text(kernel_module([Kernel((p,), config, SM_90)]))
    current, capturing, made = [7], [False], list[int]()

    def zeros(n: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        made.append(n)
        return torch.empty(n, dtype=dtype).zero_()

    monkeypatch.setattr(module, "COUNTERS", {})
    monkeypatch.setattr(module.torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=current[0]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device = torch.device("cuda", 0)
    first = module.counters(5, device)
    assert module.counters(6, device) is first and len(made) == 1
    assert module.counters(9999, device).numel() == 9999, "a larger one takes its place"
    current[0] = 8
    assert module.counters(5, device) is not first
    capturing[0] = True
    assert module.counters(5, device) is not module.counters(5, device), "another's graph: cleared for each launch"
    module.COUNTERS["graph"] = {}
    own = module.counters(5, device)
    assert module.counters(5, device) is own
    current[0] = 9
    assert module.counters(5, device) is not own, "streams of one graph run side by side"


def test_a_graph_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is recorded, and no longer, also where it can't be; all modules of a process ask for the same."""
    p, config = drawn(random.Random(3), "gemm")
    module: Any = load_text(kernel_module([Kernel((p,), config, SM_90)]))
    assert module.COUNTERS is shared["counters"]
    seen: list[Any] = []
    place = SimpleNamespace(transport=None)

    class Recording:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", Recording)

    def run() -> None:
        seen.append(shared["counters"]["graph"])
        if len(seen) == 2:
            raise ValueError("no")

    graphs.recorded("net", run, place)  # type: ignore[arg-type]
    with own_counters():
        assert shared["counters"]["graph"] == {}
    assert "graph" not in shared["counters"]
    with pytest.raises(RuntimeError, match="can't be recorded"):
        graphs.recorded("net", run, place)  # type: ignore[arg-type]
    assert seen == [{}, {}] and seen[0] is not seen[1] and "graph" not in shared["counters"]
