"""Files that commands write are looked at before anything is worked out, printed or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.files import check_file, check_folder, write_file

ROOT = Path(__file__).resolve().parent.parent
LAYER = str(ROOT / "examples/auto.yaml")
NETWORK = ("plan", str(ROOT / "examples/networks/alexnet.yaml"), "--machine", "cuda", "--ranks", "2")

DRAWING = [
    ("explain", LAYER),
    NETWORK,
    ("tune", LAYER, "--partitions", "1"),
    ("sw26010", "gemm", "8", "8", "8"),
    ("sw26010", "table2"),
    ("sw26010", "allreduce"),
]
WRITING = [*((words, "--plot", ".png") for words in DRAWING), (NETWORK, "-o", ".yaml")]
WRITING += [(("sw26010", "table2"), "--write", ".json")]


def refused(*words: object) -> InputError:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert isinstance(done.exception, InputError), (done.output, done.exception)
    assert not done.stdout
    return done.exception


@pytest.mark.parametrize(("words", "option", "suffix"), WRITING, ids=lambda w: w[0] if isinstance(w, tuple) else w)
def test_a_file_that_cannot_be_is_refused(words: tuple[str, ...], option: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "file").write_text("")
    for name, why in (
        (f"no/such/a{suffix}", "is no folder"),
        (f"folder{suffix}", "it is a folder"),
        (f"file/a{suffix}", "is no folder"),
        (f"{'a' * 300}{suffix}", "File name too long"),
    ):
        error = refused(*words, option, tmp_path / name)
        assert error.fact.startswith(f"{option}: cannot write ") and why in error.fact
        assert error.hint == f"{option} FILE in a folder that you may write to"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(("file", f"folder{suffix}"))


@pytest.mark.parametrize("words", DRAWING, ids=lambda w: w[0])
def test_a_picture_that_cannot_be_drawn_is_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "'.foo' names no format" in refused(*words, "--plot", tmp_path / "x.foo").fact

    def without() -> None:
        raise InputError("a plot needs matplotlib", hint="pip install '.[plot]'")

    monkeypatch.setattr("convgen.commands.outputs.matplotlib", without)
    assert "needs matplotlib" in refused(*words, "--plot", tmp_path / "x.png").fact


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (("compile", LAYER, "-o"), ("tune", LAYER, "--into")):
        error = refused(*words, tmp_path / "file" / "below")
        assert f"{tmp_path / 'file'} is no folder" in error.fact and error.hint
    assert "cannot write" in refused("compile", LAYER, "-o", "/proc/nowhere").fact


def test_what_permissions_forbid_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it: whoever runs the tests may write everywhere."""

    def forbidden(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("convgen.files.tempfile.TemporaryFile", forbidden)
    for check in (check_file, check_folder):
        with pytest.raises(InputError, match="Permission denied"):
            check(tmp_path / "a.yaml", "-o")
    (tmp_path / "a.yaml").write_text("")
    check_file(tmp_path / "a.yaml", "-o")  # there is no need to make a file that is there
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="you may not"):
        check_file(tmp_path / "a.yaml", "-o")


def test_a_disk_that_is_full_is_said() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a system without /dev/full")
    with pytest.raises(InputError, match="No space left"):
        write_file(Path("/dev/full"), "text", "-o")


def compiled(*words: object) -> Result:
    return CliRunner().invoke(cli, ["compile", *map(str, words)])


def test_compile_keeps_files_that_are_not_its_own(tmp_path: Path) -> None:
    assert compiled(LAYER, "-o", tmp_path / "new" / "folder").exit_code == 0
    path = tmp_path / "new" / "folder" / "auto.py"
    text = path.read_text()
    assert compiled(LAYER, "-o", path.parent).exit_code == 0  # its own are made again
    assert path.read_text() == text
    path.write_text("print('a script of mine')\n")
    done = compiled(LAYER, LAYER.replace("auto", "stem"), "-o", path.parent)
    assert isinstance(done.exception, InputError) and "would be lost" in done.exception.fact
    path.unlink()
    path.mkdir()
    done = compiled(LAYER.replace("auto", "stem"), LAYER, "-o", path.parent)
    assert isinstance(done.exception, InputError) and "it is a folder" in done.exception.fact
    assert [p.name for p in path.parent.iterdir()] == ["auto.py"]  # nothing of the others was written


def test_options_that_would_be_left_out_are_refused(tmp_path: Path) -> None:
    assert "writes no file" in refused("compile", LAYER, "--emit", "module", "-o", tmp_path).fact
    assert "--json is for" in refused("compile", LAYER, "--json").fact
    assert "--json is for" in refused("compile", LAYER, "--emit", "schedule", "--json").fact


def test_a_plan_is_not_written_over_its_network(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text((ROOT / "examples/networks/alexnet.yaml").read_text())
    words = ("plan", file, "--machine", "cuda", "--ranks", 2, "-o")
    assert "is the file that is read" in refused(*words, file).fact
    assert "read as a table" in refused(*words, tmp_path / "plan.csv").fact
