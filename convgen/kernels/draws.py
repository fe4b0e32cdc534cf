"""The kernels of what a network draws: philox for elements by their numbers, and dropout by it, in a launch each."""

from __future__ import annotations

from convgen.kernels.environment import environment
from convgen.operations.dropout import MULTIPLIERS, ROUNDS, WEYL

FILE = "draws"  # a network's module of them


def draws_module() -> str:
    """The module, of any block of any tensor of up to five dimensions."""
    given = {"multipliers": MULTIPLIERS, "weyl": WEYL, "rounds": ROUNDS}
    return environment().get_template("kernels/draws.py.jinja").render(**given)
