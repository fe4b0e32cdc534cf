"""From placed rows to the list of steps that ranks run: single assignment, every gradient and every sum of gradients a
step.

What backward reads of forward is what its slots say: nothing is kept beside. Order and names are those of flow.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from convgen.operations.dropout import Bernoulli, Dropout
from convgen.operations.moments import Moments, RunningStatistics
from convgen.operations.part_norm import PartMoments, PartStatistics, PartUpdate
from convgen.program import flow
from convgen.program.network import Moved, Program, asked, label
from convgen.program.norms import counting, evaluated
from convgen.program.rows import Chain, PlacedRow, reads_of
from convgen.program.steps import NOTHING, Kind, Lowered, Step, state_slot

When = tuple[str, bool] | None
OF_ALL_MODES = ("add", "same", "fill", "update", "gradient", "start_bucket", "wait_bucket")
SENDS: dict[str, Kind] = {"fetch": "send_fetch", "store": "send_store", "given": "send_given", "back": "send_back"}


def lower(program: Program, *, of_inputs: bool = True, modes: Sequence[str] = ("train", "eval")) -> Lowered:
    """The list of steps.

    Args:
        of_inputs: whether inputs want gradients, too.
        modes: of the network: where there is training, what drops does so in training alone.
    """
    return _Lowering(program, of_inputs, "train" in modes).lowered()


def alternatives(program: Program, i: int, modes: Sequence[str]) -> PlacedRow | None:
    """The row that stands in evaluation for a row of moments, if it is one and has running ones."""
    is_one = "train" in modes and isinstance(program.rows[i].bound.operation, Moments | PartMoments)
    return evaluated(program, i) if is_one else None


class _Lowering:
    def __init__(self, program: Program, of_inputs: bool, trains: bool) -> None:
        self.program, self.of_inputs, self.trains = program, of_inputs, trains
        self.wanted = program.differentiable(of_inputs=of_inputs)
        self.steps: list[Step] = []
        self.names: Counter[str] = Counter()
        self.slots = {
            n: n if v.kind == "input" else state_slot(n) for n, v in program.values.items() if v.kind != "made"
        }  # of each value, where it stands now
        self.names.update(self.slots.values())
        self.grads: dict[str, str] = {}
        self.now: dict[tuple[object, ...], str] = {}  # of a row, where what it fetches, makes and gives back stands
        self.sent: dict[str, list[str]] = {}  # of a bucket, steps whose sums it brings
        self.again = {i for s in program.again for i in range(s.start, s.stop)}
        self.alternatives: dict[int, PlacedRow | None] = {}
        self.updates = {value: buffer for buffer, value in program.updates}
        counts = {*counting(program).values()}
        read = {v for row in program.rows for v in row.bound.reads} | {v for _, v in program.outputs}
        self.of_training = {
            i
            for i, row in enumerate(program.rows)
            if isinstance(row.bound.operation, PartStatistics)
            or (
                (i in counts or isinstance(row.bound.operation, PartUpdate | RunningStatistics))
                and read.isdisjoint(row.bound.makes)
            )
        }
        self.is_again = False

    def lowered(self) -> Lowered:
        for step in flow.forward(self.program):
            self._forward(step)
        outputs = [(name, self.slots[value], self._slot(f"{value}.given")) for name, value in self.program.outputs]
        half = len(self.steps)
        for (_, value), (_, _, gradient) in zip(self.program.outputs, outputs, strict=True):
            if value in self.wanted:
                self._into(value, gradient, len(self.program.rows) - 1)
        for step in flow.backward(self.program, of_inputs=self.of_inputs):
            self._backward(step)
        forward, backward = self.steps[:half], self.steps[half:]
        kinds = ("parameter", "input") if self.of_inputs else ("parameter",)
        for name, value in self.program.values.items():
            if value.kind in kinds and name in self.grads:
                backward = _behind(backward, Step("gradient", name, (), (self.grads[name],), 0))
        return Lowered(tuple(forward), tuple(backward), tuple(outputs))

    # ---------------------------------------------------------------- slots
    def _slot(self, base: str) -> str:
        """A slot of its own."""
        self.names[base] += 1
        return base if self.names[base] == 1 else f"{base}'{self.names[base]}"

    def _add(
        self, kind: Kind, key: str, makes: Sequence[str], reads: Sequence[str], row: int, step: flow.Flow | None = None,
        when: When = None,
    ) -> None:  # fmt: skip
        if when is None and kind not in OF_ALL_MODES:
            when = self._when(row)
        self.steps.append(Step(kind, key, tuple(makes), tuple(reads), row, when, step, self.is_again))

    def _into(self, value: str, gradient: str, row: int) -> None:
        """A value's gradient gets an addend."""
        if value in self.grads:
            made = self._slot(f"{value}.grad")
            self._add("add", f"{value}.grad", [made], [self.grads[value], gradient], row)
            gradient = made
        self.grads[value] = gradient

    def _number(self, local: flow.Local) -> int | None:
        """Of a gradient's row, the operand whose gradient it is."""
        row = self.program.rows[local.row]
        return None if local.placed is row else next(k for k, one in row.derived if one is local.placed)

    def _key(self, i: int, d: int | None = None) -> str:
        row = self.program.rows[i]
        return label(row) if d is None else f"{label(row)}.d{row.signature.inputs[d].name}"

    def _placed(self, i: int, d: int | None) -> PlacedRow:
        row = self.program.rows[i]
        return row if d is None else dict(row.derived)[d]

    def _operand(self, i: int, k: int, d: int | None) -> str:
        """Where an operand stands, as far as it has been fetched."""
        if (i, d, "fetch", k) in self.now:
            return self.now[i, d, "fetch", k]
        row = self.program.rows[i]
        if d is None:
            return self.slots[row.bound.reads[k]]
        kind, j = reads_of(row.bound.operation, self._placed(i, d).bound.reads)[k]
        if kind == "operand":
            return self.slots[row.bound.reads[j]]
        if kind == "result":
            return self.slots.get(row.bound.makes[j], NOTHING)
        if (between := self.now.get((i, "between"))) is not None:
            return between
        return self._dy(i, j)

    def _dy(self, i: int, j: int) -> str:
        return self.grads.get(self.program.rows[i].bound.makes[j], NOTHING)

    def _made(self, i: int, d: int | None, j: int, slot: str, *, is_last: bool) -> None:
        """What a row has made of a result, or of a gradient."""
        self.now[i, d, "made", j] = slot
        row = self.program.rows[i]
        if d is None:
            if row.bound.makes[j]:
                self.slots[row.bound.makes[j]] = slot
        elif is_last:
            self._into(row.bound.reads[d], slot, i)

    # ---------------------------------------------------------------- forward, and gradients' rows
    def _forward(self, step: flow.Flow) -> None:
        match step:
            case Moved():
                self._move(step)
            case flow.Start():
                self._start(step)
            case flow.Wait():
                self._wait(step)
            case flow.Local():
                self._local(step)

    def _where(self, moved: Moved) -> tuple[int, int | None, str, int, int, int]:
        """Of a conversion the row, the operand whose gradient's row it is of, which chain of which operand or result,
        its number there, and how many there are."""
        side, k = moved.chain
        words = side.split()
        d = int(words[1]) if words[0] == "derived" else None
        chain = getattr(moved.placed, words[-1])[k]
        return moved.row, d, words[-1], k, chain.index(moved.conversion), len(chain)

    def _when(self, i: int) -> When:
        """Rows of statistics are of training; in evaluation a batch norm has running ones."""
        of_training = i in self.of_training or self._alternative(i) is not None
        return (self.program.rows[i].bound.module, True) if of_training else None

    def _move(self, moved: Moved) -> None:
        i, d, which, k, n, count = self._where(moved)
        if which == "fetch":
            if n == 0:
                self.now.pop((i, d, "fetch", k), None)
            made = self._slot(moved.step)
            self._add("fetch", moved.step, [made], [self._operand(i, k, d)], i, moved)
            self.now[i, d, "fetch", k] = made
        elif which == "store":
            made = self._slot(self._result(i, d, k) if n == count - 1 else moved.step)
            self._add("store", moved.step, [made], [self.now[i, d, "made", k]], i, moved)
            self._made(i, d, k, made, is_last=n == count - 1)
            if n == count - 1 and d is None:
                if (alternative := self._alternative(i)) is not None:
                    self._evaluated(i, alternative, made)
                self._renew(i, k)
        elif which == "given":
            source = self.now[i, "dy", k] if n else self._dy(i, k)
            made = self.now[i, "dy", k] = self._slot(moved.step)
            self._add("given", moved.step, [made], [source], i, moved)
        else:
            made = self._slot(moved.step)
            self._add("back", moved.step, [made], [self.now[i, "dx", k]], i, moved)
            self.now[i, "dx", k] = made
            if n == count - 1:
                self._into(moved.value, made, i)

    def _result(self, i: int, d: int | None, j: int) -> str:
        """What a result is called."""
        return self.program.rows[i].bound.makes[j] or f"{self._key(i)}_{j}" if d is None else self._key(i, d)

    def _wants(self, i: int) -> list[bool]:
        row = self.program.rows[i]
        found = asked(row.bound, self.wanted)
        return [a and b is not None for a, b in zip(found, row.back, strict=True)]

    def _keeps(self, i: int, d: int | None) -> bool:
        """Whether local code keeps something for its gradient."""
        if d is not None or (i in self.again and not self.is_again):
            return False
        return any(self._wants(i)) or bool(self.program.rows[i].between(asked(self.program.rows[i].bound, self.wanted)))

    def _alternative(self, i: int) -> PlacedRow | None:
        """The row that stands in evaluation for moments that have running ones."""
        if i not in self.alternatives:
            self.alternatives[i] = alternatives(self.program, i, ("train",) if self.trains else ())
        return self.alternatives[i]

    def _local(self, local: flow.Local) -> None:
        i, d = local.row, self._number(local)
        placed, key = local.placed, self._key(i, d)
        operands = [self._operand(i, k, d) for k in range(len(placed.signature.inputs))]
        kept = [self._slot(f"{key}.kept")] if self._keeps(i, d) else []
        if local.part == "chunk":
            self._chunk(local, i, d, operands, kept)
            return
        if placed.early is not None:
            self._piece(local, i, d, operands, kept)
            return
        alternative = self._alternative(i)
        draws = d is None and self.trains and isinstance(placed.bound.operation, Bernoulli)
        made: list[str] = []
        for j, _ in enumerate(placed.signature.results):
            base = self._result(i, d, j)
            unread = d is None and not placed.bound.makes[j] and not placed.store[j]
            name = f"{base}.drawn" if draws else f"{base}.made" if placed.store[j] else base
            made.append(NOTHING if unread else self._slot(name))
        self._add("forward", key, [*made, *kept], operands, i, local)
        if kept:
            self.now[i, "kept"] = kept[0]
        for j, slot in enumerate(made):
            if slot != NOTHING:
                self._made(i, d, j, slot, is_last=not placed.store[j])
        if self.trains and isinstance(placed.bound.operation, Dropout):
            self.steps[-1] = replace(self.steps[-1], when=("", True))
            self._add("same", key, made[:1], operands[:1], i, None, ("", False))
        if draws:
            drawn, base = made[0], self._result(i, d, 0)
            made[0] = self._slot(f"{base}.made" if placed.store[0] else base)
            self._add("same", key, made, [drawn], i, None, ("", True))
            self._add("fill", key, made, [drawn], i, None, ("", False))
            self._made(i, d, 0, made[0], is_last=not placed.store[0])
        if d is None:
            if alternative is not None and not placed.store[0]:
                self._evaluated(i, alternative, made[0])
            for j in range(len(made)):
                if not placed.store[j]:
                    self._renew(i, j)

    def _evaluated(self, i: int, alternative: PlacedRow, slot: str) -> None:
        """The row that stands in evaluation for moments, and what moves for it."""
        key, when = f"{self._key(i)}_running", (alternative.bound.module, False)

        def moved(kind: Kind, chain: Chain, step: str, source: str, last: str) -> str:
            for n, _ in enumerate(chain):
                name = f"{step}.{n + 1}" if len(chain) > 1 else step
                made = last if last and n == len(chain) - 1 else self._slot(name)
                self._add(kind, name, [made], [source], i, None, when)
                source = made
            return source

        pairs = zip(alternative.bound.reads, alternative.fetch, alternative.signature.inputs, strict=True)
        reads = [moved("fetch", chain, f"{key}.{one.name}", self.slots[v], "") for v, chain, one in pairs]
        made = self._slot(f"{key}.made") if alternative.store[0] else slot
        self._add("forward", key, [made], reads, i, None, when)
        moved("store", alternative.store[0], key, made, slot)

    def _renew(self, i: int, j: int) -> None:
        value = self.program.rows[i].bound.makes[j]
        if value in self.updates and not self.is_again:
            buffer = self.updates[value]
            module = buffer.rpartition(".")[0]
            self._add("update", buffer, [], [self.slots[value], state_slot(buffer)], i, None, (module, True))

    # ---------------------------------------------------------------- pieces
    def _start(self, start: flow.Start) -> None:
        (moved,) = start.moved
        i, d, which, k, _, _ = self._where(moved)
        if start.lane == flow.CHUNKS:
            self._start_chunk(start, moved, i, d, which, k)
            return
        handle = self._slot(f"{moved.step}.sent")
        self._add("start", moved.step, [handle], [self._operand(i, k, d)], i, start)
        self.now["halo", moved.step] = handle
        self.now["of", moved.step] = str(i)
        self.now["place", moved.step] = str(k if d is None else d)
        self.now["side", moved.step] = "" if d is None else "derived"

    def _wait(self, wait: flow.Wait) -> None:
        handle = self.now.pop(("halo", wait.name), None)
        if handle is None:
            self._wait_chunk(wait)
            return
        i = int(self.now["of", wait.name])
        d = int(self.now["place", wait.name]) if self.now["side", wait.name] else None
        k = self._placed(i, d).early
        assert k is not None
        strips = self.now[i, d, "strips"] = self._slot(f"{wait.name}.strips")
        self._add("wait", wait.name, [strips], [handle, self._operand(i, k, d)], i, wait)

    def _piece(self, local: flow.Local, i: int, d: int | None, operands: list[str], kept: list[str]) -> None:
        key, placed = self._key(i, d), local.placed
        if local.part == "interior":
            inner = self.now[i, d, "inner"] = self._slot(f"{key}.inner")
            self._add("interior", key, [inner, *kept], operands, i, local)
            if kept:
                self.now[i, "kept inner"] = kept[0]
            return
        strips, inner = self.now.pop((i, d, "strips")), self.now.pop((i, d, "inner"), NOTHING)
        base = self._result(i, d, 0)
        made = self._slot(f"{base}.made" if placed.store[0] else base)
        self._add("boundary", key, [made, *kept], [strips, inner, *operands], i, local)
        if kept:
            self.now[i, "kept"] = kept[0]
        self._made(i, d, 0, made, is_last=not placed.store[0])
        if d is None and not placed.store[0]:
            self._renew(i, 0)

    # ---------------------------------------------------------------- chunks
    def _start_chunk(self, start: flow.Start, moved: Moved, i: int, d: int | None, which: str, k: int) -> None:
        handle = self._slot(f"{start.name}.sent")
        match which:
            case "fetch":
                reads = [self._operand(i, k, d)]
            case "store":
                reads = [self.now[i, d, "piece", start.chunk]]
            case "given":
                reads = [self._dy(i, k)]
            case _:
                reads = [self.now[i, "dpiece", start.chunk]]
        self._add(SENDS[which], start.name, [handle], reads, i, start)
        self.now["chunk", start.name] = handle
        self.now["of", start.name] = f"{i} {'' if d is None else d}"
        self.now["place", start.name] = f"{which} {k} {start.chunk}"

    def _wait_chunk(self, wait: flow.Wait) -> None:
        handle = self.now.pop(("chunk", wait.name))
        of, _, number = self.now["of", wait.name].partition(" ")
        i, d = int(of), int(number) if number else None
        which, k, j = self.now["place", wait.name].split()
        made = self._slot(f"{wait.name}.there")
        self._add("wait_chunk", wait.name, [made], [handle], i, wait)
        row, count = self._placed(i, d), self._placed(i, d).chunks
        assert count is not None
        match which:
            case "fetch":
                self.now[i, d, "come", int(j)] = made
            case "store":
                self.now[i, d, "piece", int(j)] = made
                if all((i, d, "waited", n) in self.now for n in range(1, count.count + 1) if n != int(j)):
                    self._join(i, d)
                self.now[i, d, "waited", int(j)] = made
            case "given":
                self.now[i, "dcome", int(j)] = made
            case _:
                self.now[i, "dpiece", int(j)] = made
                if int(j) == 1:
                    self._collect(i, int(k), row)

    def _chunk(self, local: flow.Local, i: int, d: int | None, operands: list[str], kept: list[str]) -> None:
        """A chunk of a row. What has come for it stands in its operand's place; some may be with the chunk before."""
        chunks, key, j = local.placed.chunks, self._key(i, d), local.chunk
        assert chunks is not None
        if chunks.operand is not None and (i, d, "come", j) in self.now:
            come = self.now[i, d, "come", j]
            before = self.now.get((i, d, "rows", j - 1), NOTHING)
            operands[chunks.operand] = come
        else:
            come, before = NOTHING, NOTHING
        piece, rows = self._slot(f"{key}:{j}"), self._slot(f"{key}:{j}.rows") if come != NOTHING else NOTHING
        self._add("chunk", f"{key}:{j}", [piece, rows, *kept], [before, *operands], i, local)
        self.now[i, d, "piece", j], self.now[i, d, "rows", j] = piece, rows
        if kept:
            self.now[i, "kept", j] = kept[0]
        if (j == chunks.count and not chunks.result) or (j == chunks.count and not local.placed.store[0]):
            self._join(i, d)

    def _join(self, i: int, d: int | None) -> None:
        """A row's result, of its chunks."""
        placed, key = self._placed(i, d), self._key(i, d)
        assert placed.chunks is not None
        rest = bool(placed.store[0]) and not placed.chunks.result
        base = self._result(i, d, 0)
        made = self._slot(f"{base}.made" if rest else base)
        pieces = [self.now[i, d, "piece", j] for j in range(1, placed.chunks.count + 1)]
        self._add("join", key, [made], pieces, i)
        for what in ("waited", "rows", "come"):
            for j in range(placed.chunks.count + 1):
                self.now.pop((i, d, what, j), None)
        self._made(i, d, 0, made, is_last=not rest)
        if d is None and not rest:
            self._renew(i, 0)

    # ---------------------------------------------------------------- backward
    def _backward(self, step: flow.Flow) -> None:
        match step:
            case flow.Local():
                if step.operands:
                    self._vjp(step)
                else:
                    self._repeat(step)
            case Moved():
                if step.chain[0] in ("fetch", "store"):
                    self._repeat(step)
                else:
                    self._move(step)
            case flow.Start():
                if step.bucket is not None:
                    self._start_bucket(step)
                elif step.moved[0].chain[0] == "back" and step.lane != flow.CHUNKS:
                    self._start_back(step)
                else:
                    self._repeat(step)
            case flow.Wait():
                if step.name in self.sent:
                    self._wait_bucket(step)
                elif ("back", step.name) in self.now:
                    self._wait_back(step)
                else:
                    self._repeat(step)

    def _repeat(self, step: flow.Flow) -> None:
        """A step of a gradient's row, or of a block that is computed again."""
        self.is_again = _is_of_forward(step, self.program)
        self._forward(step)
        self.is_again = False

    def _vjp(self, local: flow.Local) -> None:
        i, row, key = local.row, local.placed, self._key(local.row)
        names = row.signature.inputs
        operands = [k for k in local.operands if row.back[k] is not None]
        between = len(operands) < len(local.operands)
        dys: list[str] = []
        for j, result in enumerate(row.signature.results):
            dys.append((self.now.get((i, "dy", j)) or self._dy(i, j)) if result.gradient else NOTHING)
        if local.part == "chunk":
            self._vjp_chunk(local, i, operands, dys)
            return
        if row.early is not None:
            self._vjp_piece(local, i, operands, dys, between)
            if local.part == "whole" and (i, "dpart") in self.now:  # nothing goes on its way between
                self._vjp_piece(local, i, operands, dys, between)
            return
        made = {k: self._slot(self._gradient(i, k)) for k in operands}
        makes = [made.get(k, NOTHING) for k in range(len(names))]
        if between:
            makes.append(self._slot(f"{key}.between"))
            self.now[i, "between"] = makes[-1]
        self._add("vjp", key, makes, [self.now[i, "kept"], *dys], i, local)
        if self.trains and isinstance(row.bound.operation, Dropout):
            self.steps[-1] = replace(self.steps[-1], when=("", True))
            self._add("same", key, makes[:1], dys[:1], i, None, ("", False))
        for k in operands:
            self._found(i, k, made[k])

    def _gradient(self, i: int, k: int) -> str:
        """What an operand's gradient is called as local code makes it."""
        row = self.program.rows[i]
        base = f"{label(row)}.d{row.signature.inputs[k].name}"
        return f"{base}.made" if row.back[k] else base

    def _found(self, i: int, k: int, slot: str) -> None:
        self.now[i, "dx", k] = slot
        row = self.program.rows[i]
        if not row.back[k]:
            self._into(row.bound.reads[k], slot, i)

    def _vjp_piece(self, local: flow.Local, i: int, operands: list[int], dys: list[str], between: bool) -> None:
        """The boundary's gradients, which go on their way, then those of the interior, to which they are added."""
        row, key = local.placed, self._key(i)
        k, count = row.early, len(row.signature.inputs)
        rest = [j for j in operands if j != k]
        parts = self.now.pop((i, "dpart"), None)
        is_interior = parts is not None
        is_part = not is_interior and (i, "kept inner") in self.now
        made = {j: self._slot(f"{self._gradient(i, j)}{'.boundary' if is_part else ''}") for j in rest}
        if k is not None and k in operands:
            what = "dinner" if is_interior else "dstrips"
            made[k] = self.now[i, what] = self._slot(f"{key}.{what}")
        makes = [made.get(j, NOTHING) for j in range(count)]
        if between:
            makes.append(self._slot(f"{key}.between{'.boundary' if is_part else ''}"))
        if is_interior:
            assert parts is not None
            self._add("vjp_interior", key, makes, [self.now[i, "kept inner"], *parts.split(), *dys], i, local)
        else:
            self._add("vjp_boundary", key, makes, [self.now[i, "kept"], *dys], i, local)
        if is_part:
            self.now[i, "dpart"] = " ".join(NOTHING if j == k else slot for j, slot in enumerate(makes))
            return
        if not is_interior:
            self.now[i, "dinner"] = NOTHING
        if between:
            self.now[i, "between"] = makes[-1]
        for j in rest:
            self._found(i, j, made[j])

    def _start_back(self, start: flow.Start) -> None:
        (moved,) = start.moved
        i = moved.row
        handle = self._slot(f"{moved.step}.sent")
        self._add("start_back", moved.step, [handle], [self.now[i, "dstrips"]], i, start)
        self.now["back", moved.step], self.now["of", moved.step] = handle, str(i)

    def _wait_back(self, wait: flow.Wait) -> None:
        handle, i = self.now.pop(("back", wait.name)), int(self.now["of", wait.name])
        row = self.program.rows[i]
        assert row.early is not None
        made, dy = self._slot(wait.name), self._dy(i, 0)
        self._add("wait_back", wait.name, [made], [handle, self.now[i, "dinner"], dy], i, wait)
        self._into(row.bound.reads[row.early], made, i)

    def _vjp_chunk(self, local: flow.Local, i: int, operands: list[int], dys: list[str]) -> None:
        row, key, j = local.placed, self._key(i), local.chunk
        chunks, count = row.chunks, len(row.signature.inputs)
        assert chunks is not None
        k = chunks.operand
        come = self.now.pop((i, "dcome", j), "")
        made = {q: self._slot(f"{self._gradient(i, q)}:{j}") for q in operands}
        carried = self._slot(f"{key}.carried:{j}") if k in operands else NOTHING
        before = self.now.pop((i, "carried"), NOTHING)
        makes = [carried, *(made.get(q, NOTHING) for q in range(count))]
        self._add("vjp_chunk", f"{key}:{j}", makes, [self.now[i, "kept", j], before, come or dys[0]], i, local)
        self.now[i, "carried"] = carried
        for q in operands:
            if q == k:
                self.now[i, "dpiece", j] = made[q]
            else:
                self.now[i, "dchunk", q, j] = made[q]
        if j > 1:
            return
        self.now.pop((i, "carried"))
        for q in operands:
            if q != k:
                slot = self._slot(self._gradient(i, q))
                parts = [self.now[i, "dchunk", q, n] for n in range(chunks.count, 0, -1)]
                self._add("vjp_join", f"{key}/{q}", [slot], parts, i)
                self._found(i, q, slot)
        if k is not None and k in operands and not row.back[k]:
            self._collect(i, k, row)

    def _collect(self, i: int, k: int, row: PlacedRow) -> None:
        """The gradient of an operand that came by chunks, when all of it is there."""
        assert row.chunks is not None
        made = self._slot(self._key(i, k))
        parts = [self.now[i, "dpiece", n] for n in range(row.chunks.count, 0, -1)]
        self._add("vjp_join", f"{self._key(i)}/{k}", [made], parts, i)
        self._into(row.bound.reads[k], made, i)

    def _start_bucket(self, start: flow.Start) -> None:
        reads: list[str] = []
        for m in start.moved:
            i, d, _, k, _, _ = self._where(m)
            reads.append(self.now[i, "dx", k] if d is None else self.now[i, d, "made", 0])
        handle = self._slot(f"{start.name}.sent")
        assert start.bucket is not None
        key = f"{start.name}:{','.join(start.bucket.over)}"
        self._add("start_bucket", key, [handle], reads, start.moved[-1].row, start)
        self.now["bucket", start.name] = handle
        self.sent[start.name] = [f"{m.value} {m.step}" for m in start.moved]

    def _wait_bucket(self, wait: flow.Wait) -> None:
        sums = [one.split(" ") for one in self.sent[wait.name]]
        made = [self._slot(step) for _, step in sums]
        self._add("wait_bucket", wait.name, made, [self.now["bucket", wait.name]], 0, wait)
        for (value, _), slot in zip(sums, made, strict=True):
            self._into(value, slot, 0)


def _is_of_forward(step: flow.Flow, program: Program) -> bool:
    """Whether a step of backward is one of forward, computed again."""
    match step:
        case flow.Local():
            return step.placed is program.rows[step.row]
        case Moved():
            return step.chain[0] in ("fetch", "store")
        case flow.Start():
            return step.moved[0].chain[0] in ("fetch", "store")
        case flow.Wait():
            return False


def _behind(steps: list[Step], last: Step) -> list[Step]:
    """Steps, with one behind the step that makes what it reads."""
    at = next((n for n, one in enumerate(steps) if last.reads[0] in one.makes), len(steps) - 1)
    row = steps[at].row if steps else 0
    return [*steps[: at + 1], replace(last, row=row), *steps[at + 1 :]]
