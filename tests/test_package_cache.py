"""What the cache has is what was written there, or it is made again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convgen
from convgen import package_cache
from convgen.errors import CacheWarning
from convgen.package_cache import MANIFEST, keep, kept
from convgen.packages import forget_package
from convgen.verify.virtual import World

X = torch.arange(24.0).reshape(4, 6)


class Shifted(nn.Module):
    """With a constant, so that a package has constants.pt."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.arange(6.0)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).relu()


def assert_right(package: Any) -> None:
    (y,) = World(1).run(lambda end: package.Network(package.init_mesh("cpu", transport=end))(X))
    assert torch.equal(y, Shifted()(X))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a package in the cache, which is forgotten."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    package = convgen.from_torch(Shifted(), (X,), "N=1")
    made = Path(package.__file__).parent
    forget_package(package)
    assert made.parent == tmp_path / "cache" / "networks"
    return made


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def reach(folder: Path) -> None:
    """Under another name, as one that was swapped is."""
    files = kept(folder)
    assert files is not None
    other = keep(folder.with_name("Other_" + "0" * 20), files | {"network.py": b"raise SystemExit('not mine')"})
    shutil.rmtree(folder)
    other.rename(folder)


def forged(folder: Path) -> None:
    """A manifest that is right about a file that somebody wrote, and a package without a mark of its maker."""
    edit("network.py", lambda _: b"raise SystemExit('not mine')")(folder)
    os.chown(folder / "network.py", 4321, -1)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (edit("network.py", lambda text: text[:1000]), "network.py is another than was written"),
    "empty": (edit("volume.json", lambda _: b""), "volume.json is another"),
    "edited": (edit("network.py", lambda text: text + b"\nraise SystemExit('not mine')\n"), "network.py is another"),
    "constants": (edit("constants.pt", lambda raw: raw[:-1] + b"x"), "constants.pt is another"),
    "missing": (lambda folder: (folder / "schedule.txt").unlink(), "schedule.txt is missing"),
    "more": (lambda folder: (folder / "json.py").write_text("raise SystemExit"), "json.py is in it, which convgen did"),
    "a folder in it": (lambda folder: (folder / "torch").mkdir(), "torch is in it, which is no file"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), f"it has no {MANIFEST}"),
    "manifest": (edit(MANIFEST, lambda text: text[:40]), f"{MANIFEST} is damaged"),
    "format": (edit(MANIFEST, lambda text: text.replace(b'"format": 1', b'"format": 2')), "of another format"),
    "another's name": (reach, f"its {MANIFEST} is not that of Shifted_"),
    "a link": (
        lambda folder: ((folder / "network.py").rename(folder / "n"), (folder / "network.py").symlink_to("n")),
        "it can't be read",
    ),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "it is no folder"),
    "a link to a folder": (
        lambda folder: (folder.rename(folder.with_name("x")), folder.symlink_to("x")),
        "it is no folder",
    ),
    "nothing in it": (lambda folder: (shutil.rmtree(folder), folder.mkdir(mode=0o700)), f"it has no {MANIFEST}"),
    "others may write it": (lambda folder: folder.chmod(0o777), r"others may write it \(mode 777\)"),
    "others may write a file": (lambda folder: (folder / "network.py").chmod(0o666), "others may write network.py"),
}
if os.geteuid() == 0:  # who else may give files away
    DAMAGE["another's"] = (lambda folder: os.chown(folder, 4321, -1), "it belongs to user 4321")
    DAMAGE["another's file"] = (forged, "network.py belongs to user 4321")


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_heals(folder: Path, how: str) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    damage, said = DAMAGE[how]
    damage(folder)
    with pytest.warns(CacheWarning, match=said):
        package = convgen.from_torch(Shifted(), (X,), "N=1")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert kept(folder) is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert_right(package)
    forget_package(package)
    forget_package(convgen.from_torch(Shifted(), (X,), "N=1"))  # without a word


def test_what_was_hashed_is_what_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that change, or come, after they were looked at, are not what is run; nor are compiled ones beside them."""

    def then_changed(path: Path) -> dict[str, bytes] | None:
        found = kept(path)
        for file in [*path.glob("*.py"), path / "torch.py", path / "json.py"]:
            file.write_text("raise SystemExit('not mine')")
        (path / "volume.json").write_text("{}")
        (path / "constants.pt").unlink()
        return found

    monkeypatch.setattr("convgen.parallel.kept", then_changed)
    package = convgen.from_torch(Shifted(), (X,), "N=1")
    assert_right(package)
    assert package.VOLUME["forward"] == []
    with pytest.raises(ModuleNotFoundError):
        __import__(f"{package.__name__}.json")
    assert not (folder / "__pycache__").exists()
    forget_package(package)


def test_a_folder_that_cant_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder would, which stops root too; what is there stays."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    with pytest.warns(CacheWarning) as heard:
        package = convgen.from_torch(Shifted(), (X,), "N=1")
    assert any("cannot keep" in str(w.message) and "CONVGEN_CACHE=DIR" in str(w.message) for w in heard)
    assert_right(package)
    own = Path(package.__file__).parents[1]
    assert own.name.startswith("convgen-packages-") and stat.S_IMODE(own.stat().st_mode) == 0o700
    assert (tmp_path / "cache").read_text() == ""
    forget_package(package)


def test_a_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    code = """
import os, sys, warnings
from pathlib import Path
from convgen.package_cache import keep, kept
warnings.simplefilter("ignore")
wanted = Path("/proc/nowhere/networks/Name_0")
where = keep(wanted, {"a": b"b"})
if os.fork() == 0:
    sys.exit()  # a process that was forked leaves it
os.wait()
assert where != wanted and kept(where) == {"a": b"b"}
print(where)
"""
    where = Path(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    assert where.name == "Name_0" and not where.parent.exists()


def test_many_at_once(tmp_path: Path) -> None:
    """All write the same, and damage it meanwhile; whoever reads has all of it or nothing."""
    folder, files = tmp_path / "networks" / "Name_0", {"a": b"1" * 1000, "b": b""}
    wrong: list[object] = []

    def work(k: int) -> None:
        for turn in range(20):
            try:
                found = package_cache._read(folder)
            except package_cache._UnsoundError:
                found = None
            if found not in (None, files) or keep(folder, files) != folder:
                wrong.append((k, turn, found))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not wrong and kept(folder) == files and [p.name for p in folder.parent.iterdir()] == ["Name_0"]


def test_the_manifest(folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_text())
    assert (said["format"], said["name"]) == (1, folder.name)
    assert {*said["files"]} == {p.name for p in folder.iterdir()} - {MANIFEST}
