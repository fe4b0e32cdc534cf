"""Shipped files: found in a checkout, found in a wheel, and carried by both kinds of package."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from convgen.errors import InternalError
from convgen.resources import data_file

ROOT = Path(__file__).resolve().parent.parent


def shipped() -> set[str]:
    """The files below templates/ and tuning/ in this checkout."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in ("templates", "tuning")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_checkout() -> None:
    assert data_file("templates", "module.py.jinja") == ROOT / "templates" / "module.py.jinja"
    assert data_file("tuning", "layers").is_dir()


def test_wheel_goes_first(tmp_path: Path) -> None:
    """Another package's templates/ beside ours in site-packages is not ours."""
    package = tmp_path / "convgen"
    for folder in (package / "_data" / "templates", tmp_path / "templates"):
        folder.mkdir(parents=True)
    assert data_file("templates", package=package) == package / "_data" / "templates"


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"templates/no\.jinja is missing .*_data"):
        data_file("templates", "no.jinja", package=tmp_path / "convgen")


def build(kind: str, source: Path, out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)], cwd=source, check=True)
    (built,) = out.iterdir()
    return built


def test_packages(tmp_path: Path) -> None:
    """The wheel carries every shipped file, works unpacked anywhere, and is the same when built from the sdist."""
    wheel = build("wheel", ROOT, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {name.removeprefix("convgen/_data/") for name in names if "/_data/" in name} == shipped()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"convgen"}

    program = "from convgen.resources import data_file; print(data_file('templates', 'module.py.jinja'))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {program}"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(found) == tmp_path / "site" / "convgen" / "_data" / "templates" / "module.py.jinja"

    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (tmp_path / "source").iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp_path / "again")) as archive:
        assert set(archive.namelist()) == names
