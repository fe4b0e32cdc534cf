"""An activation as a collective leaves it: a block with boxes around it, or equal parts of its channels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from convgen.late import torch
from convgen.operations.row import Interval


def count_rows(rows: Interval) -> int:
    return rows[1] - rows[0]


class RimPlaces:
    """The places of a rank's own block, and of the boxes around it, in the window that a kernel reads.

    Attributes:
        shape: the window's.
        own: for each dimension, the block's first row and number of rows.
        lines: for each box its start in the buffer, its first rows, and its numbers of rows.
        last: whether channels are last in the buffer.
    """

    def __init__(
        self, window: Sequence[Interval], own: Sequence[Interval], boxes: Sequence[Sequence[Interval]]
    ) -> None:
        self.shape, self.last = tuple([count_rows(rows) for rows in window]), len(window) > 3
        starts = [lo for lo, _ in window[2:]]
        self.own = tuple([n for (lo, hi), start in zip(own[2:], starts, strict=True) for n in (lo - start, hi - lo)])
        lines, at = list[tuple[int, ...]](), 0
        for box in boxes:
            rows = [count_rows(one) for one in box]
            if prod(rows):
                lines.append((at, *[lo - start for (lo, _), start in zip(box[2:], starts, strict=True)], *rows[2:]))
            at += prod(rows)
        self.lines = tuple(lines)
        self._tables: dict[Any, Any] = {}

    def table(self, device: Any) -> Any:
        """The lines as a tensor on a device; they are brought there once."""
        if device not in self._tables:
            lines = torch.tensor(self.lines, dtype=torch.int64).view(len(self.lines), 2 * len(self.shape) - 3)
            self._tables[device] = lines.to(device)
        return self._tables[device]


class Rimmed:
    """An activation as a kernel can read it: a rank's own block, and the flat buffer that an exchange brought around
    it.

    Attributes:
        stands: for torch's graphs, zeros without memory whose gradient is the window's; None without a graph.
    """

    def __init__(self, own: Any, rim: Any, around: RimPlaces, stands: Any = None) -> None:
        self.own, self.rim, self.around, self.shape, self.stands = own, rim, around, around.shape, stands

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def device(self) -> Any:
        return self.own.device

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def new_zeros(self, *shape: int) -> Any:
        return self.own.new_zeros(*shape)

    def whole(self) -> Any:
        """The window as one tensor."""
        (n, c, *extents), out = self.shape, self.own.new_empty(self.shape)
        firsts, counts = self.around.own[::2], self.around.own[1::2]
        inside = [slice(max(f, 0), max(min(f + m, e), f, 0)) for f, m, e in zip(firsts, counts, extents, strict=True)]
        there = [slice(i.start - f, i.stop - f) for i, f in zip(inside, firsts, strict=True)]
        out[(..., *inside)] = self.own[(..., *there)]
        for start, *line in self.around.lines:
            lows, rows = line[: len(extents)], line[len(extents) :]
            box = self.rim[start : start + n * c * prod(rows)]
            box = box.view(n, *rows, c).movedim(-1, 1) if self.around.last else box.view(n, c, *rows)
            out[(..., *[slice(lo, lo + m) for lo, m in zip(lows, rows, strict=True)])] = box
        return out if self.stands is None else out + self.stands


def of_parts(elements: Any, count: int, shape: Sequence[int]) -> Any:
    """A tensor of this shape from a flat one, in which equal parts of its channels lie one behind the other; channels
    are last in each part if it has several dimensions."""
    n, c, *rows = shape
    if len(rows) > 1:
        parts = elements.view(count, n, *rows, c // count).movedim(-1, 2)
    else:
        parts = elements.view(count, n, c // count, *rows)
    return parts.movedim(0, 1).flatten(1, 2)


def to_parts(tensor: Any, count: int) -> Any:
    """A flat tensor with equal parts of a tensor's channels one behind the other, as `of_parts` takes it."""
    parts = tensor.unflatten(1, (count, -1)).movedim(1, 0)
    return (parts.movedim(2, -1) if tensor.dim() > 3 else parts).reshape(-1)
