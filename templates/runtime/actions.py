# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""What a rank does in each kind of step: a function that takes what the step reads and gives what it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convgen.operations.autocast import taken_as

from .biases import JoinedWithBias, WithBias, added_before, biases_of
from .buckets import Bucket, come
from .chunks import Chunked
from .conversions import within
from .group_norms import norms_at_once
from .handed_on import Wide
from .here import held_at
from .last_steps import Later, vjp_behind
from .layout import Box, common
from .listing import Line, Steps
from .local_code import LocalCode
from .mesh import Place
from .norm_kernels import norm_here
from .pieces import Halo, OfStrips, Pieces, pieces_of, put_together
from .rows import Stand
from .step_functions import (
    Action,
    Flags,
    as_it_is,
    as_one,
    first_of,
    of_dense,
    several_of,
    sum_of,
    sum_over,
    with_flags,
    with_zeros,
)
from .surrounded import HALO, surrounded, taken_from, taker
from .travel import Move, RowHere, dense, fills, way_of

CHAINS: tuple[str, ...] = ("fetch", "store", "given", "back")  # steps that convert something and wait for it
FETCHES = ("fetch", "start", "wait", "send_fetch")  # steps that bring an operand


def keeps_graph() -> bool:
    """Whether the backward pass at work leaves graphs for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


class Actions:
    """The functions of a network's steps on this rank, for one number of samples.

    Args:
        ctx: what rows ask of a network: name, grid, sums, types, device, and sizes that are known at run time only.
        trains: says of a batch norm's module whether it is in training.
    """

    def __init__(self, steps: Steps, ctx: Any, place: Place, trains: Callable[[str], bool]) -> None:
        self.place, self.ctx = place, ctx
        self.stands: dict[str, Stand] = {}
        for label, row in steps.rows.items():
            stand = self.stands[label] = row.stand(ctx, label)
            self.stands |= {one.label: one for one in stand.derived.values()}
        self._of_gradients = {one.label for s in self.stands.values() for one in s.derived.values()}
        self.programs = ctx.net.programs
        if self.programs is not None:
            self.stands = {label: self.programs.stand(stand, place) for label, stand in self.stands.items()}
        self.moves: dict[tuple[str, str], tuple[Stand, Move]] = {
            (side, m.step): (s, m) for s in self.stands.values() for side, m in s.moves()
        }
        taken: set[str] = set()
        norms = [norm_here(n, steps, self.stands, place, trains(n.module), taken) for n in steps.norms]
        norms = norms if self.programs is None else []  # on an SW26010 norms' steps are as their rows say
        self.joints = {n.norm.moments: n.norm.centred for n in norms if n.is_joint}  # moments' row to their reader
        none: tuple[Any, ...] = {}, {}, set()
        at_once, joints, by_tiles = norms_at_once(steps, self.stands, place) if self.programs is None else none
        self.joints |= joints
        # By kind and key; a step that adds another gradient to its own is of kind `vjp_sum`, or `forward_sum`.
        self.of_norms = {key: step for n in norms for key, step in n.steps().items()} | at_once
        self.in_place = {key for n in norms for key in n.in_place()}  # steps that renew buffers themselves
        self.keep = {key for n in norms for key in (n.norm.coefficients, n.norm.centred, *n.behind)}
        self.keep |= {key for kind, key in at_once if kind == "vjp"}
        self.by_tiles = {key for n in norms for key in n.by_tiles} | by_tiles
        self.read_again = {n.behind[-1] for n in norms if n.reads_result}  # norms' backward reads these results
        self.without_gradient = {f"{n.norm.moments}.dx" for n in norms if n.is_local}  # it is made with that of y
        self._codes: dict[Any, Any] = {}
        self.biases = biases_of(steps, self.stands)
        self._added = {line.key: self.stands[line.key] for line in self.biases.values()}
        self.stands |= {label: added_before(stand) for label, stand in self._added.items()}
        self._surrounded: dict[tuple[str, int], Box] = {}
        self.wide: Mapping[str, Wide] = {}

    def here(self, stand: Stand) -> RowHere:
        return RowHere(stand, self.place, 0)  # type: ignore[arg-type]

    def surrounded(self, name: str, lines: Sequence[Line], p: int | None = None) -> Box:
        """The box of an input's block with the rows that these steps fetch around it.

        Args:
            p: a rank's position; this rank's by default.
        """
        p = self.place.me if p is None else p
        if (name, p) not in self._surrounded:
            own = held_at(self.ctx.net, self.ctx.net.split(name, self.ctx.open), p, 0)
            made = surrounded(name, own, lines, self.moves, lambda stand, layout: held_at(stand, layout, p, 0))  # type: ignore[arg-type]
            self._surrounded[name, p] = made
        return self._surrounded[name, p]

    def _box_of(self, line: Line) -> Box | None:
        """The box of an input that a step reads, if the input has come with the rows around its block; else None."""
        name = line.reads[-1]
        return self._surrounded[name.removesuffix(HALO), self.place.me] if name.endswith(HALO) else None

    def action(self, line: Line, wants: Flags, needed: Flags, read: Flags, over: bool) -> Action:
        """The function that does a step.

        Args:
            wants: of a step that keeps something for backward: for each operand, and last for what lies between,
                whether its gradient is wanted.
            needed: for each slot that it makes, whether somebody reads it; read: for each slot that it reads, whether
                it is there.
            over: whether the step may write over what it reads first, as nobody else has it.
        """
        found = self.of_norms.get((line.kind, line.key))
        if found is not None and line.kind.startswith("vjp"):
            return with_flags(found, needed, len(line.makes))
        if found is not None:
            return first_of(found) if line.key in self.keep and len(line.makes) == 1 else found
        if line.kind == "forward" and line.key in self.biases:
            return self._with_bias(line, wants)
        if line.kind == "forward" and line.key in self._added and len(line.makes) == 1:
            code = self._whole(line.key, wants)
            if code.is_plain and not code.keeps:
                return as_it_is
        if self.programs is not None and line.kind == "add":
            return self.programs.adds(line.key, self.place)
        if over:
            return sum_over if line.kind == "add" else self._forward(line, wants, needed, read, over=True)
        kind = "move" if line.kind in CHAINS else "send" if line.kind.startswith("send_") else line.kind
        action = getattr(self, f"_{kind}")(line, wants, needed, read)
        return self._low(line, action) if self.ctx.low is not None and line.kind in FETCHES else action

    def _low(self, line: Line, action: Action) -> Action:
        """A conversion of an operand, cast to autocast's type before it moves where autocast takes it so."""
        key = line.key.rpartition(":")[0] if line.kind == "send_fetch" else line.key
        stand, move = self.moves["fetch", key]
        k = next(k for k, chain in enumerate(stand.fetch) if move in chain)
        if not stand.autocast or stand.autocast[k] != "low":
            return action

        def moved(*reads: Any) -> Any:
            *others, value = reads
            return action(*others, *taken_as("low", [value], self.ctx.low))

        return moved

    def stand(self, line: Line) -> Stand:
        return self.stands[line.key]

    def _boxes(self, stand: Stand) -> list[Box]:
        here = self.here(stand)
        return [here.held(layout) for layout in stand.windows]

    def _code(self, key: Any, made: Callable[[], Any]) -> Any:
        """What `made` makes: once for each key, for forward and backward."""
        if key not in self._codes:
            self._codes[key] = made()
        return self._codes[key]

    # ---- Rows as a whole ----

    def _whole(self, key: str, wants: Flags) -> LocalCode:
        stand = self.stands[key]
        count = len(stand.signature.inputs)
        between = wants[count:] == (True,)
        code: LocalCode = self._code(
            ("whole", key, wants),
            lambda: LocalCode(stand, stand.at(self.place), self._boxes(stand), wants[:count], between),
        )
        return code

    def _forward(self, line: Line, wants: Flags, needed: Flags, read: Flags, over: bool = False) -> Action:
        code = self._whole(line.key, wants)
        operation = code.stand.operation
        if not code.keeps:
            run = with_zeros(code) if not all(read) else code.run_over if over else code.run
            if code.is_plain and all(read):
                run = code.bound(operation.local_over if over else operation.local)
            if line.key in self._of_gradients:
                run = of_dense(run)
            return first_of(run) if len(line.makes) == 1 else several_of(run, len(line.makes))

        quick = code.bound(operation.kept_over if over else operation.kept, code.wants)

        def forward(*operands: Tensor) -> tuple[Any, ...]:
            made, kept = quick(*operands) if code.is_plain and code.says else code.forward(*operands, over=over)
            return *made, kept

        return forward

    def _forward_moments(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        code, keeps = self._whole(line.key, wants), len(line.makes) > 2

        def forward(*operands: Tensor) -> tuple[Any, ...]:
            (made,), kept, moments = code.with_moments(*operands)
            return (made, kept, moments) if keeps else (made, moments)

        return forward

    def _forward_behind(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        code, keeps = self._whole(line.key, wants), len(line.makes) > 3

        def forward(later: Any, *others: Tensor) -> tuple[Any, ...]:
            is_left = isinstance(later, Later)
            (made,), kept, moments = (code.behind_norm if is_left else code.with_moments)(later, *others)
            normed = later.made if is_left else later
            return (made, kept, moments, normed) if keeps else (made, moments, normed)

        return forward

    def with_biases(self, lines: Sequence[Line]) -> list[Line]:
        """The steps, where those of products that add biases read the biases, too."""
        found = {key: bias.reads[1:] for key, bias in self.biases.items()}
        adds = ("forward", "join")
        return [v._replace(reads=v.reads + found.get(v.key, ())) if v.kind in adds else v for v in lines]

    def _bias(self, line: Line) -> LocalCode:
        """Local code of the row whose bias a product's step adds."""
        stand = self._added[self.biases[line.key].key]
        return LocalCode(stand, stand.at(self.place), self._boxes(stand))

    def _with_bias(self, line: Line, wants: Flags) -> Action:
        product = WithBias(self._whole(line.key, wants), self._bias(line))
        return first_of(product.forward) if len(line.makes) == 1 else product.forward

    def casts(self, line: Line) -> bool:
        """Whether a step only casts: it gives the tensor that it reads where that has the type already."""
        return line.kind == "forward" and line.key in self.stands and bool(self.stands[line.key].operation.casts_to)

    def may_write_over(self, line: Line, maker: Line) -> bool:
        """Whether a step can write over what it reads first; `maker` has made that for it alone."""
        if line.kind == "add":
            if maker.kind in ("back", "wait_back"):
                _, move = self.moves["back", maker.key]
                return move.kind not in ("slice", "exchange")
            of = maker.key.rpartition(":")[0] if maker.kind == "vjp_chunk" else maker.key
            return maker.kind in ("vjp", "vjp_chunk") and self.stands[of].operation.gives_anew
        if maker.key in self.read_again:
            return False
        leaves = maker.kind in ("forward", "boundary") and self.stands[maker.key].operation.leaves_results
        if line.kind != "forward" or not leaves or line.key not in self.stands:
            return False
        code = self._whole(line.key, ())
        return code.is_whole and not code.is_nothing and not self.stands[maker.key].operation.has_between

    def _vjp(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        code = self._whole(line.key, wants)

        adds = line.kind == "vjp_sum"  # it adds another gradient, which it reads last
        operation, count = code.stand.operation, len(code.boxes)
        on_cpu = self.ctx.device == "cpu" and self.programs is None
        any_order = operation.any_order or (operation.any_order_by_aten and on_cpu)
        quick, more = code.bound(operation.vjp, needed[:count]), needed[count:]

        def vjp(kept: Any, *reads: Tensor | None) -> Any:
            dys, before = (reads[:-1], reads[-1]) if adds else (reads, None)
            given = [None if d is None else d if any_order and fills(d) else dense(d) for d in dys]
            if code.is_plain and code.says and not adds and not more:
                found = quick(kept, *given)
            else:
                found = code.backward(kept, needed, given, keeps_graph(), before)
            return found if len(found) > 1 else found[0]

        return vjp

    _vjp_sum = _vjp

    def _vjp_behind(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        plain = self._vjp(line._replace(kind=line.kind.removesuffix("_behind")), wants, needed, read)
        return partial(vjp_behind, self._whole(line.key, wants), needed, plain)

    _vjp_sum_behind = _vjp_behind

    def _forward_sum(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        code = self._whole(line.key, ())

        def run(*reads: Tensor | None) -> Tensor:
            *operands, before = reads
            given: Any = operands
            return code.run(*given)[0] if before is None else code.run_behind(before, *given)

        return run

    # ---- In pieces ----

    def _pieces(self, key: str) -> tuple[Stand, Pieces, Halo, int]:
        def made() -> tuple[Stand, Pieces, Halo, int]:
            stand = self.stands[key]
            k = stand.row.early
            assert k is not None
            here, back, (move,) = self.here(stand), stand.back[k], stand.fetch[k]
            pieces = pieces_of(stand, here, k)
            return stand, pieces, Halo(move, back[0] if back else move, here, pieces), k

        return self._code(("pieces", key), made)

    def _piece(self, key: str, number: int, wants: Flags) -> LocalCode:
        """Local code of the interior, if `number` is -1, or of a piece of the boundary."""
        stand, pieces, _, k = self._pieces(key)
        piece = pieces.interior if number < 0 else pieces.boundary[number]
        assert piece is not None
        boxes = self._boxes(stand)
        boxes[k] = piece.box
        count = len(boxes)
        return self._code(
            ("piece", key, number, wants),
            lambda: LocalCode(stand, piece.at, boxes, wants[:count], wants[count:] == (True,)),
        )

    def _of_move(self, line: Line) -> tuple[Stand, Pieces, Halo, int]:
        side = "back" if line.kind.endswith("_back") else "fetch"
        return self._pieces(self.moves[side, line.key][0].label)

    def _start(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return self._of_move(line)[2].start

    def _wait(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        _, pieces, halo, _ = self._of_move(line)
        if (box := self._box_of(line)) is not None:
            return lambda _, wide: tuple([taken_from(wide, box, piece.box) for piece in pieces.boundary])
        strips = halo.strips
        return lambda pending, x: strips(pending, x.contiguous())

    def _interior(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        _, pieces, halo, k = self._pieces(line.key)
        if pieces.interior is None:
            return lambda *_: (None, None) if len(line.makes) > 1 else None
        code, box = self._piece(line.key, -1, wants), pieces.interior.box

        def interior(*operands: Tensor) -> Any:
            given = [*operands]
            given[k] = within(given[k].contiguous(), halo.own, box)
            (made,), kept = code.forward(*given)
            return (made, kept) if len(line.makes) > 1 else made

        return interior

    def _boundary(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        stand, pieces, _, k = self._pieces(line.key)
        whole = stand.result_box(stand.at(self.place))
        interior = pieces.interior if line.reads[1] != "_" else None
        places = [stand.result_box(p.at) for p in (interior, *pieces.boundary) if p]
        codes = [self._piece(line.key, n, wants) for n in range(len(pieces.boundary))]

        def boundary(strips: Sequence[Tensor], inner: Tensor | None, *operands: Tensor) -> Any:
            made = [] if inner is None else [inner]
            kept: list[Any] = []
            for code, strip in zip(codes, strips, strict=True):
                (one,), of_one = code.forward(*operands[:k], strip, *operands[k + 1 :])
                made.append(one)
                kept.append(of_one)
            whole_one = put_together(whole, places, made)
            given = operands[k].dtype
            types = stand.moved_type(k, given), given
            return (whole_one, (tuple(kept), *types)) if len(line.makes) > 1 else whole_one

        return boundary

    def _vjp_boundary(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        """The boundary's vjp: gradients of the halo's strips, and the boundary's addends to other operands'
        gradients."""
        stand, pieces, _, k = self._pieces(line.key)
        whole = stand.result_box(stand.at(self.place))
        places = [stand.result_box(p.at) for p in pieces.boundary]
        codes = [self._piece(line.key, n, wants) for n in range(len(pieces.boundary))]
        has_between = len(needed) > len(stand.signature.inputs)
        add = sum_over if stand.operation.gives_anew else sum_of

        def vjp(kept: tuple[Any, torch.dtype, torch.dtype], dy: Tensor) -> Any:
            (parts, *types), dy = kept, dy.contiguous()
            strips: list[Any] = []
            totals: list[Any] = [None] * len(needed)
            between: list[Tensor | None] = []
            for code, of_one, place in zip(codes, parts, places, strict=True):
                found = code.backward(of_one, needed, [within(dy, whole, place)], keeps_graph())
                strips.append(found[k])
                if has_between:
                    between.append(found.pop())
                for j, g in enumerate(found):
                    if j != k:
                        totals[j] = add(totals[j], g)
            if has_between:
                only = places == [whole]
                totals[-1] = between[0] if only else [*zip(places, between, strict=True)]
            totals[k] = OfStrips(tuple(strips), *types)
            return totals if len(totals) > 1 else totals[0]

        return vjp

    def _vjp_interior(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        """The interior's vjp: its gradients, with the boundary's addends to them."""
        stand, pieces, *_ = self._pieces(line.key)
        if pieces.interior is None:  # this rank has none

            def passed_on(kept: Any, *rest: Any) -> Any:
                *parts, _ = rest  # all but dy, which comes last
                return parts if len(parts) > 1 else parts[0]

            return passed_on
        whole = stand.result_box(stand.at(self.place))
        place, code = stand.result_box(pieces.interior.at), self._piece(line.key, -1, wants)
        has_between = len(needed) > len(stand.signature.inputs)
        add = sum_over if stand.operation.gives_anew else sum_of

        def vjp(kept: Any, *rest: Any) -> Any:
            *parts, dy = rest
            found: list[Any] = code.backward(kept, needed, [within(dy.contiguous(), whole, place)], keeps_graph())
            if has_between:
                between, together = found.pop(), parts.pop()
                together = [(place, between), *together]
                found.append(put_together(whole, [p for p, _ in together], [g for _, g in together]))
                parts.append(None)
            made = [*map(add, parts, found)]
            return made if len(made) > 1 else made[0]

        return vjp

    def _start_back(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return self._of_move(line)[2].start_back

    def _wait_back(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return self._of_move(line)[2].wait_back

    # ---- In chunks ----

    def _chunked(self, key: str) -> Chunked:
        return self._code(
            ("chunks", key), lambda: Chunked(self.stands[key], self.here(self.stands[key]), self.ctx.net.last)
        )

    def _chunk_of(self, line: Line) -> tuple[Chunked, int]:
        key, _, number = line.key.rpartition(":")
        return self._chunked(key), int(number) - 1

    def _chunk_code(self, chunked: Chunked, j: int, wants: Flags) -> LocalCode:
        stand, count = chunked.stand, len(chunked.held)
        return self._code(
            ("chunk", stand.label, j, wants),
            lambda: LocalCode(
                stand, chunked.parts[j].at, [chunked.box(k, j) for k in range(count)], wants[:count],
            ),
        )  # fmt: skip

    def _chunk(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        chunked, j = self._chunk_of(line)
        if j >= len(chunked.parts):
            return lambda *_: (None,) * len(line.makes)
        code, has_come, k = self._chunk_code(chunked, j, wants), line.makes[1] != "_", chunked.k

        def chunk(before: Tensor | None, *operands: Tensor) -> Any:
            given, rows = [*operands], None
            if has_come:
                assert k is not None
                given[k], rows = chunked.arrived(j, given[k], before)
            (piece,), kept = code.forward(*chunked.operands(j, given, has_come=has_come))
            return (piece, rows, kept) if len(line.makes) > 2 else (piece, rows)

        return chunk

    def _join(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        joined = self._chunked(line.key).joined
        if line.key in self.biases:
            return JoinedWithBias(joined, self._bias(line))
        return lambda *pieces: joined(pieces)

    def _vjp_chunk(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        chunked, j = self._chunk_of(line)
        if j >= len(chunked.parts):
            return lambda *_: (None,) * len(line.makes)
        code, k = self._chunk_code(chunked, j, wants), chunked.k

        def vjp(kept: Any, carried: Tensor | None, dy: Tensor) -> Any:
            dy = chunked.gradient(j, dy).contiguous()
            found = code.backward(kept, needed[1:], [dy], keeps_graph())
            rest = None
            if k is not None and needed[1 + k]:
                gradient = found[k]
                assert gradient is not None
                found[k], rest = chunked.brought(j, gradient, carried)
            return rest, *found

        return vjp

    def _vjp_join(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        key, _, operand = line.key.rpartition("/")
        chunked, k = self._chunked(key), int(operand)
        if k == chunked.k:
            return lambda *gradients: chunked.collected(gradients)
        return lambda *gradients: chunked.summed(k, gradients)

    def _send(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        step, _, number = line.key.rpartition(":")
        side = line.kind.removeprefix("send_")
        stand, j = self.moves[side, step][0], int(number) - 1
        chunked = self._chunked(stand.label)
        if j >= len(chunked.parts):
            return lambda *_: None
        return lambda value: chunked.start(side, j, line.key, value)

    def _wait_chunk(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return lambda going: None if going is None else going.wait()

    # ---- What moves ----

    def _move(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        stand, move = self.moves[line.kind, line.key]
        if (box := self._box_of(line)) is not None:
            return taker(move, box, self.here(stand))
        return way_of(move, self.here(stand))

    def bucket(self, line: Line, read: Flags) -> Bucket:
        """The bucket that a step packs and sends."""
        return self._code((line.kind, line.key, read), lambda: Bucket(line.key, read, self.ctx.net, self.place))

    def _start_bucket(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return self.bucket(line, read).start

    def _wait_bucket(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        name, last = line.key.partition(":")[0], self.ctx.net.last
        return lambda sent: come(name, sent, last)

    # ---- What is handed on to another call ----

    def _around(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        have, wanted = self.wide[line.makes[0]].reads
        if not have:
            return lambda value: value.new_empty([hi - lo for lo, hi in wanted])
        return lambda value: taken_from(as_one(value), have, wanted)

    def _wide(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        at, boxes = self.wide[line.makes[0]]
        code = LocalCode(self.stand(line), at, boxes)
        return lambda *operands: code.run(*map(as_one, operands))[0]

    def _window(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        """Put together a rank's window from the strips that its boundary reads and from its block."""
        stand, pieces, halo, k = self._of_move(line)
        whole = self.here(stand).held(stand.windows[k])
        inner = common(halo.own, whole)

        def window(strips: Sequence[Tensor], x: Tensor) -> Tensor:
            out = x.new_zeros([hi - lo for lo, hi in whole])
            within(out, whole, inner).copy_(within(x, halo.own, inner))
            for part, piece in zip(strips, pieces.boundary, strict=True):
                within(out, whole, piece.box).copy_(part)
            return out

        return window

    # ---- Others ----

    def _add(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return sum_of

    def _same(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        return as_it_is

    def _fill(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        value: float = self.stand(line).operation.p  # type: ignore[attr-defined]
        return lambda drawn: torch.full_like(drawn, value)

    def _update(self, line: Line, wants: Flags, needed: Flags, read: Flags) -> Action:
        name = f"{self.ctx.name}: {line.key}"

        def update(value: Tensor, buffer: Tensor) -> None:
            if buffer.shape != value.shape:  # copy_ would broadcast it
                sizes = f"{list(buffer.shape)} here, its new value {list(value.shape)}"
                raise RuntimeError(f"{name} is {sizes}")
            buffer.copy_(value)

        return update
