"""The templates' environment."""

from __future__ import annotations

from functools import cache

import jinja2

from convgen.resources import data_file


@cache
def environment() -> jinja2.Environment:
    """Templates are read from the package; a name that a template misses is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_file("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
