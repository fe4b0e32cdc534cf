"""The house: rooms on top of each other, a floor a room, and imports that run downwards only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import convgen
from convgen.kernels.families import CPU_FAMILIES, FAMILIES

PACKAGE = Path(convgen.__file__).parent

# From the ground up. A file imports from its own room and from rooms that stand before it.
ROOMS = (
    "__init__", "errors", "knobs", "resources", "free_memory", "late", "interrupts",
    "algebra", "operations", "data", "spec", "files", "pictures", "program", "passes", "cost", "plan",
    "kernels", "sw26010", "emit", "compiler", "network_compiler", "tune", "package_cache", "packages", "exports",
    "agreement", "whole", "parallel", "one_set", "by_sizes", "serving", "losses", "causal_vaes", "streams", "explain",
    "calibrate", "verify", "papers", "bench",
    "commands", "cli", "__main__",
)  # fmt: skip
MESH_ROOMS = (
    "__init__", "machine", "gemm", "conv", "operations", "pooling", "allreduce", "storage", "table2", "target",
    "network", "training",
)  # fmt: skip
LONGEST = 600  # lines of a file
LONGER: dict[str, str] = {}  # file: since when it is longer, and what it waits for; it only ever gets shorter


def modules(folder: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Every file below a folder with its room, and all that it imports, inside of functions too."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        yield path, inside.parts[0].removesuffix(".py"), imported(path)


def imported(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


def upward(folder: Path, package: str, rooms: Sequence[str]) -> list[str]:
    """Imports that don't run downwards, as `file -> module`."""
    found: list[str] = []
    for path, room, names in modules(folder):
        for name in names:
            if name.startswith(f"{package}."):
                there = name.removeprefix(f"{package}.").split(".")[0]
                there = there if there in rooms else "__init__"
                if rooms.index(there) > rooms.index(room):
                    found.append(f"{path.relative_to(folder)} -> {name}")
    return found


@pytest.mark.parametrize(
    ("folder", "package", "rooms"),
    [(PACKAGE, "convgen", ROOMS), (PACKAGE / "sw26010", "convgen.sw26010", MESH_ROOMS)],
    ids=["convgen", "sw26010"],
)
def test_every_arrow_runs_down(folder: Path, package: str, rooms: Sequence[str]) -> None:
    there = {p.name.removesuffix(".py") for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert there == set(rooms)  # each room has its floor, and each floor is a room
    assert upward(folder, package, rooms) == []


def test_an_arrow_up_is_found(tmp_path: Path) -> None:
    for room in ("low", "high"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
    (tmp_path / "high" / "a.py").write_text("from p.low import b\n")
    assert upward(tmp_path, "p", ("__init__", "low", "high")) == []
    (tmp_path / "low" / "b.py").write_text("def late():\n    from p.high import a\n")
    assert upward(tmp_path, "p", ("__init__", "low", "high")) == ["low/b.py -> p.high.a"]


def test_only_commands_know_the_command_line() -> None:
    knowing = {room for _, room, names in modules(PACKAGE) if any(name.split(".")[0] == "click" for name in names)}
    assert knowing == {"commands"}


def test_citations_of_pages_have_their_headings() -> None:
    """Code cites a page of docs/ by a heading that it has."""
    cited: dict[str, set[str]] = {}
    for path in (*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "templates").rglob("*.py")):
        for page, heading in re.findall(r"docs/(\w+\.md), ([A-Z][\w' ]*\w)", path.read_text(encoding="utf-8")):
            cited.setdefault(page, set()).add(heading)
    assert "design.md" in cited
    for page, headings in cited.items():
        text = (PACKAGE.parent / "docs" / page).read_text(encoding="utf-8")
        there = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        assert {h for h in headings if not any(t.startswith(h) for t in there)} == set(), page


def test_files_are_short() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines())
             for path in PACKAGE.rglob("*.py")}  # fmt: skip
    assert {name for name, count in lines.items() if count > LONGEST} == set(LONGER)


def test_a_family_of_kernels_is_one_file() -> None:
    """Nobody else asks a kernel which family it is of; `aten` alone is named, where it is what needs no kernel."""
    names = {made.NAME for made in (*FAMILIES, *CPU_FAMILIES)} - {"aten"}
    said = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Constant) and side.value in names for side in (node.left, *node.comparators))
    }
    assert {name for name in said if not name.startswith(("kernels/families/", "sw26010/"))} == set()
