"""Whether an exported program computes what its module does at small sizes, where torch's guards fail.

Most guards that fail only at small sizes are of memory and of broadcasting: nearly every program has `Ne(H, 1)`, and
what was traced is right for one row, too. So program and module are both run there, and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from convgen.spec.exported_open import LARGE, Small, Symbols
from convgen.spec.extents import Condition

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from convgen.spec.exported_examples import Examples

SOME = (*range(1, 33), 48, 64, 96, 128, 192, LARGE)  # sizes at which guards of several letters are tried
NEAR = 1e-3  # how far results may differ, relative to the largest number of a result


def least_sizes(
    program: ExportedProgram, module: torch.nn.Module, examples: Examples, found: Symbols
) -> list[Condition]:
    """`H >= 2` for each letter below which the program is not known to compute what the module does.

    Args:
        module: the module, in the mode in which the program was traced.
        found: the program's symbols, with their conditions.
    """
    letters = [letter for letter in ("N", *found.sizes) if letter in found.letters.values()]
    bound = _holds_from(found.small, letters)
    if bound == 1:
        return []
    runs = _Runs(program, module, examples, found)
    own = {"N": 2, **found.sizes}

    def works(least: Mapping[str, int]) -> bool:
        at = _fitting({**own, **least}, tuple(least), found.conditions)
        return at is None or runs.alike(at)

    def first(a: str) -> int:
        """The least size that works, if the size just below the bound works too; else the bound."""
        return next((k for k in range(1, bound) if works({a: k})), bound) if works({a: bound - 1}) else bound

    least = {a: first(a) for a in letters}
    rows = {a: k for a, k in least.items() if a != "N"}
    while not works(rows) and min(rows.values()) < bound:  # all at once
        rows = {a: min(k + 1, bound) for a, k in rows.items()}
    return [Condition(a, ">=", k) for a, k in (least | rows).items() if k > 1]


def _holds_from(small: Sequence[Small], letters: Sequence[str]) -> int:
    """The least size of all letters from which on every guard holds; with guards of several letters an upper bound."""
    bound = 1
    for one in small:
        own = [letter for letter in letters if letter in one.letters]
        sizes = range(1, LARGE + 1) if len(own) == 1 else SOME
        fails = [min(at) for at in product(sizes, repeat=len(own)) if not one.holds(dict(zip(own, at, strict=True)))]
        bound = max(bound, next((k for k in sizes if k > max(fails)), LARGE)) if fails else bound
    return bound


def _fitting(sizes: Mapping[str, int], moved: Sequence[str], conditions: Sequence[Condition]) -> dict[str, int] | None:
    """These sizes, or the next that fulfil the conditions if some letters grow alike; None where none is near."""
    for more in range(65):
        at = {**sizes, **{letter: sizes[letter] + more for letter in moved}}
        if all(c.holds(at) for c in conditions):
            return at
    return None


class _Runs:
    """Runs of a program and its module at chosen sizes."""

    def __init__(self, program: ExportedProgram, module: torch.nn.Module, examples: Examples, found: Symbols) -> None:
        self.program, self.module, self.examples, self.follows = program, module, examples, found.follows

    def alike(self, sizes: Mapping[str, int]) -> bool:
        """Whether both compute the same; False where one of them doesn't run, or draws random numbers."""
        import torch

        given = self._given(sizes)
        examples = self.examples.with_values(given)
        args, keywords = examples.arguments
        try:
            with torch.no_grad(), cast("Any", torch).random.fork_rng():
                wanted, again = (self._module(args, keywords, seed) for seed in (0, 1))
                made = self._run(given)
        except Exception:  # whatever either of them raises
            return False
        if len(wanted) != len(made):
            return False
        return all(map(torch.equal, wanted, again)) and all(map(_near, made, wanted))

    def _module(self, args: Sequence[Any], keywords: Mapping[str, Any], seed: int) -> list[torch.Tensor]:
        import torch

        cast("Any", torch).manual_seed(seed)
        pytree: Any = import_module("torch.utils._pytree")
        leaves: list[Any] = pytree.tree_leaves(copy.deepcopy(self.module)(*args, **keywords))
        return [t for t in leaves if isinstance(t, torch.Tensor)]

    def _given(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        import torch

        draw = torch.Generator().manual_seed(0)
        found: dict[str, torch.Tensor] = {}
        for name, value in self.examples.tensors.items():
            shape = list(value.shape)
            for letter, d in self.examples.letters.get(name, {}).items():
                shape[d] = sizes[letter] if letter in sizes else int(self.follows[name][d](sizes))
            if value.is_floating_point():
                found[name] = torch.randn(shape, generator=draw).to(value.dtype)
            else:
                found[name] = torch.zeros(shape, dtype=value.dtype)
        return found

    def _run(self, given: Mapping[str, torch.Tensor]) -> list[Any]:
        """The program's results, without new values of buffers."""
        import torch

        program: Any = self.program
        left = iter(self.examples.values)
        values: list[Any] = []
        for spec in program.graph_signature.input_specs:
            if spec.kind.name == "USER_INPUT":
                name = next(left)
                values.append(given.get(name, self.examples.values[name]))
            elif spec.target in program.constants:
                values.append(program.constants[spec.target])
            else:
                values.append(program.state_dict[spec.target])
        fx: Any = torch.fx
        made = fx.Interpreter(program.graph_module).run(*values)
        specs = program.graph_signature.output_specs
        users = [one for one, spec in zip(made, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]
        return [one for one in users if isinstance(one, torch.Tensor)]


def _near(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    import torch

    if made.shape != wanted.shape:
        return False
    a, b = made.double(), wanted.double()
    most = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=NEAR * (most or 1.0), equal_nan=True)
