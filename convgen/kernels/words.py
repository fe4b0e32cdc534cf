"""The words that kernel templates share: coordinates, addresses and masks of one problem, as Triton text.

Names in every kernel: n sample; xh, xw rows of x; yh, yw rows of y; kh, kw taps; c channel and f filter of a group
and part; XH, YH, ... the extents that this rank holds; pad_h zero rows below x; x_part, y_part: which part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from convgen.kernels import epilogues
from convgen.kernels.config import Config
from convgen.kernels.index import IndexMap, activation_map, filter_map
from convgen.kernels.moments import moment_lines
from convgen.kernels.problem import Problem
from convgen.kernels.prologues import prologue_lines
from convgen.kernels.sharing import adds_last, bunches, second_sum
from convgen.kernels.sharing_words import Shared
from convgen.operations.layer import VALUE_MADE


@dataclass(frozen=True, slots=True)
class DimWords:
    """One spatial dimension: names of its coordinates, and its numbers."""

    letter: str
    taps: int
    stride: int
    dilation: int

    @property
    def x(self) -> str:
        return f"x{self.letter}"

    @property
    def y(self) -> str:
        return f"y{self.letter}"

    @property
    def k(self) -> str:
        return f"k{self.letter}"

    @property
    def pad(self) -> str:
        return f"pad_{self.letter}"


def times(name: str, factor: int) -> str:
    return name if factor == 1 else f"{name} * {factor}"


def constant(names: str) -> str:
    """Parameters whose values are known where a kernel is compiled: XH, XW."""
    return ", ".join(f"{name}: tl.constexpr" for name in names.split(", "))


CHANNEL = {"x": "c", "y": "f"}


class Words:
    """Text for the kernels of a problem."""

    def __init__(
        self,
        problem: Problem,
        *,
        float32: str = "tf32x3",
        tf32: str = "tf32",
        even: Collection[str] = (),
        aligned: tuple[int, int] = (1, 1),
        single_channels: bool = False,
        grouped: bool = False,
        rows: tuple[int, int] = (1, 1),
        rims: int = 0,
        multiplies: bool = True,
        open: bool = False,
        entry: str = "",
        alike: bool = True,
    ) -> None:
        """
        Args:
            float32: how float32's products are made: an `input_precision` of tl.dot; tf32: how tfloat32's are.
            even: of "c" and "f" those whose tiles divide their extent on every rank, so that no mask is needed.
            aligned: the numbers of elements at multiples of which a pixel of x, and of y, begins on every rank.
            rows: the numbers of elements of which a sample's rows of x, and of y, are a multiple where they lie side by
                side.
            grouped: whether some rank has more than one group.
            rims: the number of boxes of the rim on the rank that has most.
            single_channels: whether groups have one channel, and channels are numbered through all groups.
            multiplies: whether the target has matrix products of the problem's type; else products are made as sums.
            open: whether extents are arguments, unknown when a kernel is compiled; else they are constants.
            entry: name of the function that launches, if not the phase's.
            alike: whether all ranks have as many channels and filters.
        """
        self.problem, self.float32, self.tf32, self.even = problem, float32, tf32, frozenset(even)
        self.aligned = dict(zip("xy", aligned, strict=True))
        self.dims = tuple(DimWords(d.name.lower(), d.kernel, d.stride, d.dilation) for d in problem.dims)
        self.last = problem.channels_last
        self.rows_aligned = dict(zip("xy", rows, strict=True))
        self.row_vector = rows[1]
        self.single_channels, self.rims, self.multiplies = single_channels, rims, multiplies
        self.grouped = grouped or problem.groups > 1 or single_channels
        self.result = VALUE_MADE[problem.phase]
        self.open, self.named, self.alike = open, entry, alike

    def pointer(self, tensor: str) -> str:
        """The name of the activation: backward reads dy."""
        return "dy" if tensor == "y" and self.problem.phase != "forward" else tensor

    # ---- what stands around a kernel's body ----

    @property
    def entry(self) -> str:
        """The function that launches the kernel."""
        return self.named or self.problem.phase

    @property
    def jit(self) -> str:
        """The decorator. It keeps Triton from compiling an open kernel anew for extents of 1 and for multiples of
        16."""
        return "@triton.jit(do_not_specialize=EXTENTS)" if self.open else "@triton.jit"

    def extent(self, names: str) -> str:
        """Parameters that are extents, or follow from them."""
        return names if self.open else constant(names)

    def adds_last(self, config: Config) -> bool:
        """Whether the last program of a tile of a filter gradient adds its pieces."""
        return adds_last(self.problem, config)

    def counters(self, config: Config) -> int:
        """The number of counters of a tile whose programs count who comes last."""
        _, many = bunches(config.split)
        return 1 + many if many > 1 else 1

    @staticmethod
    def shared(tile: str, piece: str, count: int, rows: str, columns: str, sums: Sequence[str]) -> Shared:
        """Lines of programs that share a tile."""
        return Shared(tile, piece, count, rows, columns, sums)

    def second_sum(self, config: Config) -> int:
        """Pieces of a filter gradient that a second launch adds; 1 where there is none."""
        return second_sum(self.problem, config)

    def tensors(self, split: int) -> list[str]:
        """The phase's tensors, in the order of the arguments; a second launch adds the `split` pieces of a filter
        gradient."""
        behind = [*(["bias"] if self.problem.bias else []), *epilogues.tensors(self.problem.epilogue)]
        return {
            "forward": ["x", "w", *behind, "y"],
            "backward_data": ["dy", "w", *behind, "dx"],
            "backward_filter": ["dy", "x", "dw" if split == 1 else "sums"],
        }[self.problem.phase]

    def arguments(self, *tensors: str | bool) -> str:
        """Parameters: tensors, samples, then this rank's rows and padding. Where these are constants, divisions by them
        become products."""
        words = [t for t in tensors if isinstance(t, str) and t]
        words += ["rim", "boxes"] if self.problem.rim is not None else []
        words += ["N", self.extent(f"{self.extents('x')}, {self.extents('y')}, {self.pads}")]
        words += ["groups"] if self.grouped else []
        if self.problem.rim is not None:
            words += [self.extent(f"own_{d.letter}, OWN_{d.letter.upper()}") for d in self.dims]
        words += [constant("KEEP")] if self.keeps else []
        return ", ".join(words) + ","

    @property
    def keeps(self) -> bool:
        """Whether the sum itself may be written, too."""
        return epilogues.keeps(self.problem.epilogue)

    @property
    def passed(self) -> str:
        """The launch's arguments after the tensors."""
        words = ["rim.buffer, rim.boxes"] if self.problem.rim is not None else []
        words += ["s.n, *s.x, *s.y, *s.below"]
        words += ["s.groups"] if self.grouped else []
        words += ["*rim.own"] if self.problem.rim is not None else []
        words += ["before is not y"] if self.keeps else []
        return ", ".join(words) + ","

    def constants(self, config: Config) -> str:
        words = ["BOXES=len(rim.boxes)"] if self.problem.rim is not None else []
        words += [f"{name}={extent}" for name, extent in config.tiles]
        return ", ".join([*words, f"num_warps={config.warps}, num_stages={config.stages}"])

    @property
    def boxes(self) -> str:
        """Parameter that says how many boxes the rim has."""
        return " BOXES: tl.constexpr," if self.problem.rim is not None else ""

    @property
    def formula(self) -> str:
        """What the phase computes ([CF] Eqs. 1-3), with this layer's strides and dilations."""
        rows, outs, taps = (", ".join(getattr(d, side) for d in self.dims) for side in ("x", "y", "k"))
        x, y, w = f"x[n, c, {rows}]", f"y[n, f, {outs}]", f"w[f, c, {taps}]"
        head = {
            "forward": f"{y} = sum over c, {taps} of {x} {w}",
            "backward_data": f"d{x} = sum over f, {taps} of d{y} {w}",
            "backward_filter": f"d{w} = sum over n, {outs} of d{y} {x}",
        }[self.problem.phase]
        return f"{head}, {self.x_rows(all_taps=True)}"

    @property
    def orders(self) -> str:
        """Memory orders of the operands."""
        rows = " ".join(d.letter.upper() for d in self.dims)
        kernel = " ".join(f"K{d.letter}" for d in self.dims)

        def order(tensor: str, c: str) -> str:
            head = f"{self.parts(tensor)} parts of " if self.parts(tensor) > 1 else ""
            return f"{tensor} {head}" + (f"N {rows} {c}" if self.last else f"N {c} {rows}")

        w = f"w F {kernel} C" if self.last else f"w F C {kernel}"
        return f"In memory: {order('x', 'C')}, {order('y', 'F')}, {w}"

    def extents(self, side: str) -> str:
        """XH, XW"""
        return ", ".join(getattr(d, side).upper() for d in self.dims)

    @property
    def pads(self) -> str:
        """pad_h, pad_w"""
        return ", ".join(d.pad for d in self.dims)

    def pixels(self, side: str) -> str:
        """The number of pixels of a sample: XH * XW, or a name for it where it is a multiple of what is read at
        once."""
        if self.rows_aligned[side] > 1:
            return f"{side.upper()}P"
        return " * ".join(getattr(d, side).upper() for d in self.dims)

    def sample_rows(self, *sides: str) -> list[str]:
        """Lines that name the number of pixels of a sample and tell the compiler what it is a multiple of."""
        lines: list[str] = []
        for side in sides:
            if (n := self.rows_aligned[side]) > 1:
                rows = " * ".join(getattr(d, side).upper() for d in self.dims)
                lines.append(f"{side.upper()}P = {rows} // {n} * {n}")
        return lines

    # ---- the loop over what is summed: taps, parts, channels ----

    def parts(self, tensor: str) -> int:
        return self.problem.x_parts if tensor == "x" else self.problem.y_parts

    def steps(self, tensor: str, taps: str = "") -> str:
        """The number of steps of the loop; `taps` is the number of taps, where it isn't all of them."""
        factors = [taps or str(self.problem.taps)] if taps or self.problem.taps > 1 else []
        factors += [str(self.parts(tensor))] if self.parts(tensor) > 1 else []
        return " * ".join([*factors, "chunks"])

    def step_coordinates(self, tensor: str, *, tapped: bool) -> list[str]:
        """Tap, part, and channels (filters of y) of a step."""
        v = CHANNEL[tensor]
        tile, parts = f"B{v.upper()}", self.parts(tensor)
        lines: list[str] = []
        if tapped:
            lines.append(f"tap = step // (chunks * {parts})" if parts > 1 else "tap = step // chunks")
        if parts > 1:
            inner = f"step // chunks % {parts}" if tapped else "step // chunks"
            lines.append(f"{tensor}_part = tl.cast({inner}, tl.int64)")
        number = "step % chunks" if tapped or parts > 1 else "step"
        if tensor == "y" or not self.last:  # times C and the taps, or times rows, it may pass 2**31
            number = f"tl.cast({number}, tl.int64)"
        elif " " in number:
            number = f"({number})"
        return [*lines, f"{v} = {number} * {tile} + tl.arange(0, {tile})"]

    # ---- coordinates ----

    def decode(self, number: str, side: str) -> str:
        """n, yh, yw of a pixel number."""
        return self.split(number, [getattr(d, side) for d in self.dims], self.pixels(side))

    @staticmethod
    def split(number: str, names: Sequence[str], pixels: str = "") -> str:
        extents = [n.upper() for n in names]
        pixels = pixels or " * ".join(extents)
        parts = [f"({number} // {f'({pixels})' if ' ' in pixels else pixels}).to(tl.int64)"]
        for i, extent in enumerate(extents):
            inner = "".join(f" // {e}" for e in extents[:i:-1])
            parts.append(f"{number}{inner} % {extent}")
        return f"n, {', '.join(names)} = {', '.join(parts)}"

    @cached_property
    def tapped(self) -> tuple[DimWords, ...]:
        """Dimensions with more than one tap."""
        return tuple(d for d in self.dims if d.taps > 1)

    @cached_property
    def taps(self) -> str:
        """kh, kw of a tap number."""
        parts: list[str] = []
        for i, d in enumerate(self.tapped):
            inner = 1
            for e in self.tapped[i + 1 :]:
                inner *= e.taps
            text = f"tap // {inner}" if inner > 1 else "tap"
            parts.append(f"{text} % {d.taps}" if i else text)
        return f"{', '.join(d.k for d in self.tapped)} = {', '.join(parts)}"

    def x_rows(self, *, all_taps: bool = False) -> str:
        """Rows of x that the taps of rows yh, yw read."""
        texts: list[str] = []
        for d in self.dims:
            tap = f" + {times(d.k, d.dilation)}" if d.taps > 1 or all_taps else ""
            texts.append(f"{times(d.y, d.stride)} - {d.pad}{tap}")
        return f"{', '.join(d.x for d in self.dims)} = {', '.join(texts)}"

    def y_rows(self) -> str:
        """Rows of y whose taps read rows xh, xw of x, for strides of 1."""
        texts = [f"{d.x} + {d.pad}" + (f" - {times(d.k, d.dilation)}" if d.taps > 1 else "") for d in self.dims]
        return f"{', '.join(d.y for d in self.dims)} = {', '.join(texts)}"

    def inside(self, side: str) -> str:
        """The condition that rows lie in the operand."""
        names = [getattr(d, side) for d in self.dims]
        return " & ".join(f"({n} >= 0) & ({n} < {n.upper()})" for n in names)

    # ---- tiles: channels last, pixels are the product's rows; else its columns, as they lie in memory ----

    def along(self, vector: str) -> str:
        return f"{vector}[:, None]" if self.last else f"{vector}[None, :]"

    def across(self, vector: str) -> str:
        return f"{vector}[None, :]" if self.last else f"{vector}[:, None]"

    def tile(self, pixels: str, channels: str) -> str:
        return f"({pixels}, {channels})" if self.last else f"({channels}, {pixels})"

    def dot(self, activation: str, weights: str) -> str:
        """acc plus the product of a tile of activations and one of weights."""
        return self._product(*((activation, weights) if self.last else (weights, activation)))

    def outer(self, dy: str, x: str) -> str:
        """acc plus the product of a tile of dy and one of x, summed over pixels."""
        return self._product(*((f"tl.trans({dy})", x) if self.last else (dy, f"tl.trans({x})")))

    def _product(self, first: str, second: str) -> str:
        if not self.multiplies:
            return f"acc += tl.sum({first}[:, :, None] * {second}[None, :, :], 1)"
        return f"acc = tl.dot({self.operand(first)}, {self.operand(second)}, acc{self.precision})"

    # ---- number types ----

    @property
    def wide(self) -> str:
        return "tl.float64" if self.problem.dtype == "float64" else "tl.float32"

    @property
    def precision(self) -> str:
        """How float32 products are made; the half types have one way."""
        if self.problem.dtype == "float64":
            return ", out_dtype=tl.float64"
        way = {"float32": self.float32, "tfloat32": self.tf32}.get(self.problem.dtype)
        return f', input_precision="{way}"' if way else ""

    def operand(self, text: str) -> str:
        """A loaded tile as an operand of a product: tfloat32 rounds, where the hardware would cut."""
        return f"nearest_tf32({text})" if self.problem.dtype == "tfloat32" else text

    # ---- addresses ----

    def channels(self, tensor: str) -> str:
        name = CHANNEL[tensor].upper()
        if self.single_channels:
            return "groups" if tensor == "x" else "F * groups"
        return f"{name} * groups" if self.grouped else name

    def activation(self, tensor: str) -> IndexMap:
        letters = [d.letter for d in self.dims]
        parts = self.parts(tensor) > 1
        return activation_map(letters, tensor, self.channels(tensor), last=self.last, parts=parts)

    def row(self, tensor: str) -> str:
        """The address of channel 0 of the pixel of sample n and the rows."""
        return self.activation(tensor).text(n="n", **{getattr(d, tensor): getattr(d, tensor) for d in self.dims})

    def channel(self, tensor: str) -> str:
        """The distance from a pixel's channel 0 to channel c of x, or filter f of y, of a group."""
        v = CHANNEL[tensor]
        text = self._rows_together(tensor).text(c=f"group * {v.upper()} + {v}" if self.grouped else v)
        return text if text.isidentifier() else f"({text})"

    def part(self, tensor: str) -> str:
        """The address at which the operand's part at work begins."""
        return " + " + self._rows_together(tensor).text(part=f"{tensor}_part") if self.parts(tensor) > 1 else ""

    def _rows_together(self, tensor: str) -> IndexMap:
        """The operand with the rows of a sample as one coordinate, where they have a name."""
        if self.rows_aligned[tensor] == 1:
            return self.activation(tensor)
        parts = [("part", "PARTS")] if self.parts(tensor) > 1 else []
        return IndexMap((*parts, ("n", "N"), ("c", self.channels(tensor)), ("rows", self.pixels(tensor))))

    @property
    def filter_index(self) -> str:
        """The number of filter f among all of w's."""
        return "group * F + f" if self.grouped else "y_part * F + f" if self.problem.y_parts > 1 else "f"

    def weight(self) -> tuple[str, str]:
        """The distance from w's start to filter f, and from there to channel c of the tap."""
        kernel = tuple(d.taps for d in self.dims)
        m = filter_map([d.letter for d in self.dims], times("C", self.problem.x_parts), kernel, last=self.last)
        c = "x_part * C + c" if self.problem.x_parts > 1 else "c"
        text = m.text(c=c, **{d.k: d.k for d in self.tapped})
        return m.text(f=self.filter_index), text if text.isidentifier() else f"({text})"

    def find_rows(self, tensor: str) -> list[str]:
        """Lines that find where each pixel of a tile begins that is read; pixels of the padding stay at the start,
        unread."""
        if self.problem.rim is not None:
            return self._find_rows_in_boxes(tensor)
        offset = self.hinted(f"tl.where(inside, {self.row(tensor)}, 0)", tensor)
        return [f"{tensor}_row = {self.pointer(tensor)} + {offset}"]

    def _find_rows_in_boxes(self, tensor: str) -> list[str]:
        """Lines that find pixels where rows outside the rank's own block lie in boxes, one behind the other."""
        letters, rows = [d.letter for d in self.dims], [getattr(d, tensor) for d in self.dims]
        pairs, width = list(zip(rows, letters, strict=True)), 1 + 2 * len(letters)

        def begins(box: str) -> str:
            names = [(f"at_{a}", f"{box.upper()}_{a.upper()}") for a in letters]
            channels = ("c", self.channels(tensor))
            m = IndexMap((("n", "N"), *((*names, channels) if self.last else (channels, *names))))
            at = {f"at_{a}": f"{r} - {box}_{a}" for r, a in pairs}
            return m.text(n="n", **at)

        def within(box: str) -> str:
            return " & ".join(f"({r} >= {box}_{a}) & ({r} < {box}_{a} + {box.upper()}_{a.upper()})" for r, a in pairs)

        def rows_of(box: str) -> str:
            return " * ".join(f"{box}_{a.upper()}" for a in letters)

        row, step = f"{tensor}_row", f"{tensor}_step"
        lines = [
            "# In the rank's own block, or in a box of the rim: both lie somewhere in the window that is read.",
            f"own = inside & {within('own')}",
            f"{row} = {self.pointer(tensor)} + tl.where(own, {begins('own')}, 0)",
        ]
        lines += [] if self.last else [f"{step} = tl.where(own, n * 0 + {rows_of('OWN')}, 0)"]
        body = [f"box = boxes + {times('i', width)}"]
        for k, a in enumerate(letters):
            body.append(f"box_{a}, BOX_{a.upper()} = tl.load(box + {1 + k}), tl.load(box + {1 + len(letters) + k})")
        body.append(f"there = inside & {within('box')}")
        body.append(f"{row} = tl.where(there, rim + tl.load(box) + {begins('box')}, {row})")
        body += [] if self.last else [f"{step} = tl.where(there, {rows_of('BOX')}, {step})"]
        lines += ["for i in tl.static_range(BOXES):", *(f"    {line}" for line in body)]
        hint = self.aligned[tensor] * self.problem.element_bytes
        return [*lines, f"{row} = tl.multiple_of({row}, {hint})"] if hint > self.problem.element_bytes else lines

    def hinted(self, offset: str, tensor: str) -> str:
        vector = self.aligned[tensor]
        return f"tl.multiple_of({offset}, {vector})" if vector > 1 else offset

    def dense(self, tensor: str) -> str:
        """The addresses of pixels that are numbered through; they lie side by side within a sample where channels are
        not last."""
        vector = self.rows_aligned[tensor]
        if vector > 1:
            return f"tl.max_contiguous(tl.multiple_of({self.row(tensor)}, {vector}), {vector})"
        return self.hinted(self.row(tensor), tensor)

    def element(self, tensor: str, *, rim: bool = True) -> str:
        """Pointers to the tile of an activation that a step reads."""
        row = self.along(f"{tensor}_row")
        if self.problem.rim is not None and not self.last and rim:
            v = CHANNEL[tensor]
            v = f"(group * {v.upper()} + {v})" if self.grouped else v
            return f"{row} + {self.across(v)} * {self.along(f'{tensor}_step')}"
        return f"{row} + {self.across(self.channel(tensor))}{self.part(tensor)}"

    # ---- masks ----

    def mask(self, pixels: str, v: str) -> str:
        """The mask of a tile's elements that exist: of pixels, and of channels where tiles don't divide them."""
        along = self.along(pixels)
        return along if v in self.even else f"{along} & {self.across(f'({v} < {v.upper()})')}"

    def weight_mask(self, summed: str) -> str:
        """The mask of a tile of w, whose rows are the summed dimension."""
        kept = "f" if summed == "c" else "c"
        parts = [] if summed in self.even else [self.along(f"({summed} < {summed.upper()})")]
        parts += [] if kept in self.even else [self.across(f"({kept} < {kept.upper()})")]
        return f", mask={' & '.join(parts)}, other=0.0" if parts else ""

    def store(self, tensor: str, row: str) -> str:
        """Write a tile of the result: the pixels that are `made`; `row` says where they begin."""
        mask = self.mask("made", CHANNEL[tensor])
        place = self.place(tensor, row)
        return f"tl.store({self.result} + {place}, acc.to({self.result}.dtype.element_ty), mask={mask})"

    def place(self, tensor: str, row: str) -> str:
        """The addresses of the elements of a tile of the result; `row` says where its pixels begin."""
        return f"{self.along(f'({row})')} + {self.across(self.channel(tensor))}{self.part(tensor)}"

    def moments(self, there: str, filters: str, kind: str) -> list[str]:
        """Lines that make moments of a tile of y."""
        return moment_lines(there, filters, kind, self.wide)

    @property
    def before(self) -> list[str]:
        """Names of the arguments of the prologue."""
        return [] if self.problem.before is None else self.problem.before.tensors

    def prologue(self, tensor: str, place: str, mask: str) -> list[str]:
        """Lines of the prologue of a tile `a` that is read; the programs of the first tile of columns also write it.

        Args:
            tensor: x or y, whose tile it is; `place`: its elements' addresses; `mask`: which of them exist.
        """
        before, v = self.problem.before, CHANNEL[tensor]
        if before is None:
            return []
        known = "" if v in self.even else f", mask={v} < {v.upper()}, other=1.0"
        load: Callable[[str], str] = lambda name: f"tl.load({name} + {place}, mask={mask}, other=0.0)"  # noqa: E731
        lines = prologue_lines(before, v, known, self.wide, self.across, load)
        return [*lines, "if tile == 0:", f"    tl.store(made + {place}, a, mask={mask})"]

    def epilogue(self, place: str, mask: str, filters: str = "", kept: str = "") -> list[str]:
        """Lines of the epilogue of a tile that is made.

        Args:
            place: its elements' addresses; `mask`: which of them exist.
            filters: numbers of its filters among all; `kept`: which of them exist, where filters are the tile's rows.
        """
        there = kept or ("" if "f" in self.even else "f < F")
        known = f", mask={there}, other=0.0" if there else ""

        def element(name: str) -> str:
            return f"tl.load({name} + {place}, mask={mask}, other=0.0).to({self.wide})"

        def vector(name: str, number: int) -> str:
            start = f"{number} * ({self.channels('y')}) + " if number else ""
            at = f"{name} + {start}{filters or self.filter_index}"
            loaded = f"tl.load({at}{known}).to({self.wide})"
            return loaded if kept else self.across(loaded)

        keep = f"tl.store(before + {place}, acc.to(before.dtype.element_ty), mask={mask})"
        return epilogues.lines(self.problem.epilogue, element, vector, keep)
