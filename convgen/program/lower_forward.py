"""Steps of forward, and steps of the same kinds in backward: those of gradients' rows and of what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from convgen.operations.running import PartStatistics, RunningStatistics
from convgen.program import flow
from convgen.program.network import Bucket, Moved, Program, asked, label
from convgen.program.norms import counting, evaluated
from convgen.program.rows import Chain, PlacedRow, reads_of
from convgen.program.shared import Place, Shared, shared
from convgen.program.steps import NOTHING, Kind, Step, state_slot

When = tuple[str, bool] | None
OF_ALL_MODES = ("add", "same", "fill", "update", "gradient", "start_bucket", "wait_bucket")  # kinds, in either mode
SENDS: dict[str, Kind] = {"fetch": "send_fetch", "store": "send_store", "given": "send_given", "back": "send_back"}


def alternatives(program: Program, i: int, modes: Sequence[str]) -> PlacedRow | None:
    """The row that takes a row of moments' place in evaluation, if that one has running statistics."""
    return evaluated(program, i) if "train" in modes else None


def of_training(program: Program) -> set[int]:
    """Numbers of rows of statistics that evaluation doesn't need: only such rows read what they make."""
    counts = {*counting(program).values()}
    others = {v for _, v in program.outputs}
    found: set[int] = set()
    for i, row in reversed([*enumerate(program.rows)]):
        is_one = i in counts or isinstance(row.bound.operation, (PartStatistics, RunningStatistics))
        if is_one and others.isdisjoint(row.bound.makes):
            found.add(i)
        else:
            others |= {*row.bound.reads}
    return found


class Forward:
    """Steps so far, and the slots in which values stand; backward's rows of gradients are lowered like forward's."""

    def __init__(self, program: Program, of_inputs: bool, trains: bool) -> None:
        self.program, self.of_inputs, self.trains = program, of_inputs, trains
        self.wanted = program.differentiable(of_inputs=of_inputs)
        self.steps: list[Step] = []
        self.names: Counter[str] = Counter()
        self.slots = {
            n: n if v.kind == "input" else state_slot(n) for n, v in program.values.items() if v.kind != "made"
        }  # by value, the slot in which it stands now
        self.names.update(self.slots.values())
        self.grads: dict[str, str] = {}
        self.now: dict[tuple[object, ...], str] = {}  # by row, slots of what it has fetched, made and given back
        self.flying: dict[str, tuple[str, flow.Start]] = {}  # by name, the slot that the wait for it reads
        self.parts: dict[int, list[str]] = {}  # by row in pieces, what the boundary adds to gradients
        self.again = {i for s in program.again for i in range(s.start, s.stop)}
        self.alternatives: dict[int, PlacedRow | None] = {}
        self.updates = {value: buffer for buffer, value in program.updates}
        self.of_training = of_training(program)
        self.is_again = False
        self.is_behind = False  # whether steps stand behind all rows

    # ---------------------------------------------------------------- slots
    def _slot(self, base: str) -> str:
        """A new slot."""
        self.names[base] += 1
        return base if self.names[base] == 1 else f"{base}'{self.names[base]}"

    def _add(
        self, kind: Kind, key: str, makes: Sequence[str], reads: Sequence[str], row: int, step: flow.Flow | None = None,
        when: When = None,
    ) -> None:  # fmt: skip
        if when is None and kind not in OF_ALL_MODES:
            when = self._when(row)
        row = len(self.program.rows) if self.is_behind else row
        self.steps.append(Step(kind, key, tuple(makes), tuple(reads), row, when, step, self.is_again))

    def _same(self, key: str, makes: Sequence[str], reads: Sequence[str], row: int) -> None:
        """Make the last step one of training; in evaluation what it makes is what it reads."""
        self.steps[-1] = replace(self.steps[-1], when=("", True))
        self._add("same", key, makes, reads, row, None, ("", False))

    def _into(self, value: str, gradient: str, row: int) -> None:
        """Add an addend to a value's gradient."""
        if value in self.grads:
            made = self._slot(f"{value}.grad")
            self._add("add", f"{value}.grad", [made], [self.grads[value], gradient], row)
            gradient = made
        self.grads[value] = gradient

    def _number(self, local: flow.Local) -> int | None:
        """For a gradient's row, the number of the operand whose gradient it makes; None for a row of forward."""
        row = self.program.rows[local.row]
        return None if local.placed is row else next(k for k, one in row.derived if one is local.placed)

    def _key(self, i: int, d: int | None = None) -> str:
        row = self.program.rows[i]
        return label(row) if d is None else f"{label(row)}.d{row.signature.inputs[d].name}"

    def _placed(self, i: int, d: int | None) -> PlacedRow:
        row = self.program.rows[i]
        return row if d is None else dict(row.derived)[d]

    def _operand(self, i: int, k: int, d: int | None) -> str:
        """The slot of an operand, as far as it has been fetched."""
        if (i, d, "fetch", k) in self.now:
            return self.now[i, d, "fetch", k]
        row = self.program.rows[i]
        if d is None:
            return self.slots[row.bound.reads[k]]
        if (held := self._shared(i).held.get((d, k))) is not None:
            return self.now[i, None, "fetch", held[0], held[1] - 1]
        if (other := self._shared(i).rows.get((d, k))) is not None:
            return self._fetched(i, *other)
        kind, j = reads_of(row.bound.operation, self._placed(i, d).bound.reads)[k]
        if kind == "operand":
            return self.slots[row.bound.reads[j]]
        if kind == "result":
            return self.slots.get(row.bound.makes[j], NOTHING)
        if (between := self.now.get((i, "between"))) is not None:
            return between
        return self._dy(i, j)

    def _shared(self, i: int) -> Shared:
        row = self.program.rows[i]
        return shared(row, tuple(asked(row.bound, self.wanted)))

    def _fetched(self, i: int, place: Place, count: int) -> str:
        """The slot of an operand of a gradient's row after so many conversions."""
        return self.now[i, place[0], "fetch", place[1], count - 1]

    def _given(self, i: int, j: int) -> str:
        """The slot of a result's gradient, as far as it has been fetched for local code's vjp."""
        if (i, "dy", j) in self.now:
            return self.now[i, "dy", j]
        once = self._shared(i).given
        return self._fetched(i, *once[j]) if j in once else self._dy(i, j)

    def _dy(self, i: int, j: int) -> str:
        return self.grads.get(self.program.rows[i].bound.makes[j], NOTHING)

    def _made(self, i: int, d: int | None, j: int, slot: str, *, is_last: bool) -> None:
        """Record the slot of a result, or of a gradient."""
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
        """Where a conversion belongs: the row; for a gradient's row its operand; the chain, by field and number; the
        conversion's number in the chain; and the chain's length."""
        side, k = moved.chain
        words = side.split()
        d = int(words[1]) if words[0] == "derived" else None
        chain = getattr(moved.placed, words[-1])[k]
        return moved.row, d, words[-1], k, chain.index(moved.conversion), len(chain)

    def _when(self, i: int) -> When:
        """The mode of a row's steps: rows of statistics are of training; evaluation takes running statistics."""
        of_training = i in self.of_training or self._alternative(i) is not None
        return (self.program.rows[i].bound.module, True) if of_training else None

    def _move(self, moved: Moved) -> None:
        i, d, which, k, n, count = self._where(moved)
        if which == "fetch":
            if n == 0:
                self.now.pop((i, d, "fetch", k), None)
            made = self._slot(moved.step)
            self._add("fetch", moved.step, [made], [self._operand(i, k, d)], i, moved)
            self.now[i, d, "fetch", k] = self.now[i, d, "fetch", k, n] = made
        elif which == "store":
            made = self._slot(self._result(i, d, k) if n == count - 1 else moved.step)
            self._add("store", moved.step, [made], [self.now[i, d, "made", k]], i, moved)
            self._made(i, d, k, made, is_last=n == count - 1)
            if n == count - 1 and d is None:
                if (alternative := self._alternative(i)) is not None:
                    self._evaluated(i, alternative, made)
                self._renew(i, k)
        elif which == "given":
            source = self._given(i, k)
            made = self.now[i, "dy", k] = self._slot(moved.step)
            self._add("given", moved.step, [made], [source], i, moved)
        else:
            made = self._slot(moved.step)
            self._add("back", moved.step, [made], [self.now[i, "dx", k]], i, moved)
            self.now[i, "dx", k] = made
            if n == count - 1:
                self._into(moved.value, made, i)

    def _result(self, i: int, d: int | None, j: int) -> str:
        """The name of a row's result."""
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
        """The row that takes the place of a row of moments in evaluation; None where it has no running statistics."""
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
        draws = d is None and self.trains and placed.bound.operation.in_evaluation == "fill"
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
        if self.trains and placed.bound.operation.in_evaluation == "same":
            self._same(key, made[:1], operands[:1], i)
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
        """Add the row that takes the place of moments in evaluation, and what moves for it."""
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
        if start.bucket is not None:
            self._start_bucket(start, start.bucket)
            return
        (moved,) = start.moved
        i, d, which, k, _, _ = self._where(moved)
        if start.lane == flow.CHUNKS:
            self._start_chunk(start, moved, i, d, which, k)
            return
        handle = self._slot(f"{moved.step}.sent")
        self._add("start", moved.step, [handle], [self._operand(i, k, d)], i, start)
        self.flying[start.name] = handle, start

    def _wait(self, wait: flow.Wait) -> None:
        handle, start = self.flying.pop(wait.name)
        if start.bucket is not None:
            self._wait_bucket(wait, handle, start)
            return
        if start.lane == flow.CHUNKS:
            self._wait_chunk(wait, handle, start)
            return
        i, d, _, k, _, _ = self._where(start.moved[0])
        strips = self.now[i, d, "strips"] = self._slot(f"{wait.name}.strips")
        self._add("wait", wait.name, [strips], [handle, self._operand(i, k, d)], i, wait)

    def _start_bucket(self, start: flow.Start, bucket: Bucket) -> None:
        reads: list[str] = []
        for m in start.moved:
            i, d, which, k, _, _ = self._where(m)
            reads.append(self.now[(i, "dx", k) if which == "back" else (i, d, "made", k)])
        handle = self._slot(f"{start.name}.sent")
        key = f"{start.name}:{','.join(bucket.over)}:{bucket.dtype}"
        self._add("start_bucket", key, [handle], reads, start.moved[-1].row, start)
        self.flying[start.name] = handle, start

    def _wait_bucket(self, wait: flow.Wait, handle: str, start: flow.Start) -> None:
        of_gradients = start.moved[0].is_of_gradient
        self.is_behind = not of_gradients
        made = [self._slot(m.step) for m in start.moved]  # a sum of forward has the name of its result
        self._add("wait_bucket", wait.name, made, [handle], 0, wait)
        for m, slot in zip(start.moved, made, strict=True):
            if of_gradients:
                self._into(m.value, slot, 0)
            else:
                self._made(m.row, None, m.chain[1], slot, is_last=True)

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
        self.flying[start.name] = handle, start

    def _wait_chunk(self, wait: flow.Wait, handle: str, start: flow.Start) -> None:
        (i, d, which, k, _, _), j = self._where(start.moved[0]), start.chunk
        made = self._slot(f"{wait.name}.there")
        self._add("wait_chunk", wait.name, [made], [handle], i, wait)
        row, count = self._placed(i, d), self._placed(i, d).chunks
        assert count is not None
        match which:
            case "fetch":
                self.now[i, d, "come", j] = made
            case "store":
                self.now[i, d, "piece", j] = self.now[i, d, "waited", j] = made
                if all((i, d, "waited", n) in self.now for n in range(1, count.count + 1)):
                    self._join(i, d)
            case "given":
                self.now[i, "dcome", j] = made
            case _:
                self.now[i, "dpiece", j] = made
                if j == 1:
                    self._collect(i, k, row)

    def _chunk(self, local: flow.Local, i: int, d: int | None, operands: list[str], kept: list[str]) -> None:
        """Add a chunk of a row. It reads what has come for it, and perhaps rows that came with the chunk before."""
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
        """Join a row's result from its chunks."""
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

    def _collect(self, i: int, k: int, row: PlacedRow) -> None:
        """Join the gradient of an operand that came by chunks, once all of it is there."""
        assert row.chunks is not None
        made = self._slot(self._key(i, k))
        parts = [self.now[i, "dpiece", n] for n in range(row.chunks.count, 0, -1)]
        self._add("vjp_join", f"{self._key(i)}/{k}", [made], parts, i)
        self._into(row.bound.reads[k], made, i)
