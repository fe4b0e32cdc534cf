"""`convgen check` refuses, before it runs anything, what this machine can't run, and judges what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from convgen import free_memory
from convgen.commands.main import cli
from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.free_memory import GIB, available_bytes
from convgen.spec.build import MAX_STRIDE, layer_from_dict
from convgen.verify import fits
from convgen.verify.check import check
from convgen.verify.fits import MOST_PROCESSES, MOST_VIRTUAL, check_fits, needed_bytes
from convgen.verify.program import reference

BASE: dict[str, Any] = {
    "name": "one", "layer": "conv2d", "input": [8, 4, 16, 16], "out_channels": 4, "kernel_size": 3, "padding": 1,
    "grid": {"N": 2},
}  # fmt: skip


def compiled(**changed: Any) -> Any:
    return compile_layer(layer_from_dict(BASE | changed))


def refused(file: Path, text: str, *words: str) -> InputError:
    file.write_text(text)
    done = CliRunner().invoke(cli, ["check", str(file), *words])
    assert isinstance(done.exception, InputError), (done.output, done.exception)
    assert not done.stdout
    return done.exception


def text(**changed: Any) -> str:
    return "".join(f"{key}: {value}\n".replace("'", "") for key, value in (BASE | changed).items())


def test_more_ranks_than_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("convgen.verify.check.check", ran)
    file = tmp_path / "one.yaml"
    error = refused(file, text(input=[4096, 1, 4, 4], grid={"N": 4096}))
    assert "4096 ranks; a check runs up to 1024 virtual ranks" in error.fact
    assert error.where == f"{file}:7" and "up to 1024 ranks" in error.hint
    error = refused(file, text(input=[128, 1, 4, 4], grid={"N": 128}), "--processes")
    assert "128 ranks; a check runs up to 64 processes" in error.fact and "without --processes" in error.hint
    error = refused(file, text(input=[65536, 64, 512, 512]))
    assert "GiB of memory are free" in error.fact and error.where == f"{file}:3"
    assert "N up to about" in error.hint


def test_as_many_as_the_limit_are_let_through() -> None:
    check_fits(compiled(input=[MOST_VIRTUAL, 1, 4, 4], grid={"N": MOST_VIRTUAL}), "virtual")
    check_fits(compiled(input=[MOST_PROCESSES, 1, 4, 4], grid={"N": MOST_PROCESSES}), "processes")


def test_memory_is_refused_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compiled(input=[64, 64, 56, 56], out_channels=64)
    needed, _ = needed_bytes(one, "virtual")
    monkeypatch.setattr(fits, "available_bytes", lambda: needed)
    check_fits(one, "virtual")
    monkeypatch.setattr(fits, "available_bytes", lambda: needed - 1)
    with pytest.raises(InputError, match="a check takes about") as caught:
        check_fits(one, "virtual")
    batch = int(caught.value.hint.split("about ")[1].split(";")[0])
    assert 1 <= batch < 64
    check_fits(compiled(input=[batch, 64, 56, 56], out_channels=64), "virtual")  # what is advised works
    monkeypatch.setattr(fits, "available_bytes", lambda: 0)
    with pytest.raises(InputError, match=r"0\.0 GiB") as caught:
        check_fits(one, "virtual")
    assert "smaller extents" in caught.value.hint
    monkeypatch.setattr(fits, "available_bytes", lambda: None)
    check_fits(one, "virtual")


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        ({}, 9 * 8 * 4 * 14 * 14),
        ({"dilation": 2}, 9 * 4 * 12 * 12),  # a sample at a time
        ({"kernel_size": 1}, 0),
    ],
)
def test_the_reference_unfolds_x(changed: dict[str, Any], columns: int) -> None:
    """ATen's float64 convolution on a cpu, as peaks of memory show."""
    conv = compiled(padding=0, **changed).layer.conv
    assert fits._columns(conv) == 8 * columns


def test_filters_on_several_ranks_unfold_x_several_times() -> None:
    assert fits._copies(compiled(grid={"F": 2}, algorithm="stationary-y", dtype="float64")) == 2
    assert fits._copies(compiled(algorithm="sample")) == 1


def test_memory_that_is_free_is_found(tmp_path: Path) -> None:
    free = available_bytes()
    assert free is None or 2**20 < free < 2**50
    for name, said in (("limit", f"{3 * GIB}\n"), ("used", f"{2 * GIB}\n"), ("stat", f"anon 5\ninactive_file {GIB}\n")):
        (tmp_path / name).write_text(said)
    files = [str(tmp_path / name) for name in ("limit", "used", "stat")]
    assert free_memory._group_bytes(*files) == 2 * GIB
    (tmp_path / "limit").write_text("max\n")
    assert free_memory._group_bytes(*files) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "tfloat32"])
@pytest.mark.parametrize("command", [("compile", "--emit", "schedule"), ("check",), ("explain",)])
def test_strides_that_hang_are_refused(dtype: str, command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(text(dtype=dtype, stride=2**31 - 1))
    done = CliRunner().invoke(cli, [command[0], str(file), *command[1:]])
    assert isinstance(done.exception, InputError)
    assert f"stride 2147483647 along W: ATen on a cpu takes up to 16384 in {dtype}" in done.exception.fact
    assert done.exception.where == f"{file}:9"
    assert done.exception.hint.startswith("stride: 16384, with the same output")


def test_strides_that_work_are_let_through() -> None:
    for changed in (
        {"stride": MAX_STRIDE},
        {"stride": [2**31 - 1, 1]},
        {"stride": 2**31 - 1, "dtype": "float64"},
        {"stride": 2**31 - 1, "target": "cuda:sm_90", "dtype": "float32"},
    ):
        compiled(**changed)
    with pytest.raises(InputError) as caught:
        compiled(stride=MAX_STRIDE + 1, input=[1, 1, 4, 10**6])
    assert caught.value.hint.startswith("stride: up to 16384;")


@pytest.mark.parametrize("changed", [{"stride": [2**31 - 1, 1]}, {"stride": 2**31 - 1, "dtype": "float64"},
                                     {"dilation": 2**31 - 1, "kernel_size": 1}])  # fmt: skip
def test_numbers_as_large_as_a_file_may_say_are_right(changed: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(text(input=[2, 2, 4, 4], **changed))
    assert CliRunner().invoke(cli, ["check", str(file)]).exit_code == 0


def test_a_transposed_convolution_may_be_cut_off_down_to_its_output_padding(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    changed = {"layer": "conv_transpose1d", "input": [2, 2, 1], "kernel_size": 2, "dilation": 6, "output_padding": 5}
    file.write_text(text(padding=[[8, 0]], **changed))
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert done.exit_code == 0 and "3 of 3 tensors right" in done.output


def test_native_sums_round_after_each_addend() -> None:
    """Which is no fault of the layer; results that nothing is added for have the tolerance that they have without."""
    limits = dict[str, list[float]]()
    for sums in ("native", "ordered"):
        changed = {"layer": "conv1d", "input": [64, 16, 16], "out_channels": 16, "bias": True}
        changed |= {"dtype": "bfloat16", "grid": {"N": 32}, "algorithm": "sample", "options": {"sums": sums}}
        one = compiled(**changed)
        report = check(one)
        assert report.ok, report
        assert ("native sums" in report.tolerance_from) == (sums == "native")
        limits[sums] = [t.tolerance for t in report.tensors]
    native, ordered = limits["native"], limits["ordered"]
    assert native[:2] == ordered[:2] and native[2] > ordered[2] and native[3] > ordered[3]


def test_a_wrong_weight_gradient_is_said_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has all taps, which no layout names."""

    def other(*given: Any) -> Any:
        truth = reference(*given)
        truth["dw"][3, 2, 1, 0] += 1e3
        return truth

    monkeypatch.setattr("convgen.verify.check.reference", other)
    (tmp_path / "one.yaml").write_text(text(grid={"C": 2}))
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "one.yaml")])
    assert done.exit_code == 1 and "dw[3, 2, 1, 0] is" in done.output


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "1e20"])
def test_timeouts_are_seconds(seconds: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["check", "one.yaml", f"--timeout={seconds}"])
    assert done.exit_code == 2 and "--timeout" in done.output


def test_processes_that_are_too_late_fail_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgen.verify.processes import TooLate

    def late(*_: object, **__: object) -> None:
        raise TooLate("rank 1: did not finish in 3.0 s")

    monkeypatch.setattr("convgen.verify.check.check", late)
    (tmp_path / "one.yaml").write_text(text())
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "one.yaml"), "--processes", "--timeout", "3"])
    assert done.exit_code == 1 and "did not finish in 3 s" in done.stderr and not done.stdout
