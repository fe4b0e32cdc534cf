"""Rows one behind the other as one: what lies between them never moves, and ranks compute its rim alike.

    x --conv--> a --relu--> b --conv--> y        reads of x: the rows that the first convolution reads for the rows that
                                                 the second one reads, in one window

A rank makes of each value between just the rows that its block of the last result reads: those that its neighbours
make, too, it computes itself. So one wide halo stands for several, or what is moved is the value before a norm, while
the norm's moments are on their way. The gradient is the vjp of all of it: of a parameter it is a sum over ranks, each
of which adds what its own block of the result says, so that no term is counted twice.

Source: DESIGN section 12 ("one wide halo for several consecutive operations").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.relations import Relation, Through
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.operations.row import At, Launch, Operation, Work, standing, touched

MADE = -1  # as a source: what the part before made


@dataclass(frozen=True, slots=True)
class Link:
    """One of the rows.

    Attributes:
        operation: of one result, by its first signature.
        sources: by operand the number of the whole row's operand that it is; -1: what the part before made.
    """

    operation: Operation
    sources: tuple[int, ...]

    @property
    def signature(self) -> Signature:
        return self.operation.signatures[0]


@dataclass(frozen=True)
class Fused(Operation):
    """Parts in order; each but the first reads what the one before made, once."""

    parts: tuple[Link, ...]

    @property
    def name(self) -> str:
        return "_".join(part.operation.name for part in self.parts)

    @cached_property
    def made(self) -> tuple[tuple[Made, ...], ...]:
        """By part, what each dimension of its result is made of, in terms of the last result's indices."""
        (last,) = self.parts[-1].signature.results
        found = [tuple(_plain(m, self.parts[-1].signature) for m in last.dims)]
        for part, before in zip(reversed(self.parts), reversed(self.parts[:-1]), strict=False):
            k, (result,) = part.sources.index(MADE), before.signature.results
            read = tuple(_through(m, n, part, found[-1]) for m, n in zip(_dims(part, k), result.shape, strict=True))
            found.append(read)
        return tuple(reversed(found))

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        operands: dict[int, Operand] = {}
        for part, made in zip(self.parts, self.made, strict=True):
            for k, (source, one) in enumerate(zip(part.sources, part.signature.inputs, strict=True)):
                if source != MADE:
                    dims = tuple(_through(m, n, part, made) for m, n in zip(_dims(part, k), one.shape, strict=True))
                    operands[source] = Operand(f"x{source}", one.shape, dims, one.gradient, one.integer)
        (last,) = self.parts[-1].signature.results
        result = Operand("y", last.shape, self.made[-1], last.gradient, last.integer)
        extents = [(m.indices[0], n) for m, n in zip(result.dims, result.shape, strict=True) if m.indices]
        return (Signature(tuple(extents), tuple(operands[k] for k in sorted(operands)), (result,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        made: Any = None
        for part, here in self.standing_parts(at.blocks):
            given = [made if source == MADE else operands[source] for source in part.sources]
            (made,) = part.operation.local(0, here, *given)
        return (made,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        made: Any = None
        for part in self.parts:
            given = [made if source == MADE else operands[source] for source in part.sources]
            (made,) = part.operation.reference(*given)
        return (made,)

    def work(self, way: int, at: At) -> Work:
        """Flops of all parts, each with its rim; what lies between is no element of the row."""
        return Work(sum(one.work.flops for one in self.launches(way, at)), touched(at, self.signatures[way]))

    def launches(self, way: int, at: At) -> tuple[Launch, ...]:
        return tuple(
            Launch(link.operation, link.operation.work(0, here), tuple(s for s in link.sources if s != MADE))
            for link, here in self.standing_parts(at.blocks)
        )

    def standing_parts(self, blocks: Mapping[str, Any]) -> Iterator[tuple[Link, At]]:
        """Where each part stands, for these blocks of the last result's indices; numbers, or arrays over ranks."""
        for part, made in zip(self.parts, self.made, strict=True):
            own: dict[str, Any] = {i: (0, n) for i, n in part.signature.extents}
            (result,) = part.signature.results
            for wide, one, extent in zip(made, result.dims, result.shape, strict=True):
                for i in _plain(one, part.signature).indices if wide.indices else ():
                    own[i] = _interval(wide, blocks, extent)
            yield part, standing(part.signature, own)


def _plain(made: Made, signature: Signature) -> Made:
    """A nest of which one index alone has several elements, as that index; other nests whole."""
    several = [i for i in made.indices if signature.extent[i] > 1] or list(made.indices[:1])
    return Made((several[0],), made.relation) if len(several) == 1 else WHOLE


def _dims(part: Link, k: int) -> tuple[Made, ...]:
    return tuple(_plain(m, part.signature) for m in part.signature.inputs[k].dims)


def _through(read: Made, extent: int, part: Link, made: tuple[Made, ...]) -> Made:
    """What a dimension of an operand of a part is made of, where the part's result is made like this.

    Args:
        extent: of the operand's dimension.
    """
    (result,) = part.signature.results
    for wide, own, n in zip(made, result.dims, result.shape, strict=True):
        if not read.indices or not wide.indices or _plain(own, part.signature).indices != read.indices:
            continue
        relation: Relation | None = wide.relation or read.relation
        if wide.relation is not None and read.relation is not None:
            relation = Through(wide.relation, n, read.relation)
        return Made(wide.indices, relation)
    return WHOLE


def _interval(made: Made, blocks: Mapping[str, Any], extent: int) -> Any:
    """Rows that a block of the index says."""
    block = blocks[made.indices[0]]
    return block if made.relation is None else made.relation.hull(*made.relation.window(*block), extent)
