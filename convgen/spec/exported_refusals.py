"""Errors about a module that torch.export can't trace: what it does there, where, and what would work instead."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from convgen.errors import InputError, Note
from convgen.spec.places import Place, place_in, place_of
from convgen.spec.text import one_line

GRAPH = "partial_fx_graph"  # the attribute of an error that torch prints, up to thousands of lines
TALKERS = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")
DATA = "depends on the values of a tensor"

# By a pattern in the line: what depends on data there, and what would work. The first match counts.
_BRANCH = "torch.where(condition, a, b), which computes both"
_READ = "a tensor in its place: x * y.mean() for x * y.mean().item()"
_STEPS = "a fixed number of steps, each with torch.where(condition, new, old)"
_CASES: tuple[tuple[str, str, str], ...] = (
    (r"^while\b|^for\b|\brange\(", "how often a loop runs", _STEPS),
    (r"^(if|elif|assert)\b|\bif\b.+\belse\b", "which branch is taken", _BRANCH),
    (r"\bprint\(|f\"|f'|\.format\(|\blog", "what is written", "without it, or with .shape in the place of values"),
    (r"\[[^\]]*:[^\]]*\]", "where a slice begins or ends", "a mask of fixed size: x * (torch.arange(n) < k)"),
    (r"\.(item|tolist)\(|\b(int|float|bool|len|sum|any|all|max|min)\(", "a number", _READ),
)  # fmt: skip
_SIZE = "results of a size known in advance: torch.where(mask, x, 0), torch.topk, or a mask that is multiplied by"
_ELSE = "no control flow that depends on data; torch.export's documentation has ways around it"


def untraced(name: str, error: Exception, root: Any) -> InputError:
    """The error where torch.export raised one.

    Args:
        name: the network's.
        root: the nn.Module that was traced.
    """
    place = place_of(error, root=root)
    said = first_line(error).partition(" (unhinted")[0]
    code = place.code if place is not None else ""
    fact, hint, notes = f"torch.export can't trace {name}: {said}", _ELSE, tuple[Note, ...]()
    if "numpy" in said or "numpy(" in code or re.search(r"\bnp\.", code):
        fact, hint = f"torch.export can't trace {name}: a tensor becomes an array of numpy's", "torch's own functions"
    elif any(one in said for one in ("data-dependent", "unbacked", "FakeTensor.__format__")):
        what, hint = _depends(code, of_number="specialized integer" in said)
        fact = f"torch.export can't trace {name}: {what} {DATA}"
    if said not in fact:
        notes = (Note("torch", one_line(said, 160)),)
    return InputError(fact, notes=(*(place.notes if place is not None else ()), *notes), hint=hint)


def unfixed(name: str, why: str, place: Place | None) -> InputError:
    """The error where a size or an argument of the traced program is known at run time only."""
    hint = "sizes known in advance"
    if DATA in why:
        hint = _depends(place.code)[1] if place is not None and "size" not in why else _SIZE
    return InputError(f"{name} can't be imported: {why}", notes=place.notes if place is not None else (), hint=hint)


def failed(name: str, error: Exception, root: Any) -> InputError:
    """The error where the module itself fails on the example inputs."""
    place = place_of(error, root=root)
    fact = f"{name} fails on these inputs: {first_line(error)}"
    return InputError(fact, notes=place.notes if place is not None else (), hint="inputs that the module takes")


def lost(name: str, error: Exception, root: Any, hint: str) -> InputError:
    """The error where torch.export would record nothing of what a line does."""
    place = place_of(error, root=root)
    return InputError(f"{name}: {error}", notes=place.notes if place is not None else (), hint=hint)


def place_of_node(node: Any, module: str, kind: str) -> Place | None:
    """The line of source that made a node of an exported program."""
    return place_in(str(node.meta.get("stack_trace") or ""), module, kind)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return one_line(lines[0] if lines else type(error).__name__, 200)


def _depends(code: str, *, of_number: bool = False) -> tuple[str, str]:
    """What depends on data in a line of source, and what would work instead.

    Args:
        of_number: whether torch wanted an integer there, as no branch does.
    """
    cases = [(what, hint) for pattern, what, hint in _CASES if re.search(pattern, code)]
    return next((one for one in cases if not (of_number and one[1] == _BRANCH)), ("what it does", _ELSE))


@contextmanager
def without_graphs() -> Generator[None]:
    """torch prints nothing beside the error that it raises; the module's own output is still printed."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [one.level for one in loggers]
    graph, heard = "", io.StringIO()
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL + 1)
        with redirect_stderr(heard):
            yield
    except BaseException as error:
        graph = str(getattr(error, GRAPH, ""))
        raise
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
        sys.stderr.write(heard.getvalue().replace(f"{graph}\n", "") if graph else heard.getvalue())
