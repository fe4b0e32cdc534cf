"""The steps of a row of a plan, forward and backward: what is moved and what is computed, as the price adds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convgen.algebra.notation import roles_text
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price, own_ps, pass_ps
from convgen.program.network import Moved, Program, asked
from convgen.program.rows import PlacedRow, index_sets


@dataclass(frozen=True)
class Step:
    """One step of a layer.

    Attributes:
        phase: forward or backward.
        kind: the kind of a collective, or an operation's name.
        sent_bytes: the most bytes that a rank sends.
        flops: the most flops that a rank computes.
        measured: for how many of its convolutions, or steps, the seconds were measured.
    """

    phase: str
    kind: str
    what: str
    time_ps: int
    sent_bytes: int = 0
    flops: int = 0
    communicates: bool = False
    measured: int = 0

    @property
    def seconds(self) -> float:
        return self.time_ps / PICOSECONDS


class Steps:
    """The steps of a program's rows on a machine."""

    def __init__(self, program: Program, price: Price) -> None:
        self.program, self.price = program, price
        self.wanted = program.differentiable(of_inputs=False)
        self.again = {i for s in program.again for i in range(s.start, s.stop)}
        self.moves: dict[int, list[Moved]] = {}
        for m in (*program.forward(), *program.backward()):
            self.moves.setdefault(m.row, []).append(m)

    def of(self, number: int) -> Iterator[Step]:
        """A row's steps, in the order in which a step of training comes to them."""
        row, wanted = self.program.rows[number], asked(self.program.rows[number].bound, self.wanted)
        names, types = row.signature.inputs, self.program.row_types[number]

        def moved(sides: tuple[str, ...], placed: PlacedRow, phase: str) -> Iterator[Step]:
            for m in self.moves.get(number, ()):
                if m.placed is placed and m.chain[0].split()[-1] in sides:
                    yield self._moved(m, phase)

        for phase in ("forward", "backward") if number in self.again else ("forward",):
            yield from moved(("fetch",), row, phase)
            how = "again" if phase == "backward" else f"roles {roles_text(row.roles) or 'none'}"
            yield replace(self._local(row, types.local, phase, how), time_ps=self._forward_ps(number))
            yield from moved(("store",), row, phase)
        for k, one in row.derived:
            if wanted[k]:
                yield from moved(("fetch",), one, "backward")
                own = f"d{names[k].name}, roles {roles_text(one.roles) or 'none'}"
                yield self._local(one, types.of(names[k].name).local, "backward", own)
                yield from moved(("store",), one, "backward")
        if back := [k for k, chain in enumerate(row.back) if chain is not None and wanted[k]]:
            yield from moved(("given",), row, "backward")
            apart = row.bound.operation.is_product  # in other rows one pass may make all gradients
            for some in [[k] for k in back] if apart else [back]:
                which = ", ".join(f"d{names[k].name}" for k in some)
                yield self._local(row, types.local, "backward", f"{which} by the vjp", some)
            yield from moved(("back",), row, "backward")

    def _forward_ps(self, number: int) -> int:
        """Picoseconds of a row's local work in forward; a bias's depends on how its product is moved."""

        def price(i: int) -> Price:
            return self.price.of(self.program.row_types[i].local)

        rows, biased = self.program.rows, self.program.biased
        own, product = own_ps(rows[number], price(number), biased[number]), self.program.products_of_biases.get(number)
        return own if product is None else own + pass_ps(rows[product], price(product), biased[product])

    def _moved(self, m: Moved, phase: str) -> Step:
        c = m.conversion
        is_sum = self.program.is_of_parameter(m)
        moves = self.price.of(self.program.dtype_of(m)).moves
        sent, ps = moves.moved(index_sets(m.placed.signature, self.program.grid), c)
        over = f" over {','.join(c.over)}" if c.over else ""
        ps = 0 if is_sum and self.price.machine.hides_gradients else ps
        known = c.kind != "slice" and moves.measured(c.kind, c.over, sent) is not None
        what = f"{m.step}{over}: {c.src} -> {c.dst}" + ", measured" * known
        return Step(phase, c.kind, what, ps, sent * moves.element_bytes, communicates=True, measured=int(known))

    def _local(
        self, row: PlacedRow, computed_in: str, phase: str, what: str, back: Sequence[int] | None = None
    ) -> Step:
        operation, roles, price = row.bound.operation, dict(row.roles), self.price.of(computed_in)
        ps = price.local(operation, row.way, roles, back)
        measured = price.measured(operation, row.way, roles, back)
        how = ", measured" if measured else ""
        kind, asked = operation.name, [row.signature.inputs[k].name for k in back or ()]
        if operation.is_product and len(asked) == 1 and asked[0] in operation.gradients:
            kind = operation.gradients[asked[0]].operation.name
        flops = sum(n * one.work.flops for n, one in self.price.launches(operation, row.way, roles, back))
        return Step(phase, kind, what + how, ps, flops=flops, measured=measured)
