"""The verifier of what slots hold: each step of the list that ranks run (program/steps.py) reads what it is of.

Rows say what a step of a kind and a key reads and makes. So a slot holds a value as it is stored, one that some
conversions have moved, addends of a gradient, or a piece; whoever reads another slot, or one too early, is found.

| in a slot | is |
|---|---|
| value, gradient | a value, or the sum of some addends of its gradient, as it is stored |
| the same, moved | as these conversions have moved it: conversions that are equal make equal contents |
| any other | what a row makes, and hands to its own steps alone |
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

from convgen.program import flow
from convgen.program.lower_forward import of_training
from convgen.program.network import Moved, Program, asked, label
from convgen.program.norms import evaluated
from convgen.program.rows import Chain, PlacedRow, reads_of, sides
from convgen.program.shared import beginnings
from convgen.program.steps import NOTHING, Lowered, Step, state_slot

FEWER = ("add", "start_bucket")  # kinds that may read slots of training alone, and leave these out in evaluation

Addend = tuple[int | str, int]  # a row, and the operand whose gradient it makes; an output by its number; a chunk


class Content(NamedTuple):
    """What a slot holds.

    Attributes:
        of: what tells it from others of its kind: a value's name, or a row's number and more.
        addends: of a sum of gradients, those that it has.
        moved: the conversions behind it.
    """

    what: str
    of: tuple[int | str | None, ...]
    addends: frozenset[Addend] = frozenset()
    moved: tuple[Hashable, ...] = ()


Contents = list[Content | None]  # None: nothing is in `_`


def _is(what: str, *of: int | str | None) -> Content:
    return Content(what, of)


def content_faults(program: Program, lowered: Lowered, *, of_inputs: bool) -> Iterator[str]:
    """Steps that read a slot of something else, in training and in evaluation."""
    for training in (True, False):
        yield from _Slots(program, lowered, of_inputs, training).faults()


class _Slots:
    def __init__(self, program: Program, lowered: Lowered, of_inputs: bool, training: bool) -> None:
        self.program, self.lowered, self.training = program, lowered, training
        self.rows = {label(row): (i, None) for i, row in enumerate(program.rows)}
        self.derived = {
            f"{name}.d{program.rows[i].signature.inputs[k].name}": (i, k)
            for name, (i, _) in self.rows.items()
            for k, _ in program.rows[i].derived
        }
        self.moved: dict[tuple[str, str], Moved] = {}
        self.buckets: dict[str, flow.Start] = {}
        for step in (*flow.forward(program), *flow.backward(program, of_inputs=of_inputs)):
            for m in (step,) if isinstance(step, Moved) else step.moved if isinstance(step, flow.Start) else ():
                self.moved[m.chain[0].split()[-1], m.step] = m
            if isinstance(step, flow.Start) and step.bucket is not None:
                self.buckets[step.name] = step
        every = ((i, evaluated(program, i)) for i in range(len(program.rows)))
        self.alternatives = {i: one for i, one in every if one is not None}
        self.running = {name: ends for i, one in self.alternatives.items() for name, ends in self._of_running(i, one)}
        self.asked = [asked(row.bound, program.differentiable(of_inputs=of_inputs)) for row in program.rows]
        of_values: dict[str, list[Addend]] = {}
        for value, addend in self._addends(program.differentiable(of_inputs=of_inputs)):
            of_values.setdefault(value, []).append(addend)
        gone = set[int]() if training else of_training(program) | self.alternatives.keys()
        self.addends = {v: frozenset(a for a in those if a[0] not in gone) for v, those in of_values.items()}

    def _addends(self, wanted: Collection[str]) -> Iterator[tuple[str, Addend]]:
        """Values, each with what is added to its gradient."""
        for i, row in enumerate(self.program.rows):
            made = {k for k, back in enumerate(row.back) if back is not None} | {k for k, _ in row.derived}
            yield from ((row.bound.reads[k], (i, k)) for k in made if self.asked[i][k])
        yield from ((v, ("output", n)) for n, (_, v) in enumerate(self.program.outputs) if v in wanted)

    def faults(self) -> Iterator[str]:
        program = self.program
        there: dict[str, Content | None] = {NOTHING: None}
        for n, v in program.values.items():
            if v.kind != "made":
                there[n if v.kind == "input" else state_slot(n)] = _is("value", n)
        for n, ((_, v), (_, _, slot)) in enumerate(zip(program.outputs, self.lowered.outputs, strict=True)):
            there[slot] = Content("gradient", (v,), frozenset({("output", n)}))
        forward, backward = self.lowered.forward, self.lowered.backward
        for is_backward, step in (*((False, s) for s in forward), *((True, s) for s in backward)):
            if step.when is not None and step.when[1] != self.training:
                continue
            found = [there.get(slot) for slot in step.reads]
            if step.kind == "add":
                here = [there.get(slot) for slot in step.reads if slot in there or self.training]
                if (made := self._sum(step.key, here)) is None:
                    yield f"{step.head}: it adds {' and '.join(map(_words, here))}"
                there |= dict.fromkeys(step.makes, made)
                continue
            reads, makes = self.of(step, is_backward=is_backward)
            if (len(reads), len(makes)) != (len(step.reads), len(step.makes)):
                yield f"{step.head}: it reads {len(reads)} slots and makes {len(makes)}"
                continue
            for slot, one, wanted in zip(step.reads, found, reads, strict=True):
                left_out = slot not in there and not self.training and step.kind in FEWER
                if one != wanted and not left_out:
                    yield f"{step.head}: {slot} holds {_words(one)}, not {_words(wanted)}"
            there |= {slot: one for slot, one in zip(step.makes, makes, strict=True) if slot != NOTHING}
        for (name, v), (_, slot, _) in zip(program.outputs, self.lowered.outputs, strict=True):
            if there.get(slot) != _is("value", v):
                yield f"output {name}: {slot} holds {_words(there.get(slot))}, not {v}"

    # ---------------------------------------------------------------- what rows have in slots
    def _gradient(self, value: str) -> Content | None:
        those = self.addends.get(value)
        return Content("gradient", (value,), those) if those else None

    def _operand(self, i: int, d: int | None, k: int, n: int | None = None) -> Content | None:
        """Operand k of row i, or of its gradient's row, after n conversions, or after all."""
        row, one = self.program.rows[i], self._placed(i, d)
        if d is None:
            subject: Content | None = _is("value", row.bound.reads[k])
        else:
            kind, j = reads_of(row.bound.operation, one.bound.reads)[k]
            if kind == "operand":
                subject = _is("value", row.bound.reads[j])
            elif kind == "result":
                subject = _is("value", row.bound.makes[j]) if row.bound.makes[j] else None
            elif row.between(self.asked[i]):
                subject = _is("between", i)
            else:
                subject = self._gradient(row.bound.makes[j])
        return _after(subject, one, k, one.fetch[k], n)

    def _dy(self, i: int, j: int, n: int | None = None) -> Content | None:
        """The gradient of result j of row i after n conversions, or after all."""
        row = self.program.rows[i]
        if not row.signature.results[j].gradient:
            return None
        return _after(self._gradient(row.bound.makes[j]), row, len(row.fetch) + j, row.given[j], n)

    def _result(self, i: int, d: int | None, j: int, n: int = 0) -> Content:
        """Result j of row i, or of its gradient's row, after n conversions."""
        row, one = self.program.rows[i], self._placed(i, d)
        if n < len(one.store[j]) or (d is None and not row.bound.makes[j]):
            return _is("made", i, d, j, n)
        return _is("value", row.bound.makes[j]) if d is None else self._addend(i, d)

    def _found(self, i: int, k: int, n: int = 0) -> Content:
        """The gradient of operand k that the vjp of row i makes, after n conversions."""
        return _is("found", i, k, n) if n < len(self.program.rows[i].back[k] or ()) else self._addend(i, k)

    def _addend(self, i: int, k: int) -> Content:
        return Content("gradient", (self.program.rows[i].bound.reads[k],), frozenset({(i, k)}))

    def _sum(self, key: str, found: Sequence[Content | None]) -> Content | None:
        """A sum of addends of one gradient, or of one in chunks, each once; None where it is none."""
        addends = [one for one in found if one is not None and one.addends]
        every = frozenset(a for one in addends for a in one.addends)
        whose = {one._replace(addends=every) for one in addends}
        if len(addends) != len(found) or len(whose) != 1 or sum(len(one.addends) for one in addends) != len(every):
            return None
        made = whose.pop()
        match made.what, made.of:
            case "gradient", (v,):
                return made if key == f"{v}.grad" else None
            case "chunks", (int(i), int(k)) if (chunks := self.program.rows[i].chunks) is not None:
                return self._found(i, k) if len(every) == chunks.count else made
            case _:
                return None

    # ---------------------------------------------------------------- what steps read and make
    def of(self, step: Step, *, is_backward: bool) -> tuple[Contents, Contents]:
        """What a step that is no sum reads and makes; nothing where its key is of no step of this kind."""
        name, _, number = step.key.partition(":")
        i, d = self.rows.get(name) or self.derived.get(name) or (None, None)
        kind, j = step.kind, int(number) if number.isdecimal() else 0
        match kind:
            case "forward" if i is None:
                return self._running(name)
            case "same" if i is not None and d is None and is_backward and not step.again:
                return [self._dy(i, 0)], [self._found(i, 0)]
            case "same" | "fill" if i is None or self._placed(i, d).bound.operation.in_evaluation == "itself":
                return [], []
            case "forward" | "interior" | "boundary" | "chunk" | "join" | "same" | "fill" if i is not None:
                return self._of_row(step, i, d, j)
            case "vjp" | "vjp_interior" | "vjp_boundary" | "vjp_chunk" if i is not None:
                return self._of_vjp(kind, i, j)
            case "vjp_join":
                return self._joined_gradient(name)
            case "fetch" | "store" | "given" | "back":
                return self._conversion(kind, name)
            case "start" | "wait" | "start_back" | "wait_back":
                return self._halo(kind, name)
            case "send_fetch" | "send_store" | "send_given" | "send_back":
                return [self._piece(kind.removeprefix("send_"), name, j)[0]], [_is("sent", step.key)]
            case "wait_chunk":
                there = [s for s in ("fetch", "store", "given", "back") if self._has_chunks(s, name)]
                return [_is("sent", step.key)], [self._piece(side, name, j)[1] for side in there]
            case "start_bucket" | "wait_bucket":
                moved = self.buckets[name].moved if name in self.buckets else ()
                ends = [self._ends(m) for m in moved]
                handle: Contents = [_is("sent", name)]
                return ([a for a, _ in ends], handle) if kind == "start_bucket" else (handle, [b for _, b in ends])
            case "update":
                new = dict(self.program.updates).get(name)
                return [_is("value", new), _is("value", name)], []
            case "gradient":
                return [self._gradient(name)], []
            case _:
                return [], []

    def _placed(self, i: int, d: int | None) -> PlacedRow:
        row = self.program.rows[i]
        return row if d is None else dict(row.derived)[d]

    def _of_row(self, step: Step, i: int, d: int | None, j: int) -> tuple[Contents, Contents]:
        """A row, or a gradient's row, or a piece of it."""
        one, kind = self._placed(i, d), step.kind
        operation, chunks = one.bound.operation, one.chunks
        count = len(one.signature.inputs)
        reads: Contents = [self._operand(i, d, k, 0 if k == one.early else None) for k in range(count)]
        makes: Contents = [self._result(i, d, r) for r in range(len(one.signature.results))]
        kept: Contents = [_is("kept", i, {"interior": "inner", "chunk": j}.get(kind))]
        draws = d is None and operation.in_evaluation == "fill" and step.kind in ("forward", "same", "fill")
        match kind:
            case "interior":
                makes = [_is("inner", i, d)]
            case "boundary":
                reads = [_is("strips", i, d), _is("inner", i, d) if one.split else None, *reads]
            case "same" | "fill":
                return ([_is("drawn", i)] if draws else reads[:1]), makes[:1]
            case "join" if chunks is not None:
                by_chunks = chunks.result and one.store[0]
                pieces = range(1, chunks.count + 1)
                made = self._result(i, d, 0, len(one.store[0]) if chunks.result else 0)
                return [_is("stored" if by_chunks else "piece", i, d, n) for n in pieces], [made]
            case "chunk" if chunks is not None:
                comes = chunks.operand is not None and bool(one.fetch[chunks.operand])
                if chunks.operand is not None and comes:
                    reads[chunks.operand] = _is("come", i, d, j)
                reads = [_is("rows", i, d, j - 1) if comes and j > 1 else None, *reads]
                makes = [_is("piece", i, d, j), _is("rows", i, d, j)]
            case _ if draws:
                makes = [_is("drawn", i)]
            case _:
                pass
        return reads, [*makes, *kept[: len(step.makes) - len(makes)]]

    def _of_vjp(self, kind: str, i: int, j: int) -> tuple[Contents, Contents]:
        """Local code's gradients of a row, or a piece of them."""
        row = self.program.rows[i]
        early, chunks, inputs = row.early, row.chunks, row.signature.inputs
        operands = [k for k, back in enumerate(row.back) if back is not None and self.asked[i][k]]
        between: Contents = [_is("between", i)] if row.between(self.asked[i]) else []
        dys: Contents = [self._dy(i, r) for r in range(len(row.signature.results))]
        makes: Contents = [self._found(i, k) if k in operands else None for k in range(len(inputs))]
        if kind == "vjp_chunk" and chunks is not None:
            k = chunks.operand
            carries = k in operands and j < chunks.count
            come: Content | None = _is("come", i, "gradient", j) if chunks.result and row.given[0] else dys[0]
            for q in operands:
                is_cut = q == k or chunks.index in inputs[q].indices
                makes[q] = _is("chunk", i, q, j) if is_cut else Content("chunks", (i, q), frozenset({("chunk", j)}))
            carried: Content = _is("carried", i, j)
            return [_is("kept", i, j), _is("carried", i, j + 1) if carries else None, come], [carried, *makes]
        if early is not None and kind != "vjp":
            makes[early] = _is("dinner" if kind == "vjp_interior" else "dstrips", i)
        if kind == "vjp_interior":
            parts: Contents = [_is("part", i, k) if k in operands and k != early else None for k in range(len(inputs))]
            return [_is("kept", i, "inner"), *parts, *([_is("part", i)] * len(between)), *dys], [*makes, *between]
        if kind == "vjp_boundary" and row.split:
            makes = [_is("part", i, k) if k != early else makes[k] for k in range(len(inputs))]
            between = [_is("part", i)] * len(between)
        return [_is("kept", i, None), *dys], [*makes, *between]

    def _joined_gradient(self, name: str) -> tuple[Contents, Contents]:
        """A gradient put together of those of chunks, the last chunk first."""
        of, _, number = name.rpartition("/")
        i, _ = self.rows.get(of, (0, None))
        row, k = self.program.rows[i], int(number) if number.isdecimal() else 0
        if row.chunks is None:
            return [], []
        is_moved = k == row.chunks.operand
        word = "back" if is_moved and row.back[k] else "chunk"
        made = self._addend(i, k) if is_moved else self._found(i, k)
        return [_is(word, i, k, n) for n in range(row.chunks.count, 0, -1)], [made]

    def _running(self, name: str) -> tuple[Contents, Contents]:
        """The row that takes the place of moments in evaluation."""
        i, _ = self.rows.get(name.removesuffix("_running"), (-1, None))
        if (one := self.alternatives.get(i)) is None:
            return [], []
        reads: Contents = [_after(_is("value", v), one, k, one.fetch[k]) for k, v in enumerate(one.bound.reads)]
        return reads, [_is("running", i, 0) if one.store[0] else _is("value", one.bound.makes[0])]

    def _of_running(self, i: int, one: PlacedRow) -> Iterator[tuple[tuple[str, str], tuple[Content, Content]]]:
        """Conversions of the row that takes the place of row i in evaluation: what each reads and makes."""
        base = f"{label(self.program.rows[i])}_running"
        for k, (operand, steps) in enumerate(zip(one.signature.inputs, one.fetch, strict=True)):
            there = [_after(_is("value", one.bound.reads[k]), one, k, steps, n) for n in range(len(steps) + 1)]
            yield from ((("fetch", name), ends) for name, ends in _named(f"{base}.{operand.name}", there))
        made = [_is("running", i, n) for n in range(len(one.store[0]))]
        yield from ((("store", name), ends) for name, ends in _named(base, [*made, _is("value", one.bound.makes[0])]))

    def _conversion(self, side: str, name: str) -> tuple[Contents, Contents]:
        if (m := self.moved.get((side, name))) is not None:
            before, after = self._ends(m)
            return [before], [after]
        before, after = self.running.get((side, name), (None, None))
        return ([before], [after]) if after is not None else ([], [])

    def _where(self, m: Moved) -> tuple[int, int | None, str, int, int]:
        """The row of a conversion, of a gradient's row its operand, the chain by field and number, and its place."""
        *of, side = m.chain[0].split()
        k = m.chain[1]
        return m.row, int(of[1]) if of else None, side, k, getattr(m.placed, side)[k].index(m.conversion)

    def _ends(self, m: Moved) -> tuple[Content | None, Content | None]:
        """What a conversion reads and makes."""
        i, d, side, k, n = self._where(m)
        match side:
            case "fetch":
                return self._operand(i, d, k, n), self._operand(i, d, k, n + 1)
            case "store":
                return self._result(i, d, k, n), self._result(i, d, k, n + 1)
            case "given":
                return self._dy(i, k, n), self._dy(i, k, n + 1)
            case _:
                return self._found(i, k, n), self._found(i, k, n + 1)

    def _halo(self, kind: str, name: str) -> tuple[Contents, Contents]:
        side, handle = "back" if kind.endswith("back") else "fetch", _is("sent", name)
        if (m := self.moved.get((side, name))) is None:
            return [], []
        i, d, _, k, _ = self._where(m)
        match kind:
            case "start":
                return [self._operand(i, d, k, 0)], [handle]
            case "wait":
                return [handle, self._operand(i, d, k, 0)], [_is("strips", i, d)]
            case "start_back":
                return [_is("dstrips", i)], [handle]
            case _:
                inner = _is("dinner", i) if self.program.rows[i].split else None
                return [handle, inner, self._gradient(self.program.rows[i].bound.makes[0])], [self._addend(i, k)]

    def _has_chunks(self, side: str, name: str) -> bool:
        return (side, name) in self.moved and self.moved[side, name].placed.chunks is not None

    def _piece(self, side: str, name: str, j: int) -> tuple[Content | None, Content | None]:
        """What is sent for a chunk, and what comes."""
        if not self._has_chunks(side, name):
            return _is("no chunk", name), _is("no chunk", name)
        i, d, _, k, _ = self._where(self.moved[side, name])
        match side:
            case "fetch":
                return self._operand(i, d, k, 0), _is("come", i, d, j)
            case "store":
                return _is("piece", i, d, j), _is("stored", i, d, j)
            case "given":
                return self._dy(i, k, 0), _is("come", i, "gradient", j)
            case _:
                return _is("chunk", i, k, j), _is("back", i, k, j)


def _named(base: str, there: Sequence[Content]) -> Iterator[tuple[str, tuple[Content, Content]]]:
    """The names of a chain's conversions, with what is there before and after each."""
    for n, ends in enumerate(pairwise(there)):
        yield f"{base}.{n + 1}" if len(there) > 2 else base, ends


@overload
def _after(subject: Content, row: PlacedRow, number: int, steps: Chain, n: int | None = None) -> Content: ...
@overload
def _after(
    subject: Content | None, row: PlacedRow, number: int, steps: Chain, n: int | None = None
) -> Content | None: ...
def _after(subject: Content | None, row: PlacedRow, number: int, steps: Chain, n: int | None = None) -> Content | None:
    """What some conversions have made of a value: the first n, or all.

    Args:
        number: of an operand, or behind operands of a result.
    """
    steps = steps[:n]
    dims = sides(row.signature)[number][1]
    return (subject or _is("nothing"))._replace(moved=(beginnings(dims, steps)[-1],)) if steps else subject


def _words(one: Content | None) -> str:
    if one is None:
        return "nothing"
    of = " ".join(str(word) for word in one.of if word is not None)
    what = f"{len(one.addends)} addends of the gradient of {of}" if one.addends else f"{one.what} {of}"
    return f"{what}, moved" if one.moved else what
