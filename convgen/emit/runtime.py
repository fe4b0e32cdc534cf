"""The runtime that generated modules share, templates/runtime, as statements that name each other.

A module gets the statements that its code names, directly or through others. So a module without halos has no exchange
in it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from convgen.errors import InternalError
from convgen.resources import data_file

# The parts in the order of imports: each uses those before it.
PARTS = (
    "layout", "regions", "meetings", "transport", "mesh", "here", "conversions", "envelope", "reductions", "blocks",
    "checks", "local_check", "local", "ops", "gradients", "parameters", "mixed", "clipping", "graphs", "conv_module",
    "layer",
)  # fmt: skip

# Parts that only networks have.
NETWORK_PARTS: tuple[str, ...] = (
    "recent", "travel", "tf32", "convolved", "splits", "lanes", "copies", "pieces", "chunks", "rows", "at_hand",
    "nodes", "on_mesh", "listing", "last_steps", "norms", "norm_kernels", "group_norms", "chained", "checkpoints",
    "local_code", "biases", "surrounded", "handed_on", "buckets", "step_functions", "actions", "taken_steps", "linked",
    "inside", "region", "net", "foreseen", "kernels_ahead", "any_size", "scopes", "entered", "whole_state", "steps",
    "network",
)  # fmt: skip

OWN_PARTS = ("convolved", "nodes", "on_mesh")  # parts that only networks have whose target has its own programs

HEAD = ('"""', "import ", "from ", "if ")  # the beginning of a part, which no module gets


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name."""

    name: str  # the name that it binds
    module: str
    origin: str = ""  # the name in the module; "" where the module itself is imported

    @property
    def group(self) -> int:
        """The number of its group among imports: 0 the standard library, 1 other packages, 2 convgen."""
        return 2 if self.module.startswith("convgen") else 1 if self.module.startswith(("torch", "triton")) else 0


@dataclass(frozen=True, slots=True)
class Statement:
    """A top-level statement of the runtime, with the comments above it."""

    part: str
    names: tuple[str, ...]  # the names that it binds; none: it has an effect, and is always wanted
    uses: frozenset[str]
    text: str
    blank: bool  # whether it stands apart from the statement before


@dataclass(frozen=True, slots=True)
class Runtime:
    """The statements of all parts, one behind the other."""

    statements: tuple[Statement, ...]
    imports: dict[str, Import]  # imports of other packages, by the name that each binds
    titles: dict[str, str]  # the parts' titles
    defined: dict[str, list[Statement]]  # by name, the statements that bind it

    def needed(self, names: Iterable[str]) -> tuple[Statement, ...]:
        """The statements that code with these names needs, in their order."""
        wanted, todo = set[str](), [*names, *(u for s in self.statements if not s.names for u in s.uses)]
        while todo:
            name = todo.pop()
            if name not in wanted and name in self.defined:
                todo += [u for s in self.defined[name] for u in s.uses]
            wanted.add(name)
        return tuple(s for s in self.statements if not s.names or not wanted.isdisjoint(s.names))


@cache
def runtime() -> Runtime:
    statements: list[Statement] = []
    imports: list[Import] = []
    titles: dict[str, str] = {}
    for part in PARTS:
        lines = template(part).splitlines()
        titles[part] = next(line for line in lines if line.startswith('"""')).strip('".')
        head = "\n".join(line for line in lines if line.startswith(("import ", "from ")))
        imports += imported(ast.parse(head).body)
        statements += _statements(part, lines)
    return assembled(statements, imports, titles)


def template(part: str) -> str:
    """A part's text."""
    return data_file("templates", "runtime", f"{part}.py").read_text(encoding="utf-8")


def assembled(statements: Iterable[Statement], imports: Iterable[Import], titles: dict[str, str]) -> Runtime:
    """The runtime of parts that are put together in one file.

    Raises:
        InternalError: one name stands for two things.
    """
    table: dict[str, Import] = {}
    defined: dict[str, list[Statement]] = {}
    statements, imports = tuple(statements), tuple(imports)
    for statement in statements:
        for name in statement.names:
            defined.setdefault(name, []).append(statement)
    twice = [n for n, those in defined.items() if len({s.part for s in those}) > 1]
    twice += [i.name for i in imports if i.name in defined or table.setdefault(i.name, i) != i]
    if twice:
        raise InternalError(f"the runtime defines or imports twice: {', '.join(sorted(twice))}")
    return Runtime(statements, table, titles, defined)


def imported(body: Iterable[ast.stmt]) -> Iterator[Import]:
    """Names that absolute imports among these statements bind; those of other parts and of the future are left out."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(a.asname or a.name, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module not in (None, "__future__") and node.level == 0:
            yield from (Import(a.asname or a.name, node.module or "", a.name) for a in node.names)


def _statements(part: str, lines: list[str]) -> Iterator[Statement]:
    """A part's statements, found by lines, which is quicker than a parser: a line without indentation begins a
    statement, or its decorator does."""
    begin = [i for i, line in enumerate(lines) if line[:1] not in ("", " ", "#", ")", "]", "}")]
    begin = [i for before, i in pairwise([0, *begin]) if not lines[before].startswith("@")]
    above: list[str] = []
    for start, following in pairwise([*begin, len(lines)]):
        end = following
        while not lines[end - 1] or lines[end - 1].startswith("#"):
            end -= 1
        if not lines[start].startswith(HEAD):
            comments = next((i for i, line in enumerate(above) if line), len(above))
            text = "\n".join([*above[comments:], *lines[start:end]])
            uses, names = names_of(text)
            yield Statement(part, tuple(sorted(names)), frozenset(uses), text, comments > 0)
        above = lines[end:following]


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Names of its module that code reads, annotations too, and those that it binds other than by imports."""
    found: set[str] = set()
    outermost = symtable.symtable(text.replace("from __future__ import annotations\n", ""), "module", "exec")
    tables = [outermost]
    while tables:
        table = tables.pop()
        module = table is outermost
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (module or s.is_global())}
        tables += table.get_children()
    return found, {s.get_name() for s in outermost.get_symbols() if s.is_assigned() and not s.is_imported()}
