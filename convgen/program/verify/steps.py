"""The verifier of the list of steps that ranks run (program/steps.py).

| check | says |
|---|---|
| slots | each is made once in a mode, before it is read, and read, but of rows that the source does not use |
| flights | what is sent on its way is waited for once, by a step of the same name, before the pass ends |
| hands | each buffer is renewed once, each gradient asked for is handed on once, and each output is made |
| contents | what a step reads is what its row takes there, in training and in evaluation (program/verify/contents.py) |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from convgen.program.lower import lower
from convgen.program.network import Program
from convgen.program.steps import NOTHING, Lowered, Step, state_slot
from convgen.program.verify.contents import FEWER, content_faults

# Steps that send something on its way, with those that wait for it.
WAITS = {
    "start": "wait", "start_back": "wait_back", "start_bucket": "wait_bucket", "send_fetch": "wait_chunk",
    "send_store": "wait_chunk", "send_given": "wait_chunk", "send_back": "wait_chunk",
}  # fmt: skip
CARRIED = {"chunk": 1, "vjp_chunk": 0}  # which of what a step makes is rows for the next chunk


def lowered_faults(program: Program) -> Iterator[str]:
    """What is wrong with the steps of a program, with and without gradients of inputs."""
    for of_inputs in (False, True):
        yield from step_faults(program, lower(program, of_inputs=of_inputs), of_inputs=of_inputs)


def step_faults(program: Program, lowered: Lowered, *, of_inputs: bool) -> Iterator[str]:
    """What is wrong with a list of steps."""
    for training in (True, False):
        yield from _slots(program, lowered, training)
    yield from _unread(program, lowered)
    yield from _flights(lowered.forward)
    yield from _flights(lowered.backward)
    yield from _hands(program, lowered, of_inputs)
    yield from content_faults(program, lowered, of_inputs=of_inputs)


def _slots(program: Program, lowered: Lowered, training: bool) -> Iterator[str]:
    made = {NOTHING, *(n if v.kind == "input" else state_slot(n) for n, v in program.values.items())}
    for steps, given in ((lowered.forward, ()), (lowered.backward, [of for _, _, of in lowered.outputs])):
        made |= {*given}
        for step in steps:
            if step.when is not None and step.when[1] != training:
                continue
            late = [n for n in step.reads if n not in made]
            if late and (training or step.kind not in FEWER):
                yield f"{step.head}: no step before it makes {', '.join(late)}"
            yield from (f"{step.head}: a step before it makes {n}" for n in step.makes if n in made and n != NOTHING)
            made |= {*step.makes}
    yield from (f"output {name}: no step makes {slot}" for name, slot, _ in lowered.outputs if slot not in made)


def _unread(program: Program, lowered: Lowered) -> Iterator[str]:
    """What is made in vain, as an addend of a gradient is that no sum has. A block that is computed again may make what
    forward alone reads."""
    steps = (*lowered.forward, *lowered.backward)
    used = {r for step in steps for r in step.reads} | {slot for _, slot, _ in lowered.outputs} | {NOTHING}
    asked = {v for row in program.rows for v in row.bound.reads} | {v for _, v in program.updates}
    used |= {v for row in program.rows for v in row.bound.makes if v not in asked}
    for step in steps:
        made = () if step.again else step.makes
        if step.kind in CARRIED and made:  # behind the last chunk nobody goes on with rows that it hands on
            made = (*made[: CARRIED[step.kind]], *made[CARRIED[step.kind] + 1 :])
        yield from (f"{step.head}: nobody reads {n}" for n in made if n not in used)


def _flights(steps: Sequence[Step]) -> Iterator[str]:
    waits = {slot: step for step in steps if step.kind in WAITS.values() for slot in step.reads[:1]}
    count = Counter(step.reads[0] for step in steps if step.kind in WAITS.values())
    for step in steps:
        if step.kind not in WAITS:
            continue
        (handle,) = step.makes
        wait = waits.get(handle)
        if wait is None:
            yield f"{step.head}: nobody waits for it"
        elif count[handle] > 1:
            yield f"{step.head}: it is waited for {count[handle]} times"
        elif (WAITS[step.kind], step.key.split(":")[0]) != (wait.kind, wait.key.split(":")[0]):
            yield f"{step.head}: {wait.head} waits for it"
    sent = {slot for step in steps if step.kind in WAITS for slot in step.makes}
    yield from (f"{step.head}: nothing is on its way" for slot, step in waits.items() if slot not in sent)


def _hands(program: Program, lowered: Lowered, of_inputs: bool) -> Iterator[str]:
    renewed = Counter(step.key for step in lowered.forward if step.kind == "update")
    made = {v for row in program.rows for v in row.bound.makes}
    yield from (
        f"buffer {b} is renewed {renewed[b]} times" for b, v in program.updates if v in made and renewed[b] != 1
    )
    kinds = ("parameter", "input") if of_inputs else ("parameter",)
    read = {v for row in program.rows for v in row.bound.reads}
    wanted = [n for n in program.differentiable(of_inputs=of_inputs) if program.values[n].kind in kinds and n in read]
    handed = Counter(step.key for step in lowered.backward if step.kind == "gradient")
    yield from (f"the gradient of {n} is handed on {handed[n]} times" for n in wanted if handed[n] != 1)
