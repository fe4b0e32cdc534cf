"""From placed rows to the list of steps that ranks run, in single assignment: sums of gradients are steps, too.

What backward reads of forward is what its steps name: nothing is kept beside. Order and names are those of flow.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from convgen.program import flow
from convgen.program.lower_forward import Forward, When
from convgen.program.network import Moved, Program, label
from convgen.program.steps import NOTHING, Lowered, Step


def lower(program: Program, *, of_inputs: bool = True, modes: Sequence[str] = ("train", "eval")) -> Lowered:
    """The list of steps.

    Args:
        of_inputs: whether inputs want gradients, too.
        modes: the network's; where training is among them, steps that drop elements are of training alone.
    """
    return _Lowering(program, of_inputs, "train" in modes).lowered()


class _Lowering(Forward):
    def lowered(self) -> Lowered:
        for step in flow.forward(self.program):
            self._forward(step)
        outputs = [(name, self.slots[value], self._slot(f"{value}.given")) for name, value in self.program.outputs]
        half, self.is_behind = len(self.steps), False
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
        return Lowered(tuple(forward), tuple(_in_modes(backward)), tuple(outputs))

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
                if _is_halo_back(step):
                    self._start_back(step)
                else:
                    self._repeat(step)
            case flow.Wait():
                _, start = self.flying[step.name]
                if _is_halo_back(start):
                    self._wait_back(step)
                else:
                    self._repeat(step)

    def _repeat(self, step: flow.Flow) -> None:
        """Add a step of a gradient's row, or of a block that is computed again."""
        of = self.flying[step.name][1] if isinstance(step, flow.Wait) else step
        self.is_again = _is_of_forward(of, self.program)
        self._forward(step)
        self.is_again = False

    def _vjp(self, local: flow.Local) -> None:
        i, row, key = local.row, local.placed, self._key(local.row)
        names = row.signature.inputs
        operands = [k for k in local.operands if row.back[k] is not None]
        between = len(operands) < len(local.operands)
        dys: list[str] = []
        for j, result in enumerate(row.signature.results):
            dys.append(self._given(i, j) if result.gradient else NOTHING)
        if local.part == "chunk":
            self._vjp_chunk(local, i, operands, dys)
            return
        if row.early is not None:
            self._vjp_piece(local, i, operands, dys, between)
            if local.part == "whole" and i in self.parts:  # in pieces, with nothing on its way between them
                self._vjp_piece(local, i, operands, dys, between)
            return
        made = {k: self._slot(self._gradient(i, k)) for k in operands}
        makes = [made.get(k, NOTHING) for k in range(len(names))]
        if between:
            makes.append(self._slot(f"{key}.between"))
            self.now[i, "between"] = makes[-1]
        self._add("vjp", key, makes, [self.now[i, "kept"], *dys], i, local)
        if self.trains and row.bound.operation.in_evaluation == "same":
            self._same(key, makes[:1], dys[:1], i)
        for k in operands:
            self._found(i, k, made[k])

    def _gradient(self, i: int, k: int) -> str:
        """The name of an operand's gradient as local code makes it."""
        row = self.program.rows[i]
        base = f"{label(row)}.d{row.signature.inputs[k].name}"
        return f"{base}.made" if row.back[k] else base

    def _found(self, i: int, k: int, slot: str) -> None:
        self.now[i, "dx", k] = slot
        row = self.program.rows[i]
        if not row.back[k]:
            self._into(row.bound.reads[k], slot, i)

    def _vjp_piece(self, local: flow.Local, i: int, operands: list[int], dys: list[str], between: bool) -> None:
        """Add the vjp of the boundary, whose gradients go on their way, or that of the interior, which adds them."""
        row, key = local.placed, self._key(i)
        k, count = row.early, len(row.signature.inputs)
        rest = [j for j in operands if j != k]
        parts = self.parts.pop(i, None)
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
            self._add("vjp_interior", key, makes, [self.now[i, "kept inner"], *parts, *dys], i, local)
        else:
            self._add("vjp_boundary", key, makes, [self.now[i, "kept"], *dys], i, local)
        if is_part:
            self.parts[i] = [NOTHING if j == k else slot for j, slot in enumerate(makes)]
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
        self.flying[start.name] = handle, start

    def _wait_back(self, wait: flow.Wait) -> None:
        handle, start = self.flying.pop(wait.name)
        i = start.moved[0].row
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
            elif chunks.index in row.signature.inputs[q].indices:
                self.now[i, "dchunk", q, j] = made[q]
            else:  # summed as chunks come, so that at most two parts of it are there at a time
                self.now[i, "dsum", q] = self._summed(i, q, j, made[q])
        if j > 1:
            return
        self.now.pop((i, "carried"))
        for q in operands:
            if (i, "dsum", q) in self.now:
                self._found(i, q, self.now.pop((i, "dsum", q)))
            elif q != k:
                slot = self._slot(self._gradient(i, q))
                parts = [self.now[i, "dchunk", q, n] for n in range(chunks.count, 0, -1)]
                self._add("vjp_join", f"{key}/{q}", [slot], parts, i)
                self._found(i, q, slot)
        if k is not None and k in operands and not row.back[k]:
            self._collect(i, k, row)

    def _summed(self, i: int, q: int, j: int, slot: str) -> str:
        """An operand's gradient summed over chunk j and the chunks that backward has come to before."""
        before = self.now.get((i, "dsum", q))
        if before is None:
            return slot
        base = self._gradient(i, q)
        made = self._slot(base if j == 1 else f"{base}:{j}.sum")
        self._add("add", made, [made], [before, slot], i)
        return made


def _is_of_forward(step: flow.Local | Moved | flow.Start, program: Program) -> bool:
    """Whether a step of backward is one of forward, computed again."""
    match step:
        case flow.Local():
            return step.placed is program.rows[step.row]
        case Moved():
            return step.chain[0] in ("fetch", "store")
        case flow.Start():
            return step.moved[0].chain[0] in ("fetch", "store")


def _is_halo_back(start: flow.Start) -> bool:
    """Whether a Start sends the gradient of a halo on its way."""
    return start.moved[0].chain[0] == "back" and start.lane == flow.HALOS


def _behind(steps: list[Step], last: Step) -> list[Step]:
    """Steps with `last` put behind the step that makes what it reads."""
    at = next((n for n, one in enumerate(steps) if last.reads[0] in one.makes), len(steps) - 1)
    row = steps[at].row if steps else 0
    return [*steps[: at + 1], replace(last, row=row), *steps[at + 1 :]]


def _in_modes(steps: Sequence[Step]) -> Iterator[Step]:
    """Steps, of which sums and gradients handed on are of training where all that they read is: gradients of moments,
    for which evaluation reads running statistics instead."""
    made: dict[str, set[When]] = {}
    for step in steps:
        if step.kind in ("add", "gradient"):
            modes = set[When]().union(*(made.get(n, {None}) for n in step.reads))
            if all(mode is not None and mode[1] for mode in modes):
                step = replace(step, when=min(filter(None, modes)))
        for n in step.makes:
            made.setdefault(n, set()).add(step.when)
        yield step
