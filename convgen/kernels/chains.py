"""Kernels of a network's chains on a GPU: a file for each chain of elementwise rows, made from the rows' own text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from convgen.kernels.environment import environment
from convgen.operations.chains import MADE, ElementChain
from convgen.operations.fused import Fused
from convgen.program.network import Program

PLACES = {"ncp": "at", "np": "row", "nc": "s * C + c", "c": "c", "n": "s", "": "0"}  # where an element lies, by kind
THERE = {"ncp": "there", "np": "is_row", "nc": "of", "c": "of"}  # the mask of those that exist
SPREAD = {"ncp": "", "np": "[:, None]", "nc": "[None, :]", "c": "[None, :]", "n": "", "": ""}
SUMMED = {"np": "tl.sum({g}, 1)", "nc": "tl.sum({g}, 0)", "c": "tl.sum({g}, 0)", "n": "tl.sum({g})", "": "tl.sum({g})"}


class Given(NamedTuple):
    """An operand in a kernel's text.

    Attributes:
        lies: as `ChainStep.lies` has it.
        load: the text that loads its elements; `summed`: the text of one element's gradient, from the gradients {g}.
    """

    name: str
    lies: str
    load: str
    summed: str

    @property
    def is_tiled(self) -> bool:
        """Whether it has different elements in each tile of a program's pixels."""
        return "p" in self.lies


@dataclass(frozen=True)
class ChainFile:
    """A file of a chain's kernels.

    Attributes:
        name: the file's; said: the rows' names.
    """

    name: str
    chain: ElementChain
    said: str

    @property
    def text(self) -> str:
        given = [_given(k, at) for k, at in enumerate(self.chain.lies)]
        return (
            environment()
            .get_template("kernels/chain.py.jinja")
            .render(
                said=self.said,
                given=given,
                made=list(_made(self.chain)),
                back=list(_back(self.chain)),
                reads_result=self.chain.reads_result,
                by_sample=self.chain.by_sample,
                channels=-1 if self.chain.trailing else 1,
                last=f"v{len(self.chain.steps) - 1}",
            )
        )


def _given(k: int, lies: str) -> Given:
    mask = f", mask={THERE[lies]}, other=0.0" if lies in THERE else ""
    return Given(f"x{k}", lies, f"tl.load(x{k} + {PLACES[lies]}{mask}).to(WIDE){SPREAD[lies]}", SUMMED.get(lies, ""))


def _read(chain: ElementChain, n: int) -> list[str]:
    """The names of the values that a step reads."""
    return [f"v{n - 1}" if k == MADE else f"e{k}" for k in chain.steps[n].sources]


def _made(chain: ElementChain) -> Iterator[str]:
    for n, s in enumerate(chain.steps):
        yield f"v{n} = {s.step.text.format(*_read(chain, n))}"


def _back(chain: ElementChain) -> Iterator[str]:
    """Lines that make gradients: g0, g1, ... of operands, d0, d1, ... of steps' results; the last result's is given."""
    for n in reversed(range(len(chain.steps))):
        s, read = chain.steps[n], _read(chain, n)
        for source, text in zip(s.sources, s.step.backs, strict=True):
            name = f"d{n - 1}" if source == MADE else f"g{source}"
            yield f"{name} = {text.format(*read, dy=f'd{n}', y=f'v{n}')}"


def chain_files(program: Program) -> tuple[ChainFile, ...]:
    """Files for a program's chains; chains that are alike share one."""
    found: dict[str, ChainFile] = {}
    for row in program.rows:
        operation = row.bound.operation
        if isinstance(operation, Fused) and operation.chain is not None and operation.chain.key not in found:
            said = ", ".join(part.operation.name for part in operation.parts)
            found[operation.chain.key] = ChainFile(f"chain_{len(found) + 1}", operation.chain, said)
    return tuple(found.values())
