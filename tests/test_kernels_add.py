"""Ordered sums of a GPU's module: one kernel, the plain sum's bits, every piece read once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import SM_90
from modules import Case, draw, on_gpu, run, with_dtype
from sampling import draws
from torch import Tensor

from convgen.compiler import compile_layer
from convgen.cost.traffic import elements_received
from convgen.emit.local import summed_steps
from convgen.explain.kernels import kernels_json, kernels_text
from convgen.kernels.add import add_arguments, add_module, moved_bytes, sums_module
from convgen.kernels.facts import Launch, facts
from convgen.kernels.load import load_text
from convgen.spec.reader import layer_from_dict
from convgen.verify.interpreter import launch
from convgen.verify.program import TORCH_DTYPES, global_tensors

DTYPES = ("float64", "float32", "bfloat16", "float16")


def added(pieces: Tensor, dtype: torch.dtype) -> Tensor:
    """One after the other, in a wide type."""
    total = pieces[0].to(torch.float64 if dtype == torch.float64 else torch.float32)
    for piece in pieces[1:]:
        total = total + piece
    return total.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_the_plain_ones_bit_for_bit(dtype: str) -> None:
    """Of any number of elements, in the order of the pieces and no other; nothing is written behind the sum."""
    rng, kind = random.Random(f"add {dtype}"), TORCH_DTYPES[dtype]
    kernel: Any = load_text(add_module(dtype)).kernel
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for n in (0, 1, 7, 8, 1024, 1025, *(rng.randint(2, 3000) for _ in range(draws(4)))):
        count = rng.choice((2, 3, 4, 6, 9))
        scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
        pieces = (torch.randn(count, n, generator=generator, dtype=torch.float64) * scale).to(kind)
        out = torch.full((n + 64,), torch.nan, dtype=kind)
        (_, _, elements), constants = add_arguments(n, count, dtype)
        launch(kernel, (-(-n // constants["BLOCK"]), 1, 1), pieces.reshape(-1), out, elements, **constants)
        assert torch.equal(out[:n], added(pieces, kind)) and out[n:].isnan().all()
    tiny = 2.0 ** (-60 if dtype == "float64" else -10)
    large = 2.0**15
    # What is lost beside a large addend shows the order.
    for values, total in (([large, tiny, -large], 0.0), ([large, -large, tiny], tiny)):
        pieces, out = torch.tensor(values, dtype=kind), torch.full((1,), torch.nan, dtype=kind)
        (_, _, elements), constants = add_arguments(1, 3, dtype)
        launch(kernel, (1, 1, 1), pieces, out, elements, **constants)
        assert float(out) == total


def test_networks_add_by_one_launch_of_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a network's module adds, and what it launches for it; of nothing, nothing."""
    module: Any = load_text(sums_module())
    ran: list[str] = []

    def noted(function: Any, *args: Any, **more: Any) -> None:
        ran.append(function.fn.__name__)
        launch(function, *args, **more)

    monkeypatch.setattr(module, "launch", noted)
    generator = torch.Generator().manual_seed(3)
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        for n, count in ((0, 3), (1, 2), (1025, 3), (2048, 5)):
            ran.clear()
            pieces = torch.randn(count, n, generator=generator, dtype=torch.float64).to(TORCH_DTYPES[dtype])
            assert torch.equal(module.add(pieces.reshape(-1), count), added(pieces, pieces.dtype))
            assert ran == (["add_doubles" if dtype == "float64" else "add_pieces"] if n else [])


def of_three(seed: int, dtype: str) -> Case:
    """A layer for a GPU with a sum of three addends and more."""
    while True:
        case = on_gpu(with_dtype(draw(seed, least=3, most=6), dtype))
        options = replace(case.layer.options, sums="ordered")
        case = replace(case, layer=replace(case.layer, options=options))
        steps = summed_steps(case.schedule, "ordered", dtype)
        if any(case.layer.grid.over(s.over) > 2 for _, s in steps):
            return case
        seed += 1000


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_modules_add_by_one_launch(dtype: str) -> None:
    """A launch a step and rank that has elements; the same bits as without the kernel; ragged pieces, too."""
    for seed in range(draws(3)):
        case = of_three(seed, dtype)
        module: Any = case.module
        given = global_tensors(case.layer)
        sizes: list[int] = []
        kernel = module.LAYER.add

        def counted(pieces: Tensor, count: int, kernel: Any = kernel, sizes: list[int] = sizes) -> Tensor:
            sizes.append(pieces.numel() // count)
            return kernel(pieces, count)

        try:
            module.LAYER.add = counted
            fused = run(case, given)
            module.LAYER.add = None
            plain = run(case, given)
        finally:
            module.LAYER.add = kernel
        ranks = case.layer.grid.ranks
        # Virtual ranks add two addends, too.
        steps = [s for _, s in case.schedule.steps() if getattr(s, "kind", "") in ("all_reduce", "reduce_scatter")]
        assert len(sizes) == len(steps) * ranks
        for a, b in zip(fused, plain, strict=True):
            assert all(torch.equal(a.blocks[name], b.blocks[name]) for name in b.blocks), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_compiles_to(dtype: str) -> None:
    """16 bytes a thread wherever pieces are multiples of that, any number of them; no spills, no shared memory."""
    kernel: Any = load_text(add_module(dtype)).kernel
    size = TORCH_DTYPES[dtype].itemsize
    for pieces, elements in ((2, 4096), (4, 1000), (64, 5 * 16 // size), (4, 1001)):
        args, constants = add_arguments(elements, pieces, dtype)
        found = facts(Launch(kernel, (1, 1, 1), args, constants), SM_90)
        assert found.spill_bytes == 0 and found.shared_bytes == 0
        assert found.widest_global_load_bytes == (16 if elements * size % 16 == 0 else size)


def reduced(dtype: str, **options: str) -> Any:
    """Two ranks of samples and four of channels: y in pieces of four ranks, dw of two."""
    spec = {
        "name": "reduced", "layer": "conv2d", "input": [4, 64, 7, 7], "out_channels": 72, "kernel_size": 3,
        "padding": 1, "dtype": dtype, "memory_format": "channels_last", "grid": {"N": 2, "C": 4},
        "algorithm": "stationary-x", "target": "cuda:sm_90", "options": options,
    }  # fmt: skip
    return compile_layer(layer_from_dict(spec))


def test_kernels_are_counted() -> None:
    """Each piece once and the sum: 10 bytes an element of bfloat16 on four ranks. Half types are added by the rank on
    two ranks already, others by the backend; `native` has no sums."""
    compiled = reduced("bfloat16")
    found = [r for r in kernels_json(compiled) if r["name"] == "add_pieces"]
    by_step = {r["step"]: r for r in found}
    steps = {s.result: s for _, s in summed_steps(compiled.schedule, "ordered", "bfloat16")}
    assert set(by_step) == set(steps) and by_step["dw"]["config"]["PIECES"] == 2
    y = by_step["y"]
    elements = 2 * 7 * 7 * 72 // 4
    assert y["config"]["PIECES"] == 4 and y["ranks"] == list(range(8))
    assert y["bound"]["moved_bytes"] == 10 * elements == moved_bytes(elements, 4, 2)
    step, types = steps["y"], compiled.schedule.types()
    got = elements_received(compiled.space, "reduce_scatter", step.over, types[step.source], step.type)
    assert int(got[0]) == 3 * elements
    line = next(one for one in kernels_text(compiled).splitlines() if "add_pieces" in one)
    assert line.split()[-4:] == ["launch", "2", "1", "4.0"]
    wide = {r["step"] for r in kernels_json(reduced("float32")) if r["name"] == "add_pieces"}
    assert wide == {"y"}
    native = reduced("bfloat16", sums="native")
    assert not any(r["name"] == "add_pieces" for r in kernels_json(native)) and "add_pieces" not in native.module()
