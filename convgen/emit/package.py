"""The compiler's own files as parts of the runtime: what an operation is, its relations, signatures and local code.

A network's ranks run the same statements that the compiler plans by, so these are written once. A package lacks what
only the compiler calls: methods that check and price, arrays over all ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import convgen
from convgen.emit.runtime import NETWORK_PARTS, Import, Runtime, Statement, assembled, imported, names_of, template
from convgen.emit.runtime import runtime as of_layers
from convgen.errors import InternalError

# Files of operations/ that no package has: the rows of single layers, and the binding of operations to values.
OF_LAYERS = ("bias", "bound", "layer")
_IMPORTS = re.compile(r"^from convgen\.operations\.(\w+) import", re.MULTILINE)


def _operations() -> tuple[str, ...]:
    """The files of operations/, each behind those that it imports."""
    files = sorted((Path(convgen.__file__).parent / "operations").glob("*.py"))
    texts = {f.stem: f.read_text(encoding="utf-8") for f in files if f.stem not in ("__init__", *OF_LAYERS)}
    return tuple(TopologicalSorter({name: _IMPORTS.findall(text) for name, text in texts.items()}).static_order())


@cache
def package_parts() -> tuple[str, ...]:
    """The files that a package takes, in the order of imports: each uses those before it."""
    algebra = (f"algebra/{name}" for name in ("blocks", "relations", "layout", "signature", "conv"))
    return "late", *algebra, *(f"operations/{name}" for name in _operations())


# By a file that is mostly the compiler's, the names that a rank needs of it.
TAKEN: Mapping[str, tuple[str, ...]] = {
    "late": ("Late", "np"),  # a package imports torch itself
    "algebra/blocks": ("plain",),
    "algebra/layout": ("Axes",),
}
# By a class that is mostly the compiler's, the methods that a rank needs beside the fields.
KEPT: Mapping[str, tuple[str, ...]] = {"Conv": ("direct", "direct_phase", "letters")}
# Methods of operations that only tests, prices and reports call.
COMPILERS = (
    "reference", "work", "launches", "undone", "passes", "rides", "is_product", "joins", "normalises", "convolves",
    "convolutions", "fits", "takes_steps", "kernel_steps", "hands_gradient_on", "runs_whole", "as_convolution",
)  # fmt: skip
TORCH = Import("torch", "torch")
# Statements that replace the compiler's, which also take arrays.
BLOCKS = "algebra/blocks"
STANDS = (
    Statement(BLOCKS, ("Number",), frozenset(), "Number = int  # of rows: a rank has no arrays of them", True),
    Statement(
        BLOCKS,
        ("block",),
        frozenset(["ith_part", "AxisSize"]),
        "def block(lo: int, hi: int, parts: AxisSize, index: int) -> tuple[int, int]:\n"
        "    return ith_part(lo, hi, parts, index)",
        True,
    ),
)


@cache
def network() -> Runtime:
    """The runtime of networks: package files, then the parts that layers have, then those of networks alone."""
    layers = of_layers()
    package = Path(convgen.__file__).parent
    texts = {p: (package / f"{p}.py").read_text(encoding="utf-8") for p in package_parts()}
    texts |= {p: template(p) for p in NETWORK_PARTS}
    trees = {part: ast.parse(text) for part, text in texts.items()}
    found = {part: statements_of(part, trees[part], text.splitlines()) for part, text in texts.items()}
    imports = [i for tree in trees.values() for i in outside(tree.body)]
    titles = {part: title(ast.get_docstring(tree) or part) for part, tree in trees.items()}
    statements = [*(s for p in package_parts() for s in _taken(p, found[p])), *layers.statements]
    statements += [s for p in NETWORK_PARTS for s in found[p]]
    return assembled(statements, [*layers.imports.values(), *imports], layers.titles | titles)


def _taken(part: str, statements: Iterable[Statement]) -> Iterator[Statement]:
    """The statements that a rank may need."""
    names = TAKEN.get(part)
    yield from (s for s in statements if names is None or not set(names).isdisjoint(s.names))
    if part == BLOCKS:
        yield from STANDS


def title(docstring: str) -> str:
    """A docstring's beginning, up to its first colon or the end of its first sentence."""
    return re.split(r"[.:;](?:\s|$)", docstring, maxsplit=1)[0].replace("\n", " ")


def outside(body: Iterable[ast.stmt]) -> Iterator[Import]:
    """The imports of other packages. Names of convgen's live in the same file under the same names; so does a late
    np."""
    for i in imported(body):
        if i.module.split(".")[0] not in ("convgen", "numpy") or i.module.startswith("convgen.sw26010."):
            yield i
        elif i.module.startswith("convgen") and i.name != i.origin:
            raise InternalError(f"{i.module}.{i.origin} has another name, {i.name}, where it is imported")
        elif i.module == "convgen.late" and i.name == TORCH.name:
            yield TORCH


def statements_of(part: str, tree: ast.Module, lines: list[str]) -> Iterator[Statement]:
    """A file's top-level statements with the comments above them, without imports, docstrings and what only type
    checkers read."""
    end = 0
    for node in tree.body:
        start, above, end = _first(node), lines[end : _first(node)], node.end_lineno or 0
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If) or _is_text(node):
            continue
        blank = next((k for k, line in enumerate(above) if line), len(above))
        own = lines[start:end]
        own = _stripped(node, own, start) if part in package_parts() else own
        text = "\n".join([*above[blank:], *own])
        uses, names = names_of(text)
        yield Statement(part, tuple(sorted(names)), frozenset(uses), text, blank > 0)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first(node: ast.stmt) -> int:
    """The line, from 0, where a statement or its first decorator begins."""
    decorators: Collection[ast.expr] = getattr(node, "decorator_list", ())
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1


def _stripped(node: ast.stmt, lines: list[str], start: int) -> list[str]:
    """The lines of a class without the methods that only the compiler calls."""
    kept = dict(enumerate(lines, start))
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef | ast.AnnAssign) and not _is_wanted(node, method):
            end = method.end_lineno or 0
            while end in kept and not kept[end]:
                end += 1
            for k in range(_first(method), end):
                del kept[k]
    return "\n".join(kept.values()).rstrip().splitlines()


def _is_wanted(owner: ast.stmt, method: ast.FunctionDef | ast.AnnAssign) -> bool:
    if isinstance(method, ast.AnnAssign):
        return not isinstance(method.target, ast.Name) or method.target.id not in COMPILERS
    names = KEPT.get(owner.name) if isinstance(owner, ast.ClassDef) else None
    return method.name not in COMPILERS if names is None else method.name in names
