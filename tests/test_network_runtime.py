"""The runtime of networks: the compiler's own rows, relations and signatures, in a process that has no convgen."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from brute import run
from network_cases import ALL_CASES as CASES
from operation_cases import a_grid, free_roles, stored

import convgen
from convgen.emit import package
from convgen.emit.package import KEPT, TAKEN, network, package_parts
from convgen.emit.paste import network_runtime, shared_runtime
from convgen.emit.runtime import Import, Statement, assembled, names_of
from convgen.errors import InternalError
from convgen.operations.row import Operation

PACKAGE = Path(convgen.__file__).parent


def operations() -> list[str]:
    """Names of all classes of rows."""
    found = set[str]()
    for part in package_parts():
        for name, value in vars(import_module(f"convgen.{part.replace('/', '.')}")).items():
            if inspect.isclass(value) and issubclass(value, Operation):
                found.add(name)
    return sorted(found)


def test_every_part_imports_those_before_it() -> None:
    for i, part in enumerate(package_parts()):
        if part not in {*TAKEN, "algebra/conv"}:
            tree = ast.parse((PACKAGE / f"{part}.py").read_text(encoding="utf-8"))
            modules = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
            used = {m.removeprefix("convgen.").replace(".", "/") for m in modules if m.startswith("convgen.")}
            assert used <= set(package_parts()[:i]), part


def test_names_that_are_left_behind_or_taken_are_there() -> None:
    names = {n for s in network().statements for n in s.names}
    assert {n for taken in TAKEN.values() for n in taken} <= names
    conv = next(s.text for s in network().statements if s.names == ("Conv",))
    assert all(f"def {n}(" in conv for n in KEPT["Conv"])
    assert conv.count("def ") == len(KEPT["Conv"])


def test_a_name_that_is_two_things_is_refused() -> None:
    one, other = (Statement(part, ("f",), frozenset(), "f = 1", False) for part in "ab")
    with pytest.raises(InternalError, match="twice: f"):
        assembled([one, other], [], {})
    with pytest.raises(InternalError, match="twice: f"):
        assembled([one], [Import("f", "math", "floor")], {})
    with pytest.raises(InternalError, match="twice: f"):
        assembled([], [Import("f", "math", "floor"), Import("f", "math", "fsum")], {})
    tree = ast.parse("from convgen.operations.row import own as mine")
    with pytest.raises(InternalError, match="another name, mine"):
        list(package.outside(tree.body))


def test_it_has_what_layers_have_and_what_is_asked_for() -> None:
    few, all_rows = network_runtime(["Softmax"]), network_runtime(operations())
    own = names_of(few.text)[1]
    assert names_of(shared_runtime().text)[1] <= own
    assert {"Softmax", "Operation", "Signature", "Relation"} <= own
    assert not {"Table", "Attention", "Conv", "Work"} & own
    assert own < names_of(all_rows.text)[1]
    assert few.name != all_rows.name
    assert network_runtime(["Softmax", "no such name"]) == few


def test_the_text_has_nothing_of_the_compilers_alone() -> None:
    text = network_runtime(operations()).text
    nodes = list(ast.walk(ast.parse(text)))
    taken = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    taken |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {m.split(".")[0] for m in taken} - sys.stdlib_module_names == {"torch"}
    assert not {n.name for n in nodes if isinstance(n, ast.FunctionDef)} & {"reference", "work"}
    assert "TYPE_CHECKING" not in text


# In a process of its own: each row by its text, its signatures, and its local code at one place.
PROGRAM = """
import sys
sys.modules["convgen"] = None
sys.path.insert(0, sys.argv[1])
import runtime_of_rows as made
import torch
made.np = made.Late("no_such_module")
names = vars(made)
for text, signatures, way, at, given, expected in torch.load(sys.argv[2], weights_only=True):
    row = eval(text, names)
    assert repr(row) == text
    assert [str(s) for s in row.signatures] == [s for s, _ in signatures], text
    assert [repr(s) for s in row.signatures] == [s for _, s in signatures], text
    assert {d.operation.__module__ for d in row.gradients.values()} <= {"runtime_of_rows"}
    if at:
        reads = row.signatures[way].inputs  # with gradients, as where the expected ones were made
        given = [t.requires_grad_(o.gradient) for t, o in zip(given, reads, strict=True)]
        found = tuple(t.detach() for t in row.local(way, eval(at, names), *given))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
print("done")
"""


def case(row: Operation, given: list[torch.Tensor], draw: Random) -> tuple[Any, ...]:
    """A row, and what its local code makes on one rank of several, unless it has nothing to do there."""
    signatures = [(str(s), repr(s)) for s in row.signatures]
    way, grid = draw.randrange(len(signatures)), a_grid(draw)
    done = run(row, way, free_roles(draw, row.signatures[way], grid), [stored(draw, grid, t) for t in given])
    for stand, leaves, outs in zip(done.stands, done.leaves, done.outs, strict=True):
        if all(t.numel() for t in (*leaves, *outs)):
            made = tuple(o.detach() for o in outs)
            return repr(row), signatures, way, repr(stand.at), [t.detach() for t in leaves], made
    return repr(row), signatures, way, "", [], ()


def test_rows_are_the_same_where_convgen_is_not(tmp_path: Path) -> None:
    names, cases, seen = operations(), list[tuple[Any, ...]](), set[str]()
    for kind, seed in itertools.product(CASES, range(4)):
        draw = Random(f"network runtime {kind} {seed}")
        row, given = CASES[kind](draw)
        if type(row).__name__ in names:
            cases.append(case(row, given, draw))
            rows = [row, *(d.operation for d in row.gradients.values())]
            cases += [(repr(r), [(str(s), repr(s)) for s in r.signatures], 0, "", [], ()) for r in rows[1:]]
            seen |= {type(r).__name__ for r in rows}
    assert seen == set(names) - {"Operation", "LinearMap", "Drawn", "ByCourse"}
    assert sum(bool(at) for *_, at, _, _ in cases) > 50
    torch.save(cases, tmp_path / "cases.pt")
    (tmp_path / "runtime_of_rows.py").write_text(network_runtime(names).text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path), str(tmp_path / "cases.pt")],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
