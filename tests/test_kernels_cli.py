"""GPU targets on a machine without one: kernels printed and compiled, modules checked by interpretation, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from convgen.commands.main import cli
from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.spec.reader import read_layer

RECORD = {
    "name",
    "phase",
    "family",
    "config",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "matrix_instructions",
    "widest_global_load_bytes",
}
LAYER = """\
name: small
layer: conv2d
input: [2, 64, 5, 5]
out_channels: 64
kernel_size: 3
padding: 1
dtype: bfloat16
memory_format: channels_last
grid: {N: 1, C: 2}
algorithm: stationary-x
target: cuda:sm_90
"""


@pytest.fixture
def layer(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(LAYER)
    return str(path)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(words))
    if isinstance(result.exception, InputError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_kernels_as_json(layer: str) -> None:
    code, text = invoke("compile", layer, "--emit", "kernels", "--json")
    assert code == 0
    records = json.loads(text)
    assert {r["phase"] for r in records} >= {"forward", "backward_data", "backward_filter"}
    for r in records:
        assert set(r) >= RECORD
        assert r["spill_bytes"] == 0
        if r["family"] in ("pointer", "box", "gemm"):
            assert r["matrix_instructions"] > 0
            assert r["widest_global_load_bytes"] == 16
            assert 0 < r["shared_bytes"] <= 232448
            assert r["config"]["C"] == 32


def test_kernels_as_text_are_what_the_module_has(layer: str) -> None:
    code, text = invoke("compile", layer, "--emit", "kernels")
    assert code == 0
    module = compile_layer(read_layer(layer)).module()
    functions = re.findall(r"@triton\.jit\ndef \w+\(.*?(?=\n\n\n)", text, re.DOTALL)
    assert len(functions) >= 3
    assert all(f in module for f in functions)


def test_every_target_compiles_modules_without_a_gpu(layer: str, tmp_path: Path) -> None:
    for target in ("cuda", "cuda:sm_80", "cuda:sm_100", "hip", "hip:gfx942"):
        code, _ = invoke("compile", layer, "--target", target, "-o", str(tmp_path / "out"))
        assert code == 0
        text = (tmp_path / "out" / "small.py").read_text()
        assert (
            "import triton" in text and 'DEVICE = "cuda"' in text and "convgen" not in re.findall(r"import (\w+)", text)
        )
    assert invoke("compile", layer, "--target", "cuda:sm_75")[0] == 2
    assert "cuda:sm_90" in invoke("compile", layer, "--target", "cuda:sm_75", "--emit", "module")[1]


def test_check_interpret(layer: str) -> None:
    code, text = invoke("check", layer, "--interpret", "--json")
    (report,) = json.loads(text)
    assert code == 0 and report["ok"] and report["interpreted"] and report["counted_equals_volume"]
    assert {t["name"] for t in report["tensors"]} == {"y", "dx", "dw"}


def test_check_interpret_on_processes(layer: str) -> None:
    assert invoke("check", layer, "--interpret", "--processes")[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_check_without_a_gpu_is_refused(layer: str) -> None:
    code, text = invoke("check", layer)
    assert code == 2 and "no GPU" in text and "--interpret" in text


def test_a_wrong_kernel_is_found(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reads what kernels write: a kernel that skips a tap fails it."""
    from convgen.kernels.source import Kernel

    whole = Kernel.source
    short = {"range(9 * ": "range(8 * ", "steps = 9 * ": "steps = 8 * "}  # of one program a tile, or of several

    def wrong(self: Kernel) -> str:
        text = whole(self)
        for old, new in short.items():
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(Kernel, "source", wrong)
    code, text = invoke("check", layer, "--interpret")
    assert code == 1 and "WRONG" in text


def test_a_cpu_has_no_kernels(layer: str) -> None:
    code, text = invoke("compile", layer, "--target", "cpu", "--emit", "kernels")
    assert code == 2 and "--target cuda" in text
    assert invoke("check", layer, "--target", "cpu", "--interpret")[0] == 2


def test_same_bytes_every_time(layer: str) -> None:
    assert compile_layer(read_layer(layer)).module() == compile_layer(read_layer(layer)).module()
