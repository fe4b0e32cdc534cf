"""The words that only some families' templates use."""

from __future__ import annotations

from convgen.kernels.config import Config
from convgen.kernels.index import IndexMap
from convgen.kernels.words import CHANNEL, Words, times


class PackedWords(Words):
    """Taps and channels as one index of the sum."""

    def flat_taps(self, j: str) -> list[str]:
        """Channel and tap of an index that runs over both in w's memory order, and the rows that the tap reads."""
        taps = self.problem.taps
        pair = f"tap, c = {j} // C, {j} % C" if self.last else f"c, tap = {j} // {taps}, {j} % {taps}"
        lines = [pair, self.taps] if self.tapped else [pair]
        for d in self.dims:
            back = f" + {self.across(f'({times(d.k, d.dilation)})')}" if d.taps > 1 else ""
            lines.append(f"{d.x} = {d.x}_first{back}")
        return lines

    @property
    def flat_element(self) -> str:
        """Where x's element of a pixel and such an index lies."""
        rows = {d.x: d.x for d in self.dims}
        start = self.activation("x").text(n="sample", **rows)
        channel = self.activation("x").text(c="c")
        channel = channel if self.last else channel.replace("c *", "c.to(tl.int64) *", 1)
        return f"{start} + {self.across(f'({channel})')}"


class GemmWords(Words):
    """One tap on every pixel: rows are numbered through, a sample has P of them."""

    def gemm_element(self, tensor: str) -> str:
        """From an activation's start to a tile: pixels m of sample n, or of all samples where channels are last."""
        v = CHANNEL[tensor]
        parts = [("part", "PARTS")] if self.parts(tensor) > 1 else []
        if self.last:
            order = [*parts, ("at", "N * P"), ("c", self.channels(tensor))]
        else:
            order = [*parts, ("n", "N"), ("c", self.channels(tensor)), ("m", "P")]
        m = IndexMap(tuple(order))
        along = m.text(at="at") if self.last else m.text(n="n", m="m")
        across = m.text(c=f"group * {v.upper()} + {v}" if self.grouped else v)
        part = " + " + m.text(part=f"{tensor}_part") if parts else ""
        return f"{self.along(f'({along})')} + {self.across(across if across.isidentifier() else f'({across})')}{part}"


class BoxWords(Words):
    """Boxes of memory, named by their corner; parts of an operand follow each other as samples do."""

    @property
    def box_pixels(self) -> str:
        return " * ".join(["TN", *(f"T{d.letter.upper()}" for d in self.dims)])

    @property
    def box_extents(self) -> str:
        return ", ".join(f"T{d.letter.upper()}" for d in self.dims)

    def box_tile(self, config: Config) -> str:
        return "(" + "".join(f"{config.tile[f'T{d.letter.upper()}']}, " for d in self.dims) + ")"

    def box_place(self, tensor: str, *, made: bool = False) -> str:
        """Sample and rows of the corner of what is made, or of what a tap reads for it."""
        words = [f"{tensor}_part * N + n" if self.parts(tensor) > 1 else "n"]
        for d in self.dims:
            tap = times(d.k, d.dilation) if d.taps > 1 else ""
            if made:
                words.append(getattr(d, tensor))
            elif tensor == "x":
                words.append(f"{d.y} - {d.pad}" + (f" + {tap}" if tap else ""))
            else:
                words.append(f"{d.x} + {d.pad}" + (f" - {tap}" if tap else ""))
        return ", ".join(words)

    @property
    def box_weights(self) -> str:
        """Corner of a box of w: part and number of the filter, tap, part and number of the channel."""
        parts = ["y_part" if self.parts("y") > 1 else "0", "f", "tap" if self.problem.taps > 1 else "0"]
        return ", ".join([*parts, "x_part" if self.parts("x") > 1 else "0", "c"])

    def box_descriptors(self, config: Config) -> list[tuple[str, str, str]]:
        """For each tensor of the launch its shape and box as text; none for bias, which is read by pointers."""
        p, tile = self.problem, config.tile
        box = ", ".join(str(tile[n]) for n in ("TN", *(f"T{d.letter.upper()}" for d in self.dims)))

        def activation(tensor: str, channels: str) -> tuple[str, str]:
            n = times("s.n", self.parts(tensor))
            name = "channels" if tensor == "x" else "filters"
            return f"({n}, *s.{tensor}, s.{name})", f"[{box}, {tile[channels]}]"

        w = f"({p.y_parts}, s.filters, {p.taps}, {p.x_parts}, s.channels)", f"[1, {tile['BF']}, 1, 1, {tile['BC']}]"
        texts = {"x": activation("x", "BC"), "dx": activation("x", "BC"), "w": w}
        texts |= {"y": activation("y", "BF"), "dy": activation("y", "BF"), "bias": ("", "")}
        return [(name, *texts[name]) for name in self.tensors(1)]


class DepthwiseWords(Words):
    """A channel a group: vectors of groups or filters instead of tiles of a group's channels."""

    def single(self, tensor: str, coordinate: str) -> str:
        """From a pixel's start to a group of x, or a filter of y."""
        text = self._rows_together(tensor).text(c=coordinate)
        return text if text.isidentifier() else f"({text})"

    def single_element(self, tensor: str, coordinate: str) -> str:
        row = self.along(f"{tensor}_row")
        if self.problem.rim is not None and not self.last:
            return f"{row} + {self.across(coordinate)} * {self.along(f'{tensor}_step')}"
        return f"{row} + {self.across(self.single(tensor, coordinate))}"

    def rows_that_read(self) -> list[str]:
        """Rows of y of which this tap reads rows xh, xw of x; there are none between a stride's."""
        lines, conditions = list[str](), ["made"]
        for d in self.dims:
            tap = f" - {times(d.k, d.dilation)}" if d.taps > 1 else ""
            if d.stride == 1:
                lines.append(f"{d.y} = {d.x} + {d.pad}{tap}")
            else:
                lines.append(f"{d.y} = ({d.x} + {d.pad}{tap}) // {d.stride}")
                conditions.append(f"({d.x} + {d.pad}{tap} == {d.y} * {d.stride})")
        return [*lines, f"inside = {' & '.join([*conditions, self.inside('y')])}"]
