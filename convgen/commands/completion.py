"""Completion in a shell: names of machines, files, algorithms, and the axes of a grid.

`eval "$(_CONVGEN_COMPLETE=bash_source convgen)"` turns it on in bash; zsh_source and fish_source are there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem

Completed = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, which the shell lists itself."""
    return [CompletionItem(incomplete, type="file")]


def machines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names in tuning/machines that begin like the text; files, if none does."""
    from convgen.cost.machines import machine_names

    return _beginning(machine_names(), incomplete) or files(ctx, param, incomplete)


def algorithms(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The named algorithms, and auto."""
    from convgen.algebra.algorithms import ALGORITHMS

    return _beginning((*ALGORITHMS, "auto"), incomplete)


def grids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The axes that the algorithms have, behind those that stand there already: `N=2,` gives `N=2,H=`."""
    from convgen.algebra.algorithms import ALGORITHMS

    before, _, last = incomplete.rpartition(",")
    given = {part.partition("=")[0] for part in before.split(",")}
    letters = dict.fromkeys("".join(one.letters for one in ALGORITHMS.values()) + "G")
    head = f"{before}," if before else ""
    return _beginning([f"{head}{letter}=" for letter in letters if letter not in given], head + last)


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from convgen.spec.target import KINDS

    return _beginning(KINDS, incomplete)


def _beginning(names: Sequence[str], start: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(start)]
