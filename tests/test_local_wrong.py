"""What oneDNN gets wrong is right in a module, and CONVGEN_CHECK_LOCAL sees a kernel that is wrong.

The layers are of the kinds that templates/runtime/local.py lists, and some drawn; bench/local_fuzz.py draws many.
"""

from __future__ import annotations

from typing import Any

import drawn_layers
import pytest
import torch
from modules import Case, draw, on_gpu, run
from torch import Tensor

from convgen.compiler import compile_layer
from convgen.spec.reader import layer_from_dict
from convgen.verify.check import check
from convgen.verify.program import global_tensors

DRAWN = 25
ONE = {"grid": {"N": 1}, "algorithm": "sample"}
LAST = {"memory_format": "channels_last"}
KINDS: dict[str, dict[str, Any]] = {
    "dw_of_a_short_d_in_bfloat16": {
        "layer": "conv3d", "input": [2, 6, 2, 5, 5], "out_channels": 3, "groups": 3, "kernel_size": [3, 1, 1],
        "padding": [2, 0, 0], "dtype": "bfloat16", **LAST,
    },
    "dw_of_a_short_d_in_float32": {
        "layer": "conv3d", "input": [3, 1, 3, 4, 3], "out_channels": 1, "kernel_size": [4, 1, 3], "padding": [3, 0, 4],
        "dtype": "float32",
    },
    "y_of_one_channel_3d": {
        "layer": "conv3d", "input": [3, 1, 4, 6, 3], "out_channels": 5, "kernel_size": [2, 2, 2], "padding": [1, 0, 0],
        "stride": [1, 1, 2], "dilation": [1, 2, 1], "dtype": "float32", **LAST,
    },
    "y_of_one_channel_2d": {
        "layer": "conv2d", "input": [3, 1, 5, 4], "out_channels": 8, "kernel_size": [4, 3], "stride": [1, 2],
        "dtype": "float32", **LAST,
    },
    "y_of_one_channel_a_group": {
        "layer": "conv3d", "input": [3, 2, 1, 2, 6], "out_channels": 6, "groups": 2, "kernel_size": [4, 1, 3],
        "padding": [4, 2, 0], "stride": [1, 2, 1], "dilation": [2, 2, 1], "dtype": "bfloat16", **LAST,
    },
    "windows_that_all_miss_x": {
        "layer": "conv2d", "input": [4, 15, 4, 1], "out_channels": 3, "groups": 3, "kernel_size": 1, "stride": [1, 2],
        "padding": [2, 3], "dtype": "bfloat16", "bias": True, **LAST,
    },
    "many_taps_in_float16": {
        "layer": "conv3d", "input": [2, 3, 2, 4, 3], "out_channels": 2, "kernel_size": [3, 2, 2], "padding": [2, 4, 1],
        "dtype": "float16",
    },
}  # fmt: skip


@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_layers_are_right(number: int) -> None:
    case = drawn_layers.draw(0, number)
    assert all(drawn_layers.over_limit(case, phase, "module") <= 1 for phase in drawn_layers.PHASES), case


@pytest.mark.parametrize("kind", KINDS)
def test_known_kinds_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_layer(layer_from_dict({"name": kind, **ONE, **KINDS[kind]}))
    for asked in ("0", "1"):
        monkeypatch.setenv("CONVGEN_CHECK_LOCAL", asked)
        report = check(compiled)
        assert report.ok, report


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
def test_one_channel_with_any_strides(form: str) -> None:
    """A tensor of one channel passes as either format: its stride of C may be anything."""
    case = {**KINDS["y_of_one_channel_2d"], "memory_format": form}
    module = of(layer_from_dict({"name": f"one_channel_{form}", **ONE, **case})).module
    x = torch.randn(3, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    w = torch.randn(8, 1, 4, 3, generator=torch.Generator().manual_seed(1))
    wanted = torch.nn.functional.conv2d(x.double(), w.double(), stride=(1, 2))
    for stride in (1, 20, 7):
        for first in (x.as_strided(x.shape, (20, stride, 4, 1)), x):
            for second in (w.as_strided(w.shape, (12, stride, 3, 1)), w):
                y = module.conv_forward(module.LAYER, first, second, None, [0, 0], (3, 8, 2, 1))
                assert y.is_contiguous(memory_format=module.MEMORY_FORMAT)
                assert float((y.double() - wanted).abs().max()) < 1e-5


def of(layer: Any) -> Case:
    compiled = compile_layer(layer)
    return Case(layer, dict(compiled.schedule.stored), dict(compiled.schedule.roles))


# ---- CONVGEN_CHECK_LOCAL -------------------------------------------------------------------------------------------

CASES = {"a CPU's": draw(7, algorithm="spatial", least=2, most=4)} | {
    f"a GPU's, {i}": on_gpu(draw(seed, most=4)) for i, seed in enumerate((1003, 1010))
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_first_call_is_compared(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a problem: not again in the next step."""
    monkeypatch.setenv("CONVGEN_CHECK_LOCAL", "1")
    module, calls = case.module, list[str]()
    compare = module.error_and_limit
    monkeypatch.setattr(module, "error_and_limit", lambda *a: (calls.append(a[1]), compare(*a))[1])
    run(case, global_tensors(case.layer))
    assert set(calls) == {"forward", "backward_data", "backward_filter"}
    assert len(module.compared) >= len(set(calls))
    calls.clear()
    run(case, global_tensors(case.layer, seed=1))
    assert not calls
    module.compared.clear()


@pytest.mark.parametrize("phase", ["forward", "backward_data", "backward_filter"])
def test_a_wrong_kernel_is_named(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element of ATen's result; and without the variable nobody looks."""
    case = draw(7, algorithm="spatial", least=2, most=4)
    module = case.module
    name = "convolution" if phase == "forward" else "convolution_backward"
    right = getattr(torch.ops.aten, name)
    which = {"forward": 0, "backward_data": 0, "backward_filter": 1}[phase]

    class Wrong:
        def __getattr__(self, other: str) -> Any:
            return getattr(torch.ops.aten, other)

    def wrong(*args: Any) -> Any:
        made = right(*args)
        result: Tensor | None = made if name == "convolution" else made[which]
        if result is not None:
            result.view(-1)[0] += 1e-6 * float(result.abs().max())
        return made

    aten = Wrong()
    setattr(aten, name, wrong)
    monkeypatch.setattr(module, "aten", aten)
    run(case, global_tensors(case.layer))
    monkeypatch.setenv("CONVGEN_CHECK_LOCAL", "1")
    module.compared.clear()
    with pytest.raises(
        RuntimeError, match=rf"{case.layer.name}: CONVGEN_CHECK_LOCAL: the local {phase} is off by .* x \("
    ):
        run(case, global_tensors(case.layer))
    module.compared.clear()


def test_a_wrong_gpu_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["a GPU's, 0"]
    module = case.module
    right = module.forward

    def wrong(*args: Any) -> None:
        right(*args)
        args[3 if case.layer.conv.bias else 2].view(-1)[-1] += 1.0

    monkeypatch.setattr(module, "forward", wrong)
    monkeypatch.setenv("CONVGEN_CHECK_LOCAL", "1")
    module.compared.clear()
    with pytest.raises(RuntimeError, match="CONVGEN_CHECK_LOCAL: the local forward is off by"):
        run(case, global_tensors(case.layer))
    module.compared.clear()
