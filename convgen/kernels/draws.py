"""The kernels of a network's random draws: philox numbers for elements by their index, and dropout by such numbers, one
launch each."""

from __future__ import annotations

from convgen.kernels.environment import environment
from convgen.operations.dropout import MULTIPLIERS, ROUNDS, WEYL

FILE = "draws"  # the file's name in a package


def draws_module() -> str:
    """The module's text; its kernels take any block of any tensor of up to five dimensions."""
    given = {"multipliers": MULTIPLIERS, "weyl": WEYL, "rounds": ROUNDS}
    return environment().get_template("kernels/draws.py.jinja").render(**given)
