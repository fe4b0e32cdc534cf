# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private)
"""A network's steps as one rank runs them in one kind of call: which are wanted, what each does, how long slots live.

Backward has those steps alone that lead from gradients that are there to gradients that are asked for; forward keeps
what these read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.operations.offered import Offer, offering
from convgen.operations.rimmed import Rimmed

from .actions import CHAINS, Action, Actions, Flags
from .at_hand import lacking
from .copies import first_nan
from .handed_on import Boxes, HandedOn
from .lanes import noted
from .last_steps import Later, with_gradients_left, with_results_left
from .listing import NOTHING, Line, Steps, in_mode
from .mesh import Place
from .surrounded import HALO, with_halos
from .taken_steps import Chosen, with_moments, with_sums

# Steps that make rows' results.
LABELLED: tuple[str, ...] = ("forward", "forward_moments", "forward_behind", "interior", "boundary", "chunk", "join")
# Names of steps in a profile.
NOTED: Mapping[str, str] = dict.fromkeys((*LABELLED, "forward_later"), "local") | dict.fromkeys(CHAINS, "move")


UNREAD = ("forward", "forward_moments", "same", "fill")  # steps that are left out where nobody reads what they make
# Steps that may make a value in its place in a bucket's message.
OFFERED = ("forward", "vjp", "vjp_sum", "vjp_behind", "vjp_sum_behind")
PASSING = ("back", "store", "add", "same", "vjp_join", "join", "wait_chunk", "send_back", "send_store")  # gradients on


class Code(NamedTuple):
    """A step that is ready to run: the slots that it reads and makes, by number, and those that nobody reads after it;
    `over`: whether it writes over what it reads first."""

    action: Action
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    ends: tuple[int, ...]
    line: Line
    over: bool


class Forward(NamedTuple):
    """Forward's steps, ready to run.

    Attributes:
        size: the number of slots; `given`: the slots of inputs, parameters and buffers, by name; `kept`: the slots that
            backward reads.
        learns: of each output, whether it has a gradient by anything that wants one.
    """

    codes: list[Code]
    size: int
    given: dict[str, int]
    outputs: list[int]
    kept: list[int]
    learns: list[bool]


class Backward(NamedTuple):
    """Backward's steps, ready to run.

    Attributes:
        kept, given: slots of what forward has kept, and of outputs' gradients; `found`: by name, the slots of the
            gradients made.
    """

    codes: list[Code]
    size: int
    kept: list[int]
    given: list[int]
    found: dict[str, int]


class Linked:
    """A network's steps at one set of sizes and in one mode, on this rank.

    Args:
        trains: says of a module whether it is in training; "" is the network.
        wide: inputs that come with the rows around their blocks.
        around: by output, each rank's box in which the next call takes it.

    Attributes:
        outputs: the outputs' slots, by name.
        handed_on: the outputs that are given with such boxes; the others are blocks.
        read_in_place: by what wants gradients, the parameters and buffers that backward reads where they lie.
    """

    def __init__(
        self,
        steps: Steps,
        ctx: Any,
        place: Place,
        trains: Callable[[str], bool],
        wide: Sequence[str] = (),
        around: Mapping[str, Boxes] | None = None,
    ) -> None:
        self.steps, self.ctx = steps, ctx
        self.actions = Actions(steps, ctx, place, trains)
        self.lacks = next(lacking(self.actions.stands, place), "")
        self.boxes = {name: self.actions.surrounded(name, (*steps.forward, *steps.backward)) for name in wide}
        forward, backward = (
            self.actions.with_biases(with_halos(in_mode(lines, trains), self.actions.moves, wide))
            for lines in (steps.forward, steps.backward)
        )
        self.outputs = {name: slot for name, (slot, _) in steps.outputs.items()}
        self.handed_on = self._hand_on(forward, wide, around) if around else ()
        forward = with_moments(forward, self.actions)
        self.forward_lines, self.backward_lines = forward, [self._with_gradient(line) for line in backward]
        self.sums = self._sums() if ctx.mixes else {}
        self._forwards: dict[Any, tuple[Forward, list[str], dict[str, Flags]]] = {}
        self._backwards: dict[Any, Backward] = {}
        self.read_in_place: dict[tuple[str, ...], list[str]] = {}

    def _hand_on(self, lines: list[Line], wide: Sequence[str], around: Mapping[str, Boxes]) -> tuple[str, ...]:
        """Add steps that make outputs with the rows around them, each as early as it can run; the outputs so made."""
        both, ranks = (*self.steps.forward, *self.steps.backward), range(len(self.actions.place.ranks))
        halos = {name: tuple([self.actions.surrounded(name, both, p) for p in ranks]) for name in wide}
        made = HandedOn(self.actions, lines, halos)
        slots = {name: made.output(self.outputs[name], boxes) for name, boxes in around.items()}
        self.outputs |= {name: slot for name, slot in slots.items() if slot is not None}
        self.actions.wide = made.wide
        for line in made.added:
            last = max((i for i, one in enumerate(lines) if {*one.makes} & {*line.reads}), default=-1)
            lines.insert(last + 1, line)
        return tuple([name for name, slot in slots.items() if slot is not None])

    def _with_gradient(self, line: Line) -> Line:
        """A step; if it makes the gradient through a norm's moments together with that through y, it also reads what
        the latter reads."""
        label = line.key.removesuffix(".dx")
        of = self.actions.joints.get(label) if line.kind == "forward" and label != line.key else None
        if of is None:
            return line
        of_y = next(v for v in self.steps.backward if v.kind == "vjp" and v.key == of)
        return line._replace(reads=(*line.reads, *of_y.reads))

    def _sums(self) -> dict[str, torch.dtype]:
        """The slots in which gradients of parameters begin, each with the type in which they are summed."""
        makers = {n: line for line in self.backward_lines for n in line.makes}
        found: dict[str, torch.dtype] = {}
        state = self.ctx.net.state

        def begins(slot: str, kind: torch.dtype) -> None:
            maker = makers.get(slot)
            if maker is None:
                return
            if maker.kind == "wait_bucket":
                begins(makers[maker.reads[0]].reads[maker.makes.index(slot)], kind)
            elif maker.kind in PASSING:
                for n in maker.reads:
                    begins(n, kind)
            else:
                found[slot] = kind

        for line in self.backward_lines:
            if line.kind == "gradient" and line.key in state:
                begins(line.reads[0], self.ctx.net.types[line.key])
        return found

    # ---- What is wanted ----

    def _wanted(self, asked: Collection[str], dys: Collection[str]) -> list[Chosen]:
        """Backward's steps that lead from these outputs' gradients to the gradients of these inputs and parameters."""
        there, again = set(dys), set[str]()
        flying: dict[str, Flags] = {}
        reached: list[tuple[Line, Flags]] = []
        gradients = {of for _, of in self.steps.outputs.values()}
        for line in self.backward_lines:
            if not gradients.isdisjoint(line.reads):  # what is fetched of forward's values is no gradient
                gradients |= {*line.makes} - {NOTHING}
            reads = tuple([n in there or n in again or n not in gradients for n in line.reads])
            of_gradients = [n in there for n in line.reads if n in gradients and n not in again]
            if line.again:
                again |= {*line.makes}
            elif of_gradients and not any(of_gradients):
                continue
            elif line.kind == "start_bucket":
                flying[line.makes[0]] = reads
                there |= {*line.makes}
            elif line.kind == "wait_bucket":
                pairs = zip(line.makes, flying[line.reads[0]], strict=True)
                there |= {n for n, comes in pairs if comes}
            else:
                there |= {*line.makes}
            reached.append((line, reads))
        needed, found = set[str](), list[Chosen]()
        used: dict[str, Flags] = {}
        for line, reads in reversed(reached):
            makes = tuple([n in needed and n != NOTHING for n in line.makes])
            if line.kind == "gradient":
                if line.key not in asked:
                    continue
            elif line.kind == "wait_bucket":
                makes = tuple([m and n in there for m, n in zip(makes, line.makes, strict=True)])
                used[line.reads[0]] = makes
                if not any(makes):
                    continue
            elif line.kind == "start_bucket":
                if line.makes[0] not in used or not any(used[line.makes[0]]):
                    continue
                reads = tuple([r and u for r, u in zip(reads, used[line.makes[0]], strict=True)])
            elif not any(makes):
                continue
            found.append(Chosen(line, makes, reads))
            needed |= {n for n, r in zip(line.reads, reads, strict=True) if r}
        return found[::-1]

    # ---- Forward ----

    def forward(self, learns: tuple[str, ...]) -> Forward:
        """
        Args:
            learns: inputs and parameters that want gradients.
        """
        if learns not in self._forwards:
            self._forwards[learns] = self._forward(learns)
        return self._forwards[learns][0]

    def _forward(self, learns: tuple[str, ...]) -> tuple[Forward, list[str], dict[str, Flags]]:
        wanted = self._wanted(learns, [of for _, of in self.steps.outputs.values()]) if learns else []
        again = {n for w in wanted if w.line.again for n in w.line.makes}
        wants = _wants(wanted)
        outputs = [*self.outputs.values()]
        lines = self.forward_lines
        made = {n for line in lines for n in line.makes}
        given = dict.fromkeys(n for line in lines for n in line.reads if n not in made and n != NOTHING)
        given |= dict.fromkeys(n for n in outputs if n not in made)
        net = self.ctx.net
        called = {n: n[1:-1] if n.startswith("[") else n.removesuffix(HALO) for n in given}
        unknown = [n for n in given if called[n] not in net.values]
        if unknown:
            raise ValueError(f"{net.name}: no step makes {', '.join(unknown)}, and no input or parameter is called so")
        later = [n for w in wanted for n, r in zip(w.line.reads, w.reads, strict=True) if r]
        known = made | {*given} | {n for n in later if n.startswith("[")}
        kept = [n for n in dict.fromkeys(later) if n in known and n not in again and n != NOTHING]
        given |= dict.fromkeys(n for n in kept if n not in made)
        # A slot that nobody reads is not made, unless other ranks wait for it, or its step renews buffers itself.
        own = {line for line in lines if (line.kind, line.key) in self.actions.in_place}
        renewed = {n for line in own for n in line.makes}
        needed, chosen = {*outputs, *kept}, list[Chosen]()
        for line in reversed(lines):
            makes = tuple([n in needed for n in line.makes])
            if line.kind == "update" and line.reads[0] in renewed:
                continue
            if any(makes) or line in own or line.kind not in UNREAD:
                chosen.append(Chosen(line, makes, (True,) * len(line.reads)))
                needed |= {*line.reads}
        chosen = with_results_left(chosen[::-1], self.actions)
        numbers = _numbers([*given, *(n for w in chosen for n in w.line.makes)])
        stays = {*outputs, *kept}
        codes = self._codes(chosen, numbers, stays, wants)
        done = Forward(
            codes, len(numbers), {n: numbers[n] for n in given}, [numbers[n] for n in outputs],
            [numbers[n] for n in kept],
            [bool(learns) and self._leads(learns, of) for _, of in self.steps.outputs.values()],
        )  # fmt: skip
        return done, kept, wants

    def _leads(self, asked: Collection[str], dy: str) -> bool:
        """Whether steps lead from an output's gradient to one of these."""
        return any(w.line.kind == "gradient" for w in self._wanted(asked, [dy]))

    def _codes(
        self, wanted: Sequence[Chosen], numbers: dict[str, int], stays: Collection[str], wants: dict[str, Flags]
    ) -> list[Code]:
        wanted = with_gradients_left(with_sums(wanted, self.actions, stays), self.actions, stays)
        last: dict[str, int] = {}
        makers: dict[str, Line] = {}
        for n, w in enumerate(wanted):
            for name in (*w.line.makes, *w.line.reads):
                last[name] = n
            makers |= dict.fromkeys(w.line.makes, w.line)
        readers = Counter(name for w in wanted for name in w.line.reads)
        alone = {n: line for n, line in makers.items() if readers[n] == 1 and n not in stays}  # others may keep it
        offers = self._offers(wanted, alone)
        codes: list[Code] = []
        for n, (line, makes, reads) in enumerate(wanted):
            ends = {name for name in (*line.makes, *line.reads) if last[name] == n and name not in stays}
            kept = next((k for k in (*line.makes, *line.reads) if k in wants), "")
            over = self._may_write_over(line, alone)
            if line.kind == "add" and not over:
                swapped = line._replace(reads=line.reads[::-1])
                if self._may_write_over(swapped, alone):
                    line, reads, over = swapped, reads[::-1], True
            given = line, wants.get(kept, ()), makes, reads, over
            action = self.actions.action(*given) if line.kind != "gradient" else _none
            if line.kind in OFFERED and (found := [offers[name] for name in line.makes if name in offers]):
                action = _offering(action, found)
            if any(name in self.sums for name in line.makes):
                action = _typed(action, [self.sums.get(name) for name in line.makes])
            read = [numbers[name] if there else numbers[NOTHING] for name, there in zip(line.reads, reads, strict=True)]
            made = [numbers[name] for name in line.makes]
            ended = sorted(numbers[name] for name in ends if name != NOTHING)
            codes.append(Code(action, tuple(read), tuple(made), tuple(ended), line, over))
        return codes

    def _offers(self, wanted: Sequence[Chosen], alone: Collection[str]) -> dict[str, Offer]:
        """For each slot that a bucket alone reads, the function that offers it memory in the bucket's message; on GPUs
        alone, whose kernels write there."""
        found: dict[str, Offer] = {}
        for line, _, reads in wanted:
            if line.kind == "start_bucket" and self.ctx.net.last:
                memory = self.actions.bucket(line, reads).memory
                found |= {n: partial(memory.offer, k) for k, n in enumerate(line.reads) if reads[k] and n in alone}
        return found

    def _may_write_over(self, line: Line, alone: Mapping[str, Line]) -> bool:
        """Whether a step can write over what it reads first.

        Args:
            alone: for each slot that one step alone reads, the step that makes it.
        """
        maker = alone.get(next(iter(line.reads), NOTHING)) if line.kind in ("forward", "add") else None
        while maker is not None and self.actions.casts(maker):  # a cast gives what it reads, where that has the type
            maker = alone.get(maker.reads[0])
        return maker is not None and self.actions.may_write_over(line, maker)

    # ---- Backward ----

    def backward(self, learns: tuple[str, ...], asked: tuple[str, ...], dys: Flags) -> Backward:
        """
        Args:
            learns: as for forward; `asked`: those of them whose gradients are wanted.
            dys: for each output, whether it has a gradient.
        """
        key = (learns, asked, dys)
        if key not in self._backwards:
            self._backwards[key] = self._backward(*key)
        return self._backwards[key]

    def _backward(self, learns: tuple[str, ...], asked: tuple[str, ...], dys: Flags) -> Backward:
        self.forward(learns)
        _, kept, wants = self._forwards[learns]
        given = [of for _, of in self.steps.outputs.values()]
        wanted = self._wanted(asked, [of for of, there in zip(given, dys, strict=True) if there])
        numbers = _numbers([*kept, *given, *(n for w in wanted for n in (*w.line.makes, *w.line.reads))])
        found = {w.line.key: w.line.reads[0] for w in wanted if w.line.kind == "gradient"}
        codes = self._codes(wanted, numbers, {*found.values()}, wants)
        codes = [code for code in codes if code.line.kind != "gradient"]
        return Backward(
            codes, len(numbers), [numbers[n] for n in kept], [numbers[n] for n in given],
            {name: numbers[slot] for name, slot in found.items()},
        )  # fmt: skip


def _none(*reads: Any) -> None:
    return None


def _offering(action: Action, offers: Sequence[Offer]) -> Action:
    """A step's function with its local code offered memory for what it makes."""

    def offer(shape: Sequence[int], like: Any) -> Any:
        return next(filter(lambda found: found is not None, (one(shape, like) for one in offers)), None)

    def run(*reads: Any) -> Any:
        with offering(offer):
            return action(*reads)

    return run


def _typed(action: Action, kinds: Sequence[torch.dtype | None]) -> Action:
    """A step's function with its results cast to these types; None leaves a result's type."""

    def typed(*reads: Any) -> Any:
        made = action(*reads)
        if len(kinds) == 1:
            return made if made is None else made.to(kinds[0])
        return [t if kind is None or t is None else t.to(kind) for t, kind in zip(made, kinds, strict=False)]

    return typed


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """A number for each slot; 0 is that of nothing."""
    return {name: n for n, name in enumerate(dict.fromkeys([NOTHING, *names]))}


def _wants(wanted: Sequence[Chosen]) -> dict[str, Flags]:
    """For each slot that forward keeps, which gradients backward makes of it: a flag for each operand, and last for
    what lies between."""
    found: dict[str, Flags] = {}
    for line, makes, _ in wanted:
        if not line.kind.startswith("vjp") or line.kind == "vjp_join":
            continue
        flags = makes[1:] if line.kind == "vjp_chunk" else makes  # the first is what is carried to the chunk before
        old = found.get(line.reads[0], (False,) * len(flags))
        found[line.reads[0]] = tuple([a or b for a, b in zip(old, flags, strict=True)])
    return found


def execute(codes: Sequence[Code], slots: list[Any]) -> None:
    """Run steps, one after the other."""
    if torch.autograd._profiler_enabled():
        execute_noted(codes, slots)
        return
    for action, reads, makes, ends, _, _ in codes:
        made = action(*[slots[n] for n in reads])
        if len(makes) == 1:
            slots[makes[0]] = made
        elif makes:
            for n, one in zip(makes, made, strict=False):
                slots[n] = one
        made = one = None  # no name may hold a tensor beyond its last reader
        for n in ends:
            slots[n] = None
        slots[0] = None


def execute_noted(codes: Sequence[Code], slots: list[Any], nans: list[str] | None = None) -> None:
    """Run steps, noting each for a profiler, or looking for the first row that makes a NaN.

    Args:
        nans: a list that takes the words for that row.
    """
    for action, numbers, makes, ends, line, over in codes:
        reads = [slots[n] for n in numbers]
        with noted(NOTED.get(line.kind, line.kind), line.key.partition(":")[0]):
            made = action(*reads)
        for n, one in zip(makes, [made] if len(makes) == 1 else made or (), strict=False):
            slots[n] = one
        slots[0] = None
        if nans is not None and not nans and line.kind in LABELLED:
            there = [slots[n] for n in makes if n]
            read = _flat(reads[over:])
            if line.kind == "forward_behind":  # it also makes what a norm has left
                nans.extend(filter(None, [first_nan(line.makes[-1], there[-1:], read)]))
            nans.extend(filter(None, [first_nan(line.key, _flat(there), read)]))
        del reads, made
        for n in ends:
            slots[n] = None


def _flat(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Rimmed):
            found += value.own, value.rim
        elif isinstance(value, Later):
            found += _flat([value.read, *(t for t in value.given if t is not value.made)])
        elif type(value) is tuple:
            found += _flat(value)
    return found
