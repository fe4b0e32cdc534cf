"""What a module's kernels were made for is looked at where they run: Triton's version, and the GPU's architecture."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
import torch
import triton
from kernel_cases import SM_90

from convgen.kernels.choose import choose
from convgen.kernels.families import box, pointer
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module

P = Problem(
    phase="forward", batch=1, channels=16, filters=16, dims=(LocalDim("W", 4, 4, 1, 1, 1, 0),) * 2, dtype="bfloat16",
    memory_format="channels_last",
)  # fmt: skip


def loaded(family: ModuleType) -> dict[str, object]:
    text = kernel_module([Kernel((P,), family.default(P, SM_90), SM_90)])
    names: dict[str, object] = {"__name__": "guarded"}
    exec(text.split("@triton.jit")[0].rstrip() + "\n", names)  # what a module does before its first kernel
    return names


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0"])
def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ImportError, match=f"for triton 3.6 to 3.9, this is {version}"):
        loaded(pointer)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0+git"])
def test_these_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert "launch" in loaded(pointer)


def test_another_gpu_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check = loaded(pointer)["check_device"]
    with pytest.warns(UserWarning, match="made for sm_90, this is sm_80: convgen compile --target cuda:sm_80"):
        check(0)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(0)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="made for sm_90 and can't run on sm_80"):
        loaded(box)["check_device"](0)  # type: ignore[operator]


def test_its_own_gpu_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(box)["check_device"](0)  # type: ignore[operator]


def test_a_target_of_amd_says_nothing() -> None:
    from convgen.spec.target import read_target

    kernel = choose((P,), read_target("hip:gfx942").known())
    assert "check_device" not in kernel_module([kernel])
