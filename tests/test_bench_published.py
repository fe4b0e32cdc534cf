"""bench/published_cases.py: samples of PyTorch's are right by its families, and what is wrong is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import published_convolutions
import pytest
import torch
from click.testing import CliRunner
from scripts import BENCH, bench_script
from torch import Tensor
from torch.nn import functional

ROUNDINGS = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-14, torch.float64: 2.0**-40}


def sample(x: tuple[int, ...], w: tuple[int, ...], bias: int, **options: Any) -> Any:
    """As OpInfo has one."""
    return SimpleNamespace(input=torch.randn(x), args=(torch.randn(w), torch.randn(bias)), kwargs=options)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With two samples of OpInfo's instead of all: of groups, and transposed without a dimension of samples."""
    made = bench_script("published_cases")
    torch.manual_seed(0)
    grouped = sample((2, 4, 6, 5), (6, 2, 3, 2), 6, groups=2)
    transposed = sample((3, 4), (3, 3, 3), 3, stride=(2,), padding=2, output_padding=(1,))
    cases = [
        published_convolutions.of_sample("conv2d", functional.conv2d, grouped),
        published_convolutions.of_sample("conv_transpose1d", functional.conv_transpose1d, transposed),
    ]
    monkeypatch.setattr(made, "SOURCES", {"opinfo": lambda seed: cases})
    return made


def told(line: str) -> tuple[int, ...]:
    """Cases, runs and wrong ones of the last line."""
    return tuple(int(word.split()[0]) for word in line.split(", "))


def test_samples_are_right() -> None:
    """In a process of its own: PyTorch's tools for tests freeze the flags of its backends."""
    command = [sys.executable, str(BENCH / "published_cases.py"), "--only", "opinfo", "--problems", "9"]
    done = subprocess.run([*command, "--seconds", "600"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases, runs, wrong = told(done.stdout.splitlines()[-1])
    assert cases >= 3 and runs > 9 and wrong == 0


def right(value: Tensor, number: int) -> Tensor:
    return value


def one_element(value: Tensor, number: int) -> Tensor:
    """The largest, off by some roundings."""
    value = value.clone()
    value.view(-1)[int(value.abs().argmax())] *= 1 + ROUNDINGS[value.dtype]
    return value


def unwritten(value: Tensor, number: int) -> Tensor:
    return torch.where(value == value.max(), torch.nan, value)


def another_time(value: Tensor, number: int) -> Tensor:
    """The last bit of what the second run finds."""
    return torch.where(value == value.max(), value.nextafter(value * 0), value) if number % 2 else value


def beside(value: Tensor, number: int) -> Tensor:
    raise AssertionError("written before the result")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (right, None),
        (one_element, "1 of "),
        (unwritten, "are not float64's, by inf"),
        (another_time, "two runs differ"),
        (beside, "AssertionError: written before the result"),
    ],
)
def test_wrong_kernels_are_told(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, int], Tensor], what: str | None
) -> None:
    interpret, numbers = published_convolutions.interpret, count()
    monkeypatch.setattr(published_convolutions, "interpret", lambda *given: change(interpret(*given), next(numbers)))
    done = CliRunner().invoke(bench.main, ["--problems", "4", "--seconds", "600"])
    cases, runs, wrong = told(done.output.splitlines()[-1])
    assert done.exit_code == (what is not None) and cases == 2 and runs > 4, done.output
    assert wrong == (runs if what else 0)
    assert what is None or (what in done.output and "Problem(phase=" in done.output)


def test_what_is_read_otherwise_than_published_is_refused(bench: ModuleType) -> None:
    (case, _) = bench.SOURCES["opinfo"](0)
    rows = {"stride": (1, 1), "dilation": (1, 1), "groups": 2}
    operands = tuple(case.given[n] for n in ("x", "w", "bias"))
    published_convolutions.local("opinfo", "conv2d", False, operands, case.published, (0, 0), **rows)
    with pytest.raises(click.ClickException, match="another one than the published"):
        published_convolutions.local("opinfo", "conv2d", False, operands, case.published, (0, 1), **rows)
    off = case.published + torch.eye(1, case.published.numel()).double().view(case.published.shape) * 1e-4
    with pytest.raises(click.ClickException, match="another one than the published"):
        published_convolutions.local("opinfo", "conv2d", False, operands, off, (0, 0), **rows)
