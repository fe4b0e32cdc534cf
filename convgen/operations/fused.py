"""Rows one behind the other as one row: the values between them never move, and neighbouring ranks compute the same rim
of them.

    x --conv--> a --relu--> b --conv--> y        reads of x: the rows that the first convolution reads for the rows that
                                                 the second one reads, in one window

A rank makes, of each value between, just the rows that its block of the last result reads; rows that its neighbours
make, too, it computes itself. So one wide halo replaces several, or the value before a norm moves while the norm's
moments are on their way. The gradient is the vjp of all the rows. A parameter's is a sum over ranks, to which each adds
only what comes through its own block of the result, so that no term is counted twice.

Where only elementwise rows follow a convolution, its kernel can do them before it writes (an epilogue):

    x --conv--> a --add b--> --relu--> y        one launch; a is there only where a gradient is made of it

Gradients of such a row's convolution are rows of their own, which read the gradient of a, made of that of y.

Where a convolution alone reads a step's result, and the step's gradient is made from that result, the kernel of
backward-data can make it before it writes (a mask): from the gradient of b, and from b, which the filter's gradient
reads anyway.

    a --relu--> b --conv--> y        backward: da = (b > 0) * conv_backward_data(dy, w), one launch

Rows that are all elementwise are a chain, done by one kernel (operations/chains.py).

Source: docs/overlap.md, `widen-halos`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.relations import Relation, Through
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.autocast import ASKED, taken_as, types_under
from convgen.operations.chains import ELEMENT_CHAINS, MADE, ElementChain, asked_of, chain_of_parts, shape_beside
from convgen.operations.convolution import ANY_EXTENTS, EPILOGUES, MASKED, MOMENTS, Convolution, any_extents
from convgen.operations.rimmed import Rimmed
from convgen.operations.row import At, Derived, Epilogue, Launch, Operation, Work, read_here, standing, touched
from convgen.operations.spare import with_spare


@dataclass(frozen=True, slots=True)
class Link:
    """One of the rows.

    Attributes:
        operation: the row's operation, of one result, by its first signature.
        sources: for each operand, its number among the whole row's operands; -1: what the part before made.
        autocast: how autocast takes what the part before made; for other operands the whole row says it.
    """

    operation: Operation
    sources: tuple[int, ...]
    autocast: str = ""

    @property
    def signature(self) -> Signature:
        return self.operation.signatures[0]


@dataclass(frozen=True)
class Fused(Operation):
    """Parts in order; each but the first reads what the one before made, once."""

    parts: tuple[Link, ...]

    @property
    def name(self) -> str:
        """The names of its parts, casts left out."""
        return "_".join(part.operation.name for part in self.parts if not part.operation.casts_to)

    @property
    def has_between(self) -> bool:
        return True

    @cached_property
    def made(self) -> tuple[tuple[Made, ...], ...]:
        """For each part, what each dimension of its result is made of, in terms of the last result's indices."""
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

    @cached_property
    def epilogue(self) -> Epilogue | None:
        """The parts behind a convolution, where all of them are steps behind its kernel."""
        first, *others = self.parts
        if not isinstance(first.operation, Convolution) or first.operation.phase != "forward":
            return None
        steps = [part.operation.as_epilogue(part.sources.index(MADE)) for part in others]
        if not all(steps):
            return None
        return tuple(s for s, part in zip(steps, others, strict=True) if s and not part.operation.casts_to)

    @cached_property
    def mask(self) -> Epilogue | None:
        """The gradient of the first part as a step behind backward-data's kernel of the second part, a convolution;
        else None."""
        first, *others = self.parts
        if len(others) != 1 or first.sources != (0,) or others[0].sources[0] != MADE:
            return None
        operation, step = others[0].operation, first.operation.back_of_result()
        if not isinstance(operation, Convolution) or operation.phase != "forward" or len(others[0].sources) != 2:
            return None
        return None if step is None else (step,)

    @cached_property
    def chain(self) -> ElementChain | None:
        """All parts as the elementwise steps of one kernel; None where they are no chain."""
        return chain_of_parts(
            [
                (
                    part.operation.element_step(),
                    part.sources,
                    [shape_beside(o, part.signature.results[0]) for o in part.signature.inputs],
                    part.signature.results[0].shape,
                )
                for part in self.parts
            ]
        )

    @property
    def kernel_steps(self) -> tuple[Epilogue, bool, str]:
        if self.mask is not None:
            return self.mask, True, f"{self.name.removesuffix('_conv_forward')}_back"
        return self.epilogue or (), False, self.name.removeprefix("conv_forward_") if self.epilogue else ""

    def spare(self, way: int) -> tuple[tuple[int, ...], ...]:
        """The spare rows of operands that the first part alone reads."""
        first, *others = self.parts
        read = [s for part in others for s in part.sources]
        own = zip(first.sources, first.operation.spare(0), strict=False)
        rows = {source: more for source, more in own if source not in read}
        return tuple(rows.get(k, (0,) * len(o.shape)) for k, o in enumerate(self.signatures[0].inputs)) if rows else ()

    def convolutions(self, way: int, at: At) -> Iterator[tuple[Convolution, int, At]]:
        for part, here in self.standing_parts(at):
            yield from part.operation.convolutions(0, here)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        """The rows of the convolution's operands' gradients; as dy they read the gradient of the convolution's
        result."""
        if self.epilogue is None:
            return {}
        first = self.parts[0]
        names = {o.name: f"x{source}" for o, source in zip(first.signature.inputs, first.sources, strict=True)}
        names[f"d{first.signature.results[0].name}"] = "dy"
        return {
            names[made]: Derived(one.operation, tuple(names[read] for read in one.reads))
            for made, one in first.operation.gradients.items()
        }

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        if (chained := self._chained(at, operands)) is not None and not _is_differentiated(operands):
            return (chained.made(self.chain, operands),)
        kernel = self.kernel(at, operands)
        if kernel is not None:
            return (kernel(self, at, None, *operands),)
        masked = self._masked(at, operands)
        if masked is not None:
            with torch.no_grad():
                made = self.first(at, *operands)
            return (masked(made, *operands),)
        return (self.behind(at, self.first(at, *operands), *operands),)

    def first(self, at: At, *operands: Any) -> Any:
        """The first part's result."""
        part, here = next(self.standing_parts(at))
        (made,) = part.operation.local(0, here, *[operands[source] for source in part.sources])
        return made

    def behind(self, at: At, made: Any, *operands: Any) -> Any:
        """The last part's result, from the first part's result."""
        _, *others = self.standing_parts(at)
        for part, here in others:
            (made,) = taken_as(part.autocast, [made], at.low)
            given = [made if source == MADE else operands[source] for source in part.sources]
            (made,) = part.operation.local(0, here, *given)
        return made

    def kernel(self, at: At, operands: Sequence[Any], *, moments: bool = False) -> Any:
        """The kernel that computes the row in one launch, if a GPU's package has one for what this rank convolves.

        Args:
            moments: whether the kernel must also make moments of the result.
        """
        if not (EPILOGUES or ANY_EXTENTS) or self.epilogue is None or not self._is_of_one_type(at, operands):
            return None
        part, here = next(self.standing_parts(at))
        assert isinstance(part.operation, Convolution)
        x, _, *others = operands
        kinds = [kind for step in self.epilogue for kind, _ in step.operands]
        local = part.operation.convolved(0, here)
        if local is None or any(k == "element" and t.dtype != x.dtype for k, t in zip(kinds, others, strict=True)):
            return None
        dtype, rim = str(x.dtype), "x" if isinstance(x, Rimmed) else ""
        if moments:
            return MOMENTS.get((dtype, local, self.epilogue, rim))
        return EPILOGUES.get((dtype, local, self.epilogue, rim)) or any_extents(dtype, local, rim, self.epilogue)

    @property
    def may_have_moments(self) -> bool:
        return self.epilogue is not None

    def moments_kernel(self, way: int, at: At, operands: Sequence[Any]) -> Any:
        return self.kernel(at, operands, moments=True) if MOMENTS and all(t.numel() for t in operands) else None

    def kept_of(self, kernel: Any, made: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        x, w, *others = operands
        of_result = self.epilogue is not None and self.epilogue[-1].back == "result"
        return x, w, made if of_result else None, tuple([tuple(t.shape) for t in others]), kernel

    def _says(self, at: At, operands: Sequence[Any]) -> Any:
        """The kernel, if gradients need nothing but its operands, its result and the result's gradient."""
        kernel = self.kernel(at, operands)
        return None if kernel is None or kernel.keeps or isinstance(operands[0], Rimmed) else kernel

    def may_add(self, is_vjp: bool) -> bool:
        """Whether a kernel can add another gradient: where only sums follow the convolution, its gradient is the
        convolution's alone."""
        return is_vjp and self.epilogue is not None and all(step.back == "sum" for step in self.epilogue)

    def added(self, way: int, at: At, is_vjp: bool, given: Sequence[Any], before: Any) -> Any:
        *kept, dy = given
        part, here = next(self.standing_parts(at))
        return part.operation.added(0, here, True, (*kept[:2], dy), before) if is_of_kernel(kept) else None

    def summed_back(
        self, dmade: Any, made: Any, shapes: Sequence[Sequence[int]], wanted: Sequence[bool]
    ) -> tuple[Any, list[Any]]:
        """Gradients of the convolution's result and of what is added to it, from the row's result and its gradient."""
        assert self.epilogue is not None
        last = self.parts[-1].operation
        dsum = last.from_result(dmade, made) if self.epilogue[-1].back == "result" else dmade
        found: list[Any] = []
        for shape, is_wanted in zip(shapes, wanted, strict=True):
            if is_wanted and list(shape) != list(dmade.shape):  # a vector over channels
                found.append(dsum.sum([d for d in range(dsum.dim()) if d != 1]).reshape(shape))
            else:
                found.append(dsum if is_wanted else None)
        return dsum, found

    def _masked(self, at: At, operands: Sequence[Any]) -> Any:
        """The kernel of a mask: it convolves the first part's result, and makes the gradient of what the first part
        reads."""
        if not (MASKED or ANY_EXTENTS) or self.mask is None or not self._is_of_one_type(at, operands):
            return None
        _, (part, here) = self.standing_parts(at)
        assert isinstance(part.operation, Convolution)
        local, dtype = part.operation.convolved(0, here), str(operands[0].dtype)
        if local is None:
            return None
        return MASKED.get((dtype, local, self.mask)) or any_extents(dtype, local, steps=self.mask, masks=True)

    def _chained(self, at: At, operands: Sequence[Any], *, copies: bool = False) -> Any:
        """The kernels of a chain, if a package has them for these operands; with `copies` operands may lie otherwise in
        memory."""
        if not ELEMENT_CHAINS or self.chain is None or ASKED.types:
            return None
        kernel = ELEMENT_CHAINS.get(self.chain.key)
        if kernel is None or not kernel.takes(self.chain, operands, copies=copies):
            return None
        return kernel if self._is_of_one_type(at, operands) else None

    def _is_of_one_type(self, at: At, operands: Sequence[Any]) -> bool:
        """Whether the convolution's operands and the result have one type: under autocast a part may make a wider
        one."""
        types = tuple([str(t.dtype).removeprefix("torch.") for t in operands])
        if ASKED.types or types[:1] != types[1:2] != ():
            return False
        if at.low is None:
            return True
        if types not in at.known:
            at.known[types] = types_under(self, 0, types, (), str(at.low).removeprefix("torch."))[0]
        return at.known[types] == types[0]

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        """Whether all parts say their gradients; values between are taken to have operand 0's type."""
        if self._chained(at, operands) is not None:  # also under autocast, as all operands have one type
            return True
        if at.low is not None or self._masked(at, operands) is not None:
            return False
        if self.kernel(at, operands) is not None:
            return self._says(at, operands) is not None
        return all(
            part.operation.has_vjp(0, here, *[operands[max(source, 0)] for source in part.sources])
            for part, here in self.standing_parts(at)
        )

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The result and what parts keep, one behind the other, then how many things each keeps. Where a kernel made
        the row: operands, the result, and the other operands' shapes, then the kernel."""
        # Under autocast parts would each cast: a row that was a chain in the first call stays one.
        if (chained := self._chained(at, operands, copies=at.low is not None)) is not None:
            return chained.kept(self.chain, wanted, operands)
        if (kernel := self._says(at, operands)) is not None:
            made, _ = kernel.made(False, *operands)
            return (made,), self.kept_of(kernel, made, operands)
        made, found, counts = None, list[Any](), list[int]()
        for (part, here), asked in zip(self.standing_parts(at), self._asked(wanted), strict=True):
            given = [made if source == MADE else operands[source] for source in part.sources]
            (made,), kept = (
                part.operation.kept(0, here, asked, *given)
                if any(asked)
                else (part.operation.local(0, here, *given), ())
            )
            found += kept
            counts.append(len(kept))
        return (made,), (*found, tuple(counts))

    def _asked(self, wanted: Sequence[bool]) -> list[list[bool]]:
        """For each part, the operands whose gradients are asked for."""
        return asked_of([part.sources for part in self.parts], wanted)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        if is_of_kernel(kept) and self.chain is not None:
            return kept[-1].back(self.chain, wanted, kept, dys[0])
        if is_of_kernel(kept):
            return self._of_kernel(wanted, kept, dys[0])
        found, dmade, end = list[Any]([None] * len(wanted)), dys[0], len(kept) - 1
        parts = [*zip(self.standing_parts(at), self._asked(wanted), kept[-1], strict=True)]
        for (part, here), asked, count in reversed(parts):
            if not any(asked):
                break
            gradients = part.operation.vjp(0, here, asked, kept[end - count : end], dmade)
            end -= count
            for source, gradient in zip(part.sources, gradients, strict=True):
                if source == MADE:
                    dmade = gradient
                elif gradient is not None:
                    found[source] = gradient if found[source] is None else found[source] + gradient
        return tuple(found)

    def _of_kernel(self, wanted: Sequence[bool], kept: Sequence[Any], dmade: Any) -> tuple[Any, ...]:
        x, w, made, shapes, kernel = kept
        dsum, others = self.summed_back(dmade, made, shapes, wanted[2:])
        dx = kernel.plain.made("backward_data", dsum, w) if wanted[0] else None
        return dx, kernel.plain.made("backward_filter", dsum, x) if wanted[1] else None, *others

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        made: Any = None
        for part in self.parts:
            given = [made if source == MADE else operands[source] for source in part.sources]
            (made,) = part.operation.reference(*given)
        return (made,)

    def work(self, way: int, at: At) -> Work:
        """The work: flops of all parts, each with its rim; elements of values between don't count."""
        return Work(sum(one.work.flops for one in self._each(at)), touched(at, self.signatures[way]))

    def launches(self, way: int, at: At) -> tuple[Launch, ...]:
        """A launch for each part; or one for all, where a kernel or a product does them (program/biases.py)."""
        parts = self._each(at)
        if self.epilogue is None and self.chain is None:
            return parts
        first, second, *_ = parts
        elements, flops = touched(at, self.signatures[way]), sum(one.work.flops for one in parts)
        if second.operation.adds_along is not None and second.operation.adds_along == first.operation.bias_along:
            elements -= prod(read_here(at, second.operands[0]))
            flops -= second.work.flops
        return (Launch(first.operation, Work(flops, elements), tuple(k for one in parts for k in one.operands)),)

    def _each(self, at: At) -> tuple[Launch, ...]:
        return tuple(
            Launch(link.operation, link.operation.work(0, here), tuple(s for s in link.sources if s != MADE))
            for link, here in self.standing_parts(at)
        )

    def undone(self, way: int, at: At) -> tuple[Launch, ...]:
        """Part by part."""
        found: list[Launch] = []
        for link, here in self.standing_parts(at):
            for one in link.operation.undone(0, here):
                read = [link.sources[k] for k in one.operands]
                others = tuple(s for s in read if s != MADE)
                found.append(replace(one, operands=others, hands_on=one.hands_on and MADE not in read))
        return tuple(found)

    def standing_parts(self, at: At) -> Iterator[tuple[Link, At]]:
        """Each part with its place, for blocks of the last result's indices; block ends are numbers, or arrays over
        ranks."""
        for part, made in zip(self.parts, self.made, strict=True):
            own: dict[str, Any] = {i: (0, n) for i, n in part.signature.extents}
            (result,) = part.signature.results
            for wide, one, extent in zip(made, result.dims, result.shape, strict=True):
                for i in _plain(one, part.signature).indices if wide.indices else ():
                    own[i] = _interval(wide, at.blocks, extent)
            here = standing(part.signature, own)
            if at.parts:
                named = [(o.name, f"x{s}") for o, s in zip(part.signature.inputs, part.sources, strict=True)]
                here = replace(here, parts={name: at.parts[own] for name, own in named if own in at.parts})
            yield part, with_spare(here, [at.spare[s] if s != MADE else () for s in part.sources]) if at.spare else here


def _is_differentiated(operands: Sequence[Any]) -> bool:
    """Whether torch records a graph, which can't hold a kernel."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


def is_of_kernel(kept: Sequence[Any]) -> bool:
    """Whether a kernel has made the row at once; else the last thing kept is how many things each part keeps."""
    return not isinstance(kept[-1], tuple)


def _plain(made: Made, signature: Signature) -> Made:
    """A nest in which one index alone has several elements, as that index; other nests are whole."""
    several = [i for i in made.indices if signature.extent[i] > 1] or list(made.indices[:1])
    return Made((several[0],), made.relation) if len(several) == 1 else WHOLE


def _dims(part: Link, k: int) -> tuple[Made, ...]:
    return tuple(_plain(m, part.signature) for m in part.signature.inputs[k].dims)


def _through(read: Made, extent: int, part: Link, made: tuple[Made, ...]) -> Made:
    """What a dimension of a part's operand is made of, if the part's result is made of `made`.

    Args:
        extent: that of the operand's dimension.
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
    """The rows of a dimension that follow from a block of its index."""
    block = blocks[made.indices[0]]
    return block if made.relation is None else made.relation.hull(*made.relation.window(*block), extent)
