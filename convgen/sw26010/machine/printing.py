"""Programs are printed from templates/sw26010, and run as they are printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jinja2

from convgen.resources import data_file


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_file("templates", "sw26010")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def print_program(template: str, context: Mapping[str, object]) -> str:
    """The text of a program. Same context, same bytes.

    Args:
        template: a file of templates/sw26010, without `.py.jinja`.
        context: every name of the template, and of those it includes.
    """
    return _environment().get_template(f"{template}.py.jinja").render(context)


@cache
def load_program(text: str, name: str = "program") -> Callable[..., Any]:
    """A function of a printed program, ready to run."""
    namespace: dict[str, Any] = {}
    exec(compile(text, f"<{name} for the mesh>", "exec"), namespace)
    return namespace[name]


def steps(*, messages: bool) -> dict[str, object]:
    """The names that every program with the eight steps has."""
    level = "messages" if messages else "mesh"
    return {
        "steps": f"steps_{level}.py.jinja",
        "call": "yield from " if messages else "",
        "who": "one CPE" if messages else "the 64 CPEs at once",
    }
