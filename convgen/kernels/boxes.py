"""The words of the templates by boxes."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd, prod

from convgen.kernels import epilogues
from convgen.kernels.box_tiles import (
    filter_tiles,
    has_part,
    is_paired,
    is_turned,
    lies_flat,
    parts_together,
    pieces,
    taps_together,
    tile_pixels,
)
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.moments import moment_lines_by_sample
from convgen.kernels.phases import PhaseWords
from convgen.kernels.words import CHANNEL, DimWords, Words, constant, times


def _within(outer: str, extent: int | str, inner: str) -> str:
    """The number of the element that is `inner` of `extent` within `outer`."""
    if outer == "0":
        return inner
    return f"{f'({outer})' if ' ' in outer else outer} * {extent} + {inner}"


def _transposed(text: str) -> str:
    return text.removesuffix(".T") if text.endswith(".T") else f"{text}.T"


class BoxWords(PhaseWords):
    """Words for boxes of memory, which their corners name; parts of an operand follow each other as samples do."""

    sums_kept = False  # whether a filter gradient's pieces are left to a launch behind, which adds them

    @property
    def by_pointers(self) -> Words | None:
        """The words that say where each element of the result lies; None where it is copied as a box."""
        return self if self.by_phase else None

    def weight_made(self) -> tuple[str, str]:
        """The distance from the start of w's gradient to filter f, and from there to channel c of the tap."""
        return self.weight()

    @property
    def by_phase(self) -> bool:
        """Whether the phase is backward-data with a stride."""
        return self.problem.phase == "backward_data" and bool(self.strided)

    def is_turned(self, config: Config) -> bool:
        return is_turned(self.problem, config)

    def product(self, config: Config, first: str, second: str) -> str:
        """The text of acc plus a product; its factors are exchanged where the product is turned."""
        if self.is_turned(config):
            first, second = _transposed(second), _transposed(first)
        return f"acc = tl.dot({self.operand(first)}, {self.operand(second)}, acc{self.precision})"

    def pieces(self, config: Config) -> int:
        return pieces(self.problem, config)

    @property
    def tells_steps(self) -> bool:
        """Whether loops are told that they have a step. If one may have none, its sums may still be zeros behind it;
        ptxas takes these for writes between matrix instructions, of which each then waits for the one before (C7515).
        A halo's parts may have no box; kernels of float32 issued more instructions where they were told."""
        return self.problem.rim is None and self.problem.element_bytes == 2

    def pieces_have_steps(self, config: Config) -> bool:
        """Whether each piece of a tile of y, or of x's gradient, has a step on every rank, and may be told so: where
        extents are arguments, loops that were told spilled."""
        p, v = self.problem, CHANNEL[self.read].upper()
        chunks = ceil_div(p.filters if v == "F" else p.channels, config.tile[f"B{v}"])
        return self.alike and not self.open and p.taps * self.parts(self.read) * chunks >= pieces(p, config)

    def tile_elements(self, config: Config) -> int:
        return tile_pixels(self.problem, config) * config.tile["BC" if self.read == "y" else "BF"]

    def taps_together(self, config: Config) -> int:
        return taps_together(self.problem, config)

    def parts_together(self, config: Config) -> int:
        return parts_together(self.problem, config)

    def merged_tiles(self, config: Config) -> int:
        """The number of tiles of filters, where a tile has filters of several parts."""
        return filter_tiles(self.problem, config)

    def together(self, taps: int) -> list[DimWords]:
        """The last dimensions that have so many taps together."""
        found = list[DimWords]()
        for d in reversed(self.tapped):
            if prod(e.taps for e in found) < taps:
                found.insert(0, d)
        return found

    def tap_lines(self, tap: int, together: int) -> list[str]:
        """kh, kw of one of the taps that a program makes together."""
        lines: list[str] = []
        for d in reversed(self.together(together)):
            tap, k = divmod(tap, d.taps)
            lines.insert(0, f"{d.k} = {k}")
        return lines

    def program_tap(self, together: int) -> str:
        """kh, kw of a program of a filter gradient that makes one tap, or all of the last dimensions."""
        if together == 1:
            return self.taps
        outer = self.tapped[: len(self.tapped) - len(self.together(together))]
        parts: list[str] = []
        for i, d in enumerate(outer):
            inner = prod(e.taps for e in outer[i + 1 :])
            parts.append("tap" + (f" // {inner}" if inner > 1 else "") + (f" % {d.taps}" if i else ""))
        return f"{', '.join(d.k for d in outer)} = {', '.join(parts)}"

    @property
    def reads_pairs(self) -> bool:
        """Whether pairs of x's last rows are read as twice the channels."""
        return self.problem.phase != "backward_data" and is_paired(self.problem.dims[-1])

    def has_part(self, tensor: str) -> bool:
        return has_part(self.problem, tensor)

    def constants(self, config: Config) -> str:
        words = [f"{name}={extent}" for name, extent in config.tiles]
        return ", ".join([*words, f"num_warps={config.warps}, num_stages={config.stages}"])

    @property
    def read(self) -> str:
        """The activation that may have a halo: x, but y in backward-data."""
        return "y" if self.problem.phase == "backward_data" else "x"

    def box_arguments(self, config: Config) -> str:
        """Parameters before the constants that every kernel has."""
        made = "x" if self.read == "y" else "y"
        words, extents = self.tensors(self.second_sum(config)), [self.extent(f"{self.extents(made)}, {self.pads}")]
        if self.problem.rim is not None:
            words.insert(words.index(self.pointer(self.read)) + 1, ", ".join(self.blocks[1:]))
            extents.append(self.extent(self.extents(self.read)))
            extents += [
                self.extent(f"{b}_{d.letter}, {b.upper()}_{d.letter.upper()}") for b in self.rows for d in self.dims
            ]
        extents += [constant("KEEP")] if self.keeps else []
        return ", ".join([w for w in words if w] + ["N", *extents, *([self.shifts] if self.by_phase else [])]) + ","

    @property
    def box_passed(self) -> str:
        """The launch's arguments after the tensors."""
        made = "x" if self.read == "y" else "y"
        words = [f"s.n, *s.{made}, *s.below", *([self.passed_shifts] if self.by_phase else [])]
        words += [f"*s.{self.read}, *places"] if self.problem.rim is not None else []
        words += ["before is not y"] if self.keeps else []
        return ", ".join(words) + ","

    @property
    def blocks(self) -> list[str]:
        """Names of what rows are read from: the tensor, or the rank's own block and the boxes around it."""
        rims = range(self.rims) if self.problem.rim is not None else ()
        return [self.pointer(self.read), *(f"rim{i}" for i in rims)]

    @property
    def rows(self) -> list[str]:
        """Names of the first rows of each of these blocks, and in capitals of their numbers of rows."""
        return ["own", *self.blocks[1:]]

    def there(self, block: str) -> str:
        """The condition that a rank has such a block."""
        rows = self.rows[self.blocks.index(block)].upper()
        return " * ".join(f"{rows}_{d.letter.upper()}" for d in self.dims) + " > 0"

    def block_taps(self, block: str) -> list[str]:
        """Lines that find the first tap, and the number of taps, that read a row of a block for a box of pixels; all
        taps, where the block has all rows."""
        lines: list[str] = []
        for d, (corner, _, tile) in zip(self.dims, self.corner, strict=True):
            if d.taps == 1:
                continue
            lo, n, whole = self._block_rows(block, d)
            if self.read == "x":
                first, last = f"{lo} + {d.pad} - {corner} - {tile} + 1", f"{lo} + {n} - 1 + {d.pad} - {corner}"
            else:
                first, last = f"{corner} + {d.pad} - {lo} - {n} + 1", f"{corner} + {tile} - 1 + {d.pad} - {lo}"
            if d.dilation > 1:
                first, last = f"({first} + {d.dilation - 1}) // {d.dilation}", f"({last}) // {d.dilation}"
            lines.append(f"first_{d.k} = 0 if {whole} else tl.maximum({first}, 0)")
            count = f"tl.maximum(tl.minimum({last} + 1, {d.taps}) - first_{d.k}, 0)"
            lines.append(f"taps_{d.letter} = {d.taps} if {whole} else {count}")
        return lines

    def block_boxes(self, block: str, together: int) -> list[str]:
        """Lines that find the first row and the number of the boxes of y whose tap, or any of the taps made together,
        reads a block."""
        lines: list[str] = []
        for d, (corner, extent, tile) in zip(self.dims, self.corner, strict=True):
            lo, n, whole = self._block_rows(block, d)
            begin = f"{lo} + {d.pad}" + (f" - {times(d.k, d.dilation)}" if d.taps > 1 else "")
            end = f"{begin} + {n}"
            if d in self.together(together):
                begin, end = f"{lo} + {d.pad} - {(d.taps - 1) * d.dilation}", f"{lo} + {d.pad} + {n}"
            lines.append(f"first_{corner} = 0 if {whole} else tl.maximum({begin}, 0)")
            rows = f"tl.maximum(tl.minimum({end}, {extent}) - first_{corner}, 0)"
            lines.append(f"count_{d.letter} = tl.cdiv({extent} if {whole} else {rows}, {tile})")
        return [*lines, "boxes = tl.cdiv(N, TN) * " + " * ".join(f"count_{d.letter}" for d in self.dims)]

    def _block_rows(self, block: str, d: DimWords) -> tuple[str, str, str]:
        rows = self.rows[self.blocks.index(block)]
        lo, n = f"{rows}_{d.letter}", f"{rows.upper()}_{d.letter.upper()}"
        return lo, n, f"({lo} <= 0) & ({lo} + {n} >= {getattr(d, self.read).upper()})"

    @property
    def block_steps(self) -> str:
        return " * ".join([*(f"taps_{d.letter}" for d in self.tapped), "chunks"])

    @property
    def block_coordinates(self) -> str:
        """kh, kw of a tap number among those of a block."""
        parts: list[str] = []
        for i, d in enumerate(self.tapped):
            inner = " * ".join(f"taps_{e.letter}" for e in self.tapped[i + 1 :])
            text = f"tap // ({inner})" if " " in inner else f"tap // {inner}" if inner else "tap"
            parts.append(f"first_{d.k} + {text}" + (f" % taps_{d.letter}" if i else ""))
        return f"{', '.join(d.k for d in self.tapped)} = {', '.join(parts)}"

    def block_corner(self) -> list[str]:
        """Lines that find a box's corner by its number among a block's boxes; samples are slowest."""
        lines: list[str] = []
        inner = ""
        for d, (corner, _, tile) in reversed(list(zip(self.dims, self.corner, strict=True))):
            lines.append(f"{corner} = first_{corner} + box{inner} % count_{d.letter} * {tile}")
            inner += f" // count_{d.letter}"
        return [*lines, f"n = box{inner} * TN"]

    def host_boxes(self, config: Config, samples: int = 0) -> str:
        """The host's text of how many boxes cover all samples and rows.

        Args:
            samples: a box's samples, if not as many as the tile has.
        """
        words = [f"ceil_div(s.n, {samples or config.tile['TN']})"]
        for i, d in enumerate(self.dims):
            rows = f"s.{'x' if self.problem.phase == 'backward_data' else 'y'}[{i}]"
            rows = f"ceil_div({rows}, {d.stride})" if self.by_phase and d.stride > 1 else rows
            words.append(f"ceil_div({rows}, {config.tile[f'T{d.letter.upper()}']})")
        return " * ".join(words)

    @property
    def box_pixels(self) -> str:
        return " * ".join(["TN", *(f"T{d.letter.upper()}" for d in self.dims)])

    @property
    def box_extents(self) -> str:
        return ", ".join(f"T{d.letter.upper()}" for d in self.dims)

    @property
    def corner(self) -> list[tuple[str, str, str]]:
        """For each dimension of a box's rows, outermost first: its corner's coordinate, the extent to cover, and the
        box's extent."""
        made = "x" if self.problem.phase == "backward_data" else "y"
        names = self.phase_rows if self.by_phase else [getattr(d, made) for d in self.dims]
        return [(n, n.upper(), f"T{d.letter.upper()}") for n, d in zip(names, self.dims, strict=True)]

    @property
    def box_count(self) -> str:
        """How many boxes cover all samples and rows."""
        return f"tl.cdiv(N, TN) * {self.sample_boxes}"

    @property
    def sample_boxes(self) -> str:
        """How many boxes cover a sample's rows."""
        return " * ".join(f"tl.cdiv({extent}, {tile})" for _, extent, tile in self.corner)

    def corner_lines(self, number: str) -> list[str]:
        """Lines that find a box's corner by its number; samples are slowest."""
        lines: list[str] = []
        inner = ""
        for name, extent, tile in reversed(self.corner):
            lines.append(f"{name} = {number}{inner} % tl.cdiv({extent}, {tile}) * {tile}")
            inner += f" // tl.cdiv({extent}, {tile})"
        return [*lines, f"n = {number}{inner} * TN"]

    def pixel_lines(self) -> list[str]:
        """Lines that find, from a box's corner, sample and rows of each pixel that is made, and which pixels exist."""
        lines, inside = [f"pixel = tl.arange(0, {self.box_pixels})"], list[str]()
        sample, rows = self._of_pixels
        for row, d in reversed(list(zip(rows, self.dims, strict=True))):
            made = d.x if self.read == "y" else d.y
            skips = self.by_phase and d.stride > 1
            lines.append(f"{made} = " + (f"first_{d.letter} + {d.stride} * ({row})" if skips else row))
            inside.insert(0, f"({made} < {made.upper()})")
        return [*lines, f"n = ({sample}).to(tl.int64)", f"made = (n < N) & {' & '.join(inside)}"]

    @property
    def _of_pixels(self) -> tuple[str, list[str]]:
        """Sample and rows of each of a box's pixels, as far as phases number them."""
        inner, rows = "", list[str]()
        for name, _, tile in reversed(self.corner):
            rows.insert(0, f"{name} + pixel{inner} % {tile}")
            inner += f" // {tile}"
        return f"n + pixel{inner}", rows

    def box_place(self, tensor: str, *, made: bool = False, block: str = "") -> str:
        """The corner, in an activation's view, of the box that is made, or of the box of a block's rows that a tap
        reads for it."""
        words = ["n"]
        if self.parts(tensor) > 1:
            own = has_part(self.problem, tensor)
            words = [f"{tensor}_part", "n"] if own else [f"{tensor}_part * N + n"]
        channel = CHANNEL[tensor]
        for d, local in zip(self.dims, self.problem.dims, strict=True):
            tap = times(d.k, d.dilation) if d.taps > 1 else ""
            if made:
                words.append(getattr(d, tensor))
            elif tensor == "y" and d.stride > 1:
                back = times(f"j{d.letter}", d.dilation // gcd(d.stride, d.dilation))
                words.append(f"last_{d.letter}" + (f" - {back}" if tap else ""))
            elif tensor == "y":
                words.append(f"{d.x} + {d.pad}" + (f" - {tap}" if tap else ""))
            elif d.stride == 1:
                words.append(f"{d.y} - {d.pad}" + (f" + {tap}" if tap else ""))
            elif not is_paired(local):
                first = f"({d.pad} + {d.stride - 1})"
                if self.open:  # Triton rounds a quotient of arguments to zero, that of constants down
                    first = f"({first} - tl.where({first} < 0, {d.stride - 1}, 0))"
                words.append(f"{d.y} - {first} // {d.stride}")
            else:
                words.append(f"{d.y} + ({tap} - {d.pad} >> {d.stride.bit_length() - 1})")
                residue = f"({tap} - {d.pad} & {d.stride - 1})"
                if local is self.problem.dims[-1]:
                    channel = f"{residue} * C + c"
                else:
                    words.append(residue)
        if block and self.problem.rim is not None:
            rows = self.rows[self.blocks.index(block)]
            words[1:] = [f"{w} - {rows}_{d.letter}" for w, d in zip(words[1:], self.dims, strict=True)]
        return ", ".join([*words, channel])

    def weights_box(self, config: Config) -> str:
        """The text of a step's weights: filters by channels of one tap."""
        tap = "tap" if self.problem.taps > 1 else "0"
        if self.tapped and (self.by_phase or self.problem.rim is not None):
            tap = "0"
            for d in self.tapped:
                tap = _within(tap, d.taps, d.k)
        f_part, c_part = ("y_part" if self.parts("y") > 1 else "0"), ("x_part" if self.parts("x") > 1 else "0")
        if not lies_flat(self.problem, config):
            return f"w.load([{f_part}, f, {tap}, {c_part}, c]).reshape(BF, BC)"
        column = tap if c_part == "0" else _within(tap, self.problem.x_parts, c_part)
        return f"w.load([{_within(f_part, 'F', 'f')}, {_within(column, 'C', 'c')}])"

    def box_descriptors(self, config: Config) -> list[tuple[str, list[str]]]:
        """For each tensor of the launch, the arguments of boxes_of_memory; none where pointers are used."""
        p, tile = self.problem, config.tile
        w = f"({p.y_parts}, s.filters, {p.taps}, {p.x_parts}, s.channels)", f"[1, {tile['BF']}, 1, 1, {tile['BC']}]"
        if lies_flat(p, config):
            filters, columns = times("s.filters", p.y_parts), times("s.channels", p.taps * p.x_parts)
            w = f"({filters}, {columns})", f"[{tile['BF']}, {tile['BC']}]"
        y = self.view_of_y(config)
        texts = {"x": self._view_of_x(config), "w": list(w), "dx": self._view_of_x(config), "y": y, "dy": y}
        as_result = [name for name, kind in epilogues.operands(p.epilogue) if kind == "element"]
        texts |= dict.fromkeys([*as_result, "before"], texts.get(self.result, y))
        if self.by_pointers is not None:
            for name in (self.result, "before", *as_result):
                texts.pop(name, None)
        if self.problem.rim is not None:
            texts[self.pointer(self.read)] = ["*"]
        return [(name, texts.get(name, [])) for name in self.tensors(self.second_sum(config))]

    def passed_boxes(self, tensor: str, view: list[str]) -> str:
        """The launch's argument for a tensor: its boxes, those of a block and its rim, or the tensor itself."""
        if view in ([], ["*"]):
            return "*views" if view else tensor
        boxes = f"boxes_of_memory({tensor}, {', '.join(view)})"
        is_factor = tensor != self.result and tensor not in epilogues.tensors(self.problem.epilogue)
        return f"read_as_tf32({boxes})" if self.problem.dtype == "tfloat32" and is_factor else boxes

    def operand(self, text: str) -> str:
        return f"copied_tf32({text})" if self.problem.dtype == "tfloat32" else text

    def block_and_rim(self, config: Config) -> str:
        """Arguments of the function that describes a block and its rim."""
        name = self.pointer(self.read)
        channels = "s.channels" if self.read == "x" else "s.filters"
        box = self._box(config, (), self.read)
        return f"{name}, rim, s.n, {channels}, {box}, {self.rims}, {self.spare}"

    @property
    def spare(self) -> str:
        """The name of a tensor that is never empty where something is launched."""
        return "dy" if self.problem.phase == "backward_filter" else self.result

    def box_epilogue(self, made: str) -> list[str]:
        """Lines of the epilogue of a box that is made."""
        place = self.box_place(made, made=True)
        shape, across = f"TN, {self.box_extents}, BF", f"B{CHANNEL[made].upper()}"

        def element(name: str) -> str:
            return f"{name}.load([{place}]).reshape({self.box_pixels}, {across}).to({self.wide})"

        def vector(name: str, number: int) -> str:
            at = f"{name} + {number} * F + f" if number else f"{name} + f"
            loaded = f"tl.load({at} + tl.arange(0, BF), mask=f + tl.arange(0, BF) < F, other=0.0)"
            return f"{loaded}.to({self.wide})[None, :]"

        keep = f"before.store([{place}], acc.to(before.dtype).reshape({shape}))"
        return epilogues.lines(self.problem.epilogue, element, vector, keep)

    def box_moments(self, config: Config) -> list[str]:
        """Lines that make moments of a box that is made, of the pixels that exist."""
        sample, rows = self._of_pixels
        inside = [f"({row} < {extent})" for row, (_, extent, _) in zip(rows, self.corner, strict=True)]
        there, filters = " & ".join(inside), "f + tl.arange(0, BF)"
        if self._moments_by_sample(config):
            each, pixels = self.sample_boxes, " * ".join(tile for _, _, tile in self.corner)
            shape = f"TN, {pixels}, BF"
            lines = moment_lines_by_sample(there, filters, "y.dtype", self.wide, shape, each)
            return [f"pixel = tl.arange(0, {pixels})", *lines]
        lines = self.moments(f"({sample} < N) & {there}", filters, "y.dtype")
        return [f"pixel = tl.arange(0, {self.box_pixels})", *lines]

    def _moments_by_sample(self, config: Config) -> bool:
        """Whether each sample of a box has moments of its own."""
        return self.problem.moments == "samples" and config.tile["TN"] > 1

    def host_pieces(self, config: Config) -> str:
        """The host's text of how many boxes have moments."""
        return self.host_boxes(config, samples=1 if self._moments_by_sample(config) else config.tile["TN"])

    def view_of_y(self, config: Config) -> list[str]:
        """The arguments of boxes_of_memory for y or dy: shape and box."""
        if (parts := self.parts_together(config)) > 1:
            rows = ", ".join(str(config.tile[f"T{d.letter.upper()}"]) for d in self.dims)
            box = f"[{parts}, {config.tile['TN']}, {rows}, {self.problem.filters}]"
            return [f"({self._samples('y')}, *s.y, s.filters)", box]
        return [f"({self._samples('y')}, *s.y, s.filters)", self._box(config, (), "y")]

    def read_dy(self, config: Config) -> str:
        """The text that reads a box of dy as pixels by filters, in a filter gradient."""
        if (parts := self.parts_together(config)) > 1:
            place = ", ".join([f"tile_f * {parts}", "n", *(corner for corner, _, _ in self.corner), "0"])
            loaded = f"dy.load([{place}]).reshape({parts}, {self.box_pixels}, F)"
            return f"{loaded}.permute(1, 0, 2).reshape({self.box_pixels}, BF)"
        return f"dy.load([{self.box_place('y', made=True)}]).reshape({self.box_pixels}, BF)"

    def _samples(self, tensor: str) -> str:
        parts = self.parts(tensor)
        return f"{parts}, s.n" if has_part(self.problem, tensor) else times("s.n", parts)

    def _box(self, config: Config, pairs: Collection[str], tensor: str) -> str:
        extents = [*(["1"] if has_part(self.problem, tensor) else []), str(config.tile["TN"])]
        for d in self.dims:
            extents += [str(config.tile[f"T{d.letter.upper()}"]), *(["1"] if d.letter in pairs else [])]
        return f"[{', '.join(extents)}, {config.tile[f'B{CHANNEL[tensor].upper()}']}]"

    def _view_of_x(self, config: Config) -> list[str]:
        """The arguments of boxes_of_memory for x: shape, box, and which rows are left out."""
        shape, own = [self._samples("x")], 1 + has_part(self.problem, "x")
        every, first = ["1"] * own, ["0"] * own
        channels, pairs = "s.channels", list[str]()
        for i, (d, local) in enumerate(zip(self.dims, self.problem.dims, strict=True)):
            reads = self.problem.phase != "backward_data"
            skips, is_last = reads and d.stride > 1 and not is_paired(local), local is self.problem.dims[-1]
            every.append(str(d.stride) if skips else "1")
            first.append(f"-s.below[{i}] % {d.stride}" if skips else "0")
            if not reads or not is_paired(local):
                shape.append(f"s.x[{i}]")
                continue
            shape.append(f"s.x[{i}] // {d.stride}")
            if is_last:
                channels = f"{d.stride} * s.channels"
            else:
                pairs.append(d.letter)
                shape.append(str(d.stride))
                every.append("1")
                first.append("0")
        words = [f"({', '.join([*shape, channels])})", self._box(config, pairs, "x")]
        skipped = any(word != "1" for word in every)
        return [*words, f"({', '.join([*every, '1'])})", f"({', '.join([*first, '0'])})"] if skipped else words
