"""Input that nobody means well with: exit code 2 and a message, never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from convgen.commands import main as cli

ROOT = Path(__file__).resolve().parent.parent
LAYER = "name: one\nlayer: conv2d\ninput: [2, 4, 8, 8]\nout_channels: 4\nkernel_size: 3\ngrid: {N: 2}\n"
NETWORK = ("plan", str(ROOT / "examples/networks/alexnet.yaml"), "--machine", "cuda")


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "binary.yaml"),
        ("compile", "empty.yaml"),
        ("compile", "folder.yaml"),
        ("compile", "deep.yaml"),
        ("compile", ""),
        ("compile", "one.yaml", "-o", ""),
        ("compile", "folder.csv", "--grid", "N=2"),
        ("explain", "one.yaml", "--machine", "binary.yaml"),
        ("explain", "one.yaml", "--plot", ""),
        ("check", "one.yaml", "--target", ""),
        ("tune", "one.yaml", "--explain", ""),
        ("tune", "one.yaml", "--partitions", ""),
        (*NETWORK, "--ranks", "4", "--memory", "1e300"),
        (*NETWORK, "--ranks", "9" * 20),
        ("sw26010", "gemm", "9" * 20, "8", "8"),
        ("sw26010", "gemm", "1000000", "1000000", "1000000", "--run"),
        ("sw26010", "conv", "1", "1", "9", "9", "9" * 20),
        ("sw26010", "conv", "1", "1", "9", "9", "1", "--kernel", "9" * 16, "--padding", "9" * 16),
        ("sw26010", "pool", "100000", "100000", "100000", "1000000", "2"),
        ("sw26010", "allreduce", "--bandwidth", "nan"),
        ("sw26010", "allreduce", "--bandwidth", "inf"),
        ("sw26010", "allreduce", "--gamma", "nan"),
        ("sw26010", "allreduce", "--nodes", str(2**30)),
        ("sw26010", "allreduce", "--bytes", "9" * 26),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_it_is_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("folder.yaml", "folder.csv"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 20000)
    (tmp_path / "one.yaml").write_text(LAYER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["convgen", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    seen = capsys.readouterr()
    assert end.value.code == 2
    assert seen.err and not seen.out and "Traceback" not in seen.err


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(28, "No space left on device"), "no space is left"), (MemoryError("Unable to allocate"), "Unable to")],
)
def test_what_the_machine_lacks_is_no_bug(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "one.yaml").write_text(LAYER)
    monkeypatch.setattr("convgen.commands.compile.compile_files", fails)
    monkeypatch.setattr(sys, "argv", ["convgen", "compile", str(tmp_path / "one.yaml"), "--emit", "module"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and said in capsys.readouterr().err
