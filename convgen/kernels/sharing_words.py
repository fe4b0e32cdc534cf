"""Triton text of programs that share a tile: how pieces are stored, counted and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.kernels.sharing import bunches


@dataclass(frozen=True, slots=True)
class Shared:
    """Lines of a kernel, and where each piece of a tile lies.

    Attributes:
        tile, piece: the program's, as Triton text. count: pieces of a tile.
        rows, columns: a sum's, as Triton text. sums: names of the sums that a program has made.
    """

    tile: str
    piece: str
    count: int
    rows: str
    columns: str
    sums: Sequence[str]

    @property
    def _across(self) -> str:
        return f"({self.columns})" if " " in self.columns else self.columns

    def _at(self, piece: str, j: int) -> str:
        """Where the j-th sum of a piece begins."""
        many = len(self.sums)
        number = piece if many == 1 else f"({piece} * {many} + {j})"
        return f"pieces + {number} * ({self.rows} * {self._across})" if piece != "0" or j else "pieces"

    def _added(self, j: int, first: str, rest: str, piece: str) -> list[str]:
        """Lines that make `total`: the first piece, then the others added in their order."""
        return [
            f'total = tl.load({self._at(first, j)}, cache_modifier=".cg")',
            f"for addend in tl.range({rest}, loop_unroll_factor=4):",
            f'    total += tl.load({self._at(piece, j)}, cache_modifier=".cg")',
        ]

    def _counted(self, place: str, of: str) -> list[str]:
        """Lines that find out whether the program is the last, and leave the counter zero for the launch behind."""
        return [
            "tl.debug_barrier()  # all of the program's is written",
            f'if tl.atomic_add({place}, 1, sem="acq_rel") == {of}:',
            f"    tl.store({place}, 0)",
        ]

    @property
    def head(self) -> list[str]:
        """Lines that store a program's piece, up to where the last program alone goes on."""
        each, many = bunches(self.count)
        numbers = f"{self.count * len(self.sums)} * {self.rows} * {self._across}"
        counter = f"arrived + ({self.tile})" + (f" * {1 + many}" if many > 1 else "")
        lines = [
            f"lane = tl.arange(0, {self.rows})[:, None] * {self._across} + tl.arange(0, {self.columns})[None, :]",
            f"pieces, counter = sums + tl.cast({self.tile}, tl.int64) * ({numbers}) + lane, {counter}",
            *(f"tl.store({self._at(self.piece, j)}, {sum})" for j, sum in enumerate(self.sums)),
        ]
        if many == 1:
            note = "# The pieces of the tile; who arrives last adds them, always in the same order."
            return [note, *lines, *self._counted("counter", str(self.count - 1))]
        inner = list[str]()
        for j in range(len(self.sums)):
            inner += self._added(j, "first", "first + 1, end", "addend")
            inner.append(f"tl.store({self._at('first', j)}, total)")
        inner += self._counted("counter", str(many - 1))
        return [
            f"# The pieces of the tile, {each} a bunch: who arrives last adds its bunch's, and at last the bunches',",
            "# always in the same order.",
            *lines,
            f"bunch = {self.piece} // {each}",
            f"first, end = bunch * {each}, tl.minimum(bunch * {each} + {each}, {self.count})",
            *self._counted("counter + 1 + bunch", "end - first - 1"),
            *(f"    {line}" for line in inner),
        ]

    def total(self, j: int) -> list[str]:
        """Lines by which the last program makes `total` of the j-th sum."""
        each, many = bunches(self.count)
        if many == 1:
            return self._added(j, "0", f"1, {each}", "addend")
        return self._added(j, "0", f"1, {many}", f"addend * {each}")

    @property
    def depth(self) -> int:
        """How many spaces the last program's lines are indented by."""
        return 8 if bunches(self.count)[1] > 1 else 4
