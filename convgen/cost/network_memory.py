"""What a rank holds in a step of training, row by row: kept values, passing values, gradients, optimizer's states.

Torch itself says what autograd keeps of a row: the row's local code runs on tensors without memory, with the fullest
rank's shapes, and each tensor that it saves is an operand, a result, or something between. A value that several rows
save is kept once; what was moved for a row is kept beside the value. Then forward and backward are walked:

| part | bytes of it |
|---|---|
| parameters, gradients, optimizer | blocks of parameters; of momentum or the like so many values a parameter |
| saved | at the end of the forward pass |
| passing | what else is there at the highest point: gradients on their way, values that nobody saves, moves, copies |

Overlap takes more of these, and so does packing (cost/flight_memory.py). A gradient that is one number in many places,
as a mean's is, takes nothing until a row writes it out.

convolution_copies.py says what ATen's convolutions copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from convgen.algebra.blocks import span
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.wants import layout
from convgen.cost.autograd import kept_of, spreads
from convgen.cost.convolution_copies import columns, columns_of_row, copies
from convgen.cost.flight_memory import (
    is_in_pieces,
    is_summed,
    overlap_elements,
    packed_bytes,
    parts_of,
    repacked,
    result_elements,
)
from convgen.cost.network import element_bytes
from convgen.cost.norms_at_once import norms_at_once
from convgen.cost.overwriting import overwriting
from convgen.operations.chains import MADE
from convgen.operations.fused import Fused
from convgen.operations.moments import Normalise
from convgen.operations.row import made_here
from convgen.program.network import Program, Stretch
from convgen.program.rows import Chain, PlacedRow, index_sets, reads_of
from convgen.program.shared import shared

Kept = tuple[str, int]  # a root's name, bytes


@dataclass(frozen=True, slots=True)
class NetworkMemory:
    """Bytes on the fullest rank in a step of training."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    saved: int
    passing: int

    @property
    def peak(self) -> int:
        """The most at a time: gradients are all there at the end of backward, saved values at its beginning."""
        return self.parameters + self.optimizer + self.buffers + self.saved + self.passing


def network_memory(program: Program, optimizer_states: int = 1) -> NetworkMemory:
    """The memory of a program whose inputs want no gradients.

    Args:
        optimizer_states: values that an optimizer keeps for each parameter: SGD 0, with momentum 1, Adam 2.
    """
    return fullest(program, optimizer_states).memory()


def fullest(program: Program, optimizer_states: int = 1) -> MemoryWalk:
    """The walk of the rank that needs most: of the rank that reads and makes most, and of the first and the last, which
    stand at edges, where zeros are put beside their blocks."""
    ranks = dict.fromkeys((busiest_rank(program), 0, program.grid.ranks - 1))
    return max((MemoryWalk(program, optimizer_states, rank) for rank in ranks), key=lambda walk: walk.memory().peak)


def busiest_rank(program: Program) -> int:
    """The rank with the most elements in all that rows read and make."""
    total = np.zeros(program.grid.ranks, dtype=np.int64)
    for (signature, roles), count in Counter((row.signature, row.roles) for row in program.rows).items():
        sets = index_sets(signature, program.grid)
        for operand in (*signature.inputs, *signature.results):
            total += sets.elements(layout(sets, operand.name, signature.wants(operand, dict(roles)))) * count
    return int(total.argmax())


class MemoryWalk:
    """What rows keep on a rank, found once; and memory with any choice of blocks computed again."""

    def __init__(self, program: Program, states: int, rank: int) -> None:
        self.program, self.states, self.rank = program, states, rank
        self.wanted = program.differentiable(of_inputs=False)
        self.root: dict[str, str] = {}
        self.size: dict[str, int] = {}
        self.of_gradient: dict[str, int] = {}  # by value, bytes of its complete gradient
        for name, kind in program.types.items():
            elements = self._stored(name)
            self.size[name] = elements * element_bytes(kind)
            self.of_gradient[name] = elements * element_bytes(program.gradient_type(name))
        self.overwrites, self.norms = overwriting(program), norms_at_once(program, rank)
        self.parts = [parts_of(row, program.grid, rank) for row in program.rows]
        self.saved: list[dict[str, int]] = [self._of(i, row) for i, row in enumerate(program.rows)]
        self.again: dict[int, Stretch] = {}
        self.takes: dict[Stretch, set[str]] = {}

    # ---- one row ----

    def _stored(self, name: str) -> int:
        value, n = self.program.values[name], 1
        at = {a: int(c[self.rank]) for a, c in self.program.grid.coordinates.items()}
        for extent, axes in zip(value.shape, value.stored, strict=True):
            sizes = tuple(self.program.grid.sizes[a] for a in axes)
            lo, hi = span(extent, 1, sizes, tuple(at[a] for a in axes), 0)
            n *= hi - lo
        return n

    def _bytes(self, layout_: Layout, sets: IndexSets, dtype: str) -> int:
        return int(sets.elements(layout_)[self.rank]) * element_bytes(dtype)

    def _received(self, c: Conversion, sets: IndexSets, dtype: str) -> int:
        """Bytes that a conversion brings a rank beyond what it has."""
        own, need = sets.held(c.src)[self.rank], sets.held(c.dst)[self.rank]
        common = np.minimum(own[:, 1], need[:, 1]) - np.maximum(own[:, 0], need[:, 0])
        return int((need[:, 1] - need[:, 0]).prod() - np.maximum(common, 0).prod()) * element_bytes(dtype)

    def _size_of(self, name: str) -> int:
        """Bytes of an element."""
        return element_bytes(self.program.types[name])

    def _of(self, i: int, row: PlacedRow) -> dict[str, int]:
        """Bytes that autograd keeps of a row, by root. Sets the roots of the row's results."""
        sets, types, bound = index_sets(row.signature, self.program.grid), self.program.row_types[i], row.bound
        derived = {k for k, _ in row.derived}
        grads = [v in self.wanted and o.gradient for v, o in zip(bound.reads, row.signature.inputs, strict=True)]
        here: list[str] = []
        first = self._size_of(bound.reads[0]) if bound.reads else 0  # some rows read nothing
        strips = {f"{i} twice": overlap_elements(row, self.program.grid, self.rank) * first}
        for k, (name, chain) in enumerate(zip(bound.reads, row.fetch, strict=True)):
            root = self.root.get(name, name)
            if chain and chain[-1].form == "rim":  # beside the value itself
                self.size[f"{i} fetched {k}"] = self._received(chain[-1], sets, types.fetch[k])
            elif self._is_fetched(i, row, k):
                root = f"{i} fetched {k}"
                self.size[root] = self._bytes(chain[-1].dst, sets, types.fetch[k])
            here.append(root)
        asked = [g and k not in derived for k, g in enumerate(grads)]
        dtypes = [(types.fetch if self._is_fetched(i, row, k) else types.reads)[k] for k in range(len(bound.reads))]
        cast = bound.autocast, self.program.autocast
        if isinstance(bound.operation, Normalise) and row.is_silent and element_bytes(dtypes[0]) < 4:
            cast = ("float32", ""), self.program.autocast or "bfloat16"  # as templates/runtime/norms.py does
        found, aliases = kept_of(bound.operation, row.way, self.parts[i], dtypes, asked, row.early, *cast)
        if between := row.between(grads):  # local code also makes the gradient of what lies within the row
            asked = [g or k in between for k, g in enumerate(asked)]
            more, aliases = kept_of(bound.operation, row.way, self.parts[i], dtypes, asked, row.early, *cast)
            found = tuple(one for one in more if one in found or one[0] != "operand" or one[1] not in derived)
        if bound.operation.convolves and any(c.form == "rim" for chain in row.fetch for c in chain):
            found = tuple(("operand", k, 0) for k in range(len(here)))  # a kernel keeps what it reads
        if self.norms.get(i) == "handed":
            aliases = {0: 0}
        kept: dict[str, int] = {}
        results: list[str] = []
        for j, (name, chain) in enumerate(zip(bound.makes, row.store, strict=True)):
            own = here[0] if i in self.overwrites else here[aliases[j]] if j in aliases else name or f"{i} result {j}"
            self.size.setdefault(own, 0)
            if moves(chain):
                own = f"{i} made {j}"
                self.size[own] = self._bytes(chain[0].src, sets, types.store[j])
            elif name:
                self.root[name] = own
            results.append(own)
        if any(grads):
            for kind, place, size in found:
                root = (
                    here[place] if kind == "operand" else results[place] if kind == "result" else f"{i} within {place}"
                )
                self.size.setdefault(root, size)
                kept[root] = self.size[root] if kind != "within" else size
                rim = f"{i} fetched {place}"
                if kind == "operand" and rim in self.size:
                    kept[rim] = self.size[rim]
            self.size |= strips
            kept |= {root: size for root, size in strips.items() if size and found}
            for name in {v for _, _, v in self._fetched_by_gradients(row) if v}:
                root = self.root.get(name, name)
                kept[root] = self.size[root]
            for k, _ in shared(row, tuple(grads)).held.values():
                kept[f"{i} fetched {k}"] = self.size[f"{i} fetched {k}"]
        return kept

    def _is_fetched(self, i: int, row: PlacedRow, k: int) -> bool:
        """Whether a row reads an operand as a tensor of its own; an interior reads the value itself."""
        types, chain = self.program.row_types[i], row.fetch[k]
        return (moves(chain) or (bool(chain) and types.fetch[k] != types.reads[k])) and not (
            k == row.early and row.split
        )

    def _fetched_by_gradients(self, row: PlacedRow) -> Iterator[tuple[PlacedRow, int, str]]:
        """What gradients' rows fetch: the row, its operand, and the stored value, "" if it is a gradient."""
        bound = row.bound
        grads = tuple(v in self.wanted and o.gradient for v, o in zip(bound.reads, row.signature.inputs, strict=True))
        others = shared(row, grads)
        values = {"operand": bound.reads, "result": bound.makes, "gradient": ("",) * len(bound.makes)}
        for k, one in row.derived:
            for n, (kind, j) in enumerate(reads_of(bound.operation, one.bound.reads)):
                if grads[k] and (k, n) not in others.held and (k, n) not in others.rows:
                    yield one, n, values[kind][j]

    def _of_gradients(self, i: int, row: PlacedRow) -> int:
        """Bytes that are fetched for the gradient's row that fetches most."""
        own = {id(one): self.program.row_types[i].of(row.signature.inputs[k].name).fetch for k, one in row.derived}
        moved = Counter[PlacedRow]()
        for one, n, _ in self._fetched_by_gradients(row):
            if moves(one.fetch[n]):
                sets = index_sets(one.signature, self.program.grid)
                moved[one] += self._bytes(one.fetch[n][-1].dst, sets, own[id(one)][n])
        return max(moved.values(), default=0)

    def _taken(self, stretch: Stretch) -> set[str]:
        """Roots of what a block that is computed again keeps: of values that other rows make and it reads."""
        rows = self.program.rows[stretch.start : stretch.stop]
        made = {v for row in rows for v in row.bound.makes}
        reads = {v for row in rows for v in row.bound.reads} - made
        return {self.root.get(v, v) for v in reads if self.program.values[v].kind in ("made", "input")}

    # ---- all of them ----

    def saved_by(self, stretch: Stretch) -> int:
        """Bytes that rows of a block keep, and that it doesn't keep where it is computed again."""
        roots = {r for i in range(stretch.start, stretch.stop) for r in self.saved[i]}
        return sum(self.size[r] for r in roots - self._taken(stretch))

    def memory(self, again: Sequence[Stretch] | None = None) -> NetworkMemory:
        """The memory of a step.

        Args:
            again: blocks that backward computes again; by default the program's.
        """
        program = self.program
        blocks = program.again if again is None else again
        self.again = {i: s for s in blocks for i in range(s.start, s.stop)}
        self.takes = {s: self._taken(s) for s in blocks}
        state = Counter[str]()
        for name, value in program.values.items():
            state[value.kind] += self.size[name]
        learnt = {n for n, v in program.values.items() if v.kind == "parameter"}
        own = {n for n, v in program.values.items() if v.kind in ("parameter", "buffer", "constant")}
        uses = Counter(r for i, kept in enumerate(self.saved) if i not in self.again for r in kept if r not in own)
        uses.update(r for taken in self.takes.values() for r in taken)
        saved = sum(self.size[r] for r in uses)
        highest = self._forward(own)
        highest = max(highest, self._backward(dict(uses), saved, own, learnt))
        gradients = sum(self.size[n] for n in learnt if n in self.wanted)
        return NetworkMemory(
            state["parameter"], gradients, gradients * self.states, state["buffer"] + state["constant"],
            saved, highest - saved,
        )  # fmt: skip

    def by_row(self) -> Iterator[tuple[int | None, str, int]]:
        """(row, what, bytes) of memory at its peak, by the row that first reads or keeps it; None: no row."""
        found, program = self.memory(), self.program
        first = {v: i for i, row in reversed([*enumerate(program.rows)]) for v in row.bound.reads}
        own = {n for n, v in program.values.items() if v.kind in ("parameter", "buffer", "constant")}
        for name in own:
            states = self.states * (program.values[name].kind == "parameter" and name in self.wanted)
            yield first.get(name), "parameters and what the optimizer keeps", self.size[name] * (1 + states)
        stays = [(i, r) for i, kept in enumerate(self.saved) if i not in self.again for r in kept if r not in own]
        stays += [(s.start, r) for s, taken in self.takes.items() for r in taken]
        for root, i in {root: i for i, root in reversed(stays)}.items():
            yield i, "saved for backward", self.size[root]
        yield None, "on its way", found.passing

    def _forward(self, own: set[str]) -> int:
        """The most bytes at a time in forward."""
        last: dict[str, int] = {}
        for i, row in enumerate(self.program.rows):
            last |= {self.root.get(v, v): i for v in row.bound.reads}
        outputs = {self.root.get(v, v) for _, v in self.program.outputs}
        held = {self.root.get(v.name, v.name) for v in self.program.values.values() if v.kind == "input"}
        live, keeps = {r: self.size[r] for r in held - own}, set[str]()
        most = 0
        for i, row in enumerate(self.program.rows):
            for root in (self.root.get(v, v) for v in row.bound.makes if v):
                if root not in own:
                    live[root] = self.size[root]
            stays = self.takes[self.again[i]] if i in self.again else self.saved[i].keys() - own
            keeps |= stays
            moving = {f"{i} {what}" for what in _moving(row)} - stays
            beside = sum(self.size.get(root, 0) for root in moving)
            beside += max(  # while the row is computed, or its operands or results move
                self._pieces(row)
                + max(self._copies(i, row, False), self._wide(i, row, False))
                + self._beside(i, row, False),
                self._repacked(row, (*row.fetch, *row.store)),
            )
            for root in stays:
                live[root] = self.size[root]
            most = max(most, sum(live.values()) + beside)
            for root in [r for r in live if r not in keeps and r not in held and r not in outputs]:
                if last.get(root, -1) <= i:
                    del live[root]
        return most

    def _backward(self, uses: dict[str, int], saved: int, own: set[str], learnt: set[str]) -> int:
        """The most bytes at a time in backward: saved tensors go, gradients come."""
        wanted, most, storage, sizes = self.wanted, 0, dict[str, str](), dict[str, int]()
        inputs = sum(self.size[n] for n, v in self.program.values.items() if v.kind == "input" and n not in uses)
        done, grad_bytes, packed, flying = set[str](), 0, packed_bytes(self.program, self.rank), 0
        several = any(self.program.grid.over(bucket.over) > 2 for bucket in self.program.buckets)
        for _, name in self.program.outputs:
            storage[name], sizes[name] = name, self.of_gradient[name]
        for i, row in reversed([*enumerate(self.program.rows)]):
            if i in self.again and i == self.again[i].stop - 1:
                for root in (r for n in range(self.again[i].start, i + 1) for r in self.saved[n].keys() - own):
                    uses[root] = uses.get(root, 0) + 1
                    saved += self.size[root] * (uses[root] == 1)
            before = saved + inputs + sum(sizes[s] for s in set(storage.values())) + grad_bytes + flying
            sets, chunks = index_sets(row.signature, self.program.grid), row.chunks.count if row.chunks else 1
            types = self.program.row_types[i]
            given = gone = made = summed = new = 0
            put = sum(self.of_gradient[v] for v in row.bound.makes if v in storage and not sizes[storage[v]]) // chunks
            for j, chain in enumerate(row.given):
                if (name := row.bound.makes[j]) in storage and moves(chain):
                    given += self._bytes(chain[-1].dst, sets, types.given[j])
                    alone = not row.derived and [*storage.values()].count(storage[name]) == 1
                    gone += sizes[storage[name]] * alone
            hands_on = row.bound.operation.hands_gradient_on or (self.norms.get(i) == "handed")
            same = hands_on and storage.get(row.bound.makes[0])
            for k, name in enumerate(row.bound.reads):
                is_left = self.norms.get(i) == "left" and name in storage
                if name not in wanted or not row.signature.inputs[k].gradient or is_left:
                    continue
                chain = tuple(row.back[k] or ())
                size, made_in = self.of_gradient[name], types.fetch[k]
                is_moved = moves(chain) and not (k == row.early and row.split)
                kinds = {made_in, types.reads[k], types.on_the_way_back(row, k)}  # it is made, cast, and travels
                kinds = kinds if name in learnt else {types.on_the_way_back(row, k)}
                read = sum(self._bytes(chain[0].src, sets, kind) for kind in kinds) if is_moved else size
                if name in learnt and not is_moved and made_in != types.reads[k]:
                    read += self._stored(name) * element_bytes(made_in)
                if name in learnt:
                    grad_bytes += size * (name not in done)
                    done.add(name)
                elif same and name not in storage and not moves(chain):
                    storage[name] = same
                    sizes[same] = sizes[same] or size  # written out, and handed on so
                    continue
                else:
                    storage[name] = f"{name} {i}"
                    sizes[storage[name]] = 0 if spreads(row.bound.operation, row.way) and not is_moved else size
                made += read if is_moved or name in learnt else sizes[storage[name]]
                summed += read * is_summed(row, k)
                new += size * (is_moved or chunks > 1)
            copied = max(self._copies(i, row, True), self._wide(i, row, True)) + self._beside(i, row, True)
            left = gone
            if not row.derived:  # nothing reads results' gradients any more when operands' move back
                others = {root for name, root in storage.items() if name not in row.bound.makes}
                left = sum(sizes[root] for root in {storage[v] for v in row.bound.makes if v in storage} - others)
            most = max(  # while results' gradients move, operands' gradients are made, and these move back
                most,
                before + given + put + max(self._repacked(row, row.given), self._of_gradients(i, row)),
                before + given - gone * (chunks == 1) + put + made // chunks + summed + copied,
                before - left + made + new + max(self._repacked(row, row.back), packed.get(i, 0)),
            )
            flying = packed.get(i, 0) * several or flying
            ends = self.takes[self.again[i]] if i in self.again and i == self.again[i].start else ()
            for root in (*(self.saved[i].keys() - own), *ends):
                uses[root] -= 1
                saved -= self.size[root] * (uses[root] == 0)
            for name in row.bound.makes:
                storage.pop(name, None)
        return most

    def _repacked(self, row: PlacedRow, chains: Sequence[Chain | None]) -> int:
        """Bytes packed while these conversions move, one after the other; of a row in chunks those of one chunk."""
        sets, names = index_sets(row.signature, self.program.grid), (*row.bound.reads, *row.bound.makes)
        size = max(self._size_of(v) for v in names if v)
        most = max((repacked(c, sets, self.rank) for chain in chains for c in chain or ()), default=0)
        return most * size // (row.chunks.count if row.chunks else 1)

    def _pieces(self, row: PlacedRow) -> int:
        """Bytes that a row's pieces take while they are put together."""
        if not is_in_pieces(row):
            return 0
        dtype = next(self.program.types[v] for v in row.bound.makes if v)
        return result_elements(row, self.program.grid, self.rank) * element_bytes(dtype)

    def _wide(self, i: int, row: PlacedRow, backward: bool) -> int:
        """Bytes that moments of a narrow type cast: x; and in a batch norm's gradient x, dy and the sum."""
        types = self.program.row_types[i]
        if row.signature.reduction != "merge" or not any(row.store):
            return 0
        wide = element_bytes(types.store[0])
        if wide == element_bytes(types.fetch[0]):
            return 0
        times = 1 if not backward else 3 if row.bound.norm else 0
        return max(prod(part.reads[0]) for part in self.parts[i]) * wide * times

    def _beside(self, i: int, row: PlacedRow, backward: bool) -> int:
        """Bytes of a convolution's gradient with zeros beside it, or cast, from which its operand's is taken; or of a
        narrow norm in one call its wide result, or dy and the gradient of x."""
        if self.norms.get(i) == "made" and element_bytes(self.program.row_types[i].fetch[0]) < 4:
            return prod(self.parts[i][0].reads[0]) * 4 * (1 + backward)
        if backward and isinstance(row.bound.operation, Fused):
            return self._within(row.bound.operation, i)
        if not backward or row.bound.operation.convolves is None or row.bound.reads[0] not in self.wanted:
            return 0
        return max((self.size[root] for root in self.saved[i] if root.startswith(f"{i} within")), default=0)

    def _within(self, operation: Fused, i: int) -> int:
        """Bytes of gradients between the parts of a wide row, of which backward holds at once those of what a part
        makes and of what it reads."""
        if operation.kernel_steps[0] or operation.chain is not None:  # a kernel makes what is between
            return 0
        most = 0
        for part in self.parts[i]:
            reads = [(here.inside, link.sources) for link, here in operation.standing_parts(part.at)]
            sizes = [prod(hi - lo for lo, hi in boxes[of.index(MADE)]) for boxes, of in reads if MADE in of]
            most = max(most, *(sum(both) for both in pairwise([0, *sizes, 0])))
        return most * element_bytes(self.program.row_types[i].local)

    def _copies(self, i: int, row: PlacedRow, backward: bool) -> int:
        """Bytes that a convolution copies; in pieces, also parts of its operand and of dy that are no whole blocks."""
        bound, types = row.bound, self.program.row_types[i]
        if bound.operation.convolves is None:
            return 0
        if backward and not any(v in self.wanted for v in bound.reads):
            return 0
        size, most = element_bytes(types.local), 0
        of_x = bound.reads[0] in self.wanted if backward else None
        for part in self.parts[i]:
            (x, w, *_), y = part.reads, tuple(made_here(part.at, row.signature.results[0]))
            taken = (columns if size == 8 else copies)(bound.operation, x, y, w, of_x)
            most = max(most, taken + part.gaps[0] * prod(x) + (backward and part.gaps[1]) * prod(y))
        for _, one in row.derived if backward and size == 8 else ():
            for part in parts_of(one, self.program.grid, self.rank):
                (first, *_), (_, second, *_) = part.at.windows, part.reads
                read = tuple(hi - lo for lo, hi in first)
                made = tuple(made_here(part.at, one.signature.results[0]))
                most = max(most, columns_of_row(one.bound.operation, read, second, made))
        return most * size


def _moving(row: PlacedRow) -> list[str]:
    fetched = [f"fetched {k}" for k, chain in enumerate(row.fetch) if moves(chain)]
    return fetched + [f"made {j}" for j, chain in enumerate(row.store) if moves(chain)]


def moves(chain: Chain) -> bool:
    """Whether a chain makes a tensor of its own: all but slices, which are views."""
    return any(c.kind != "slice" for c in chain)
