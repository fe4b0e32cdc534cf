"""Rows of group and instance norms, with the rows behind them, that a GPU's kernels take as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import IMAGES, back_behind
from convgen.operations.moments import Moments, Normalise
from convgen.operations.pointwise import Pointwise
from convgen.operations.row import Epilogue, Operation


def is_by_group(moments: Operation | None, normal: Operation) -> bool:
    """Whether these rows are a norm of images or volumes that takes moments of each sample's groups of channels."""
    if not isinstance(moments, Moments) or not isinstance(normal, Normalise) or normal.rms:
        return False
    of = moments.of
    return of.keep == (0, 1) and not of.parts and len(of.shape) in IMAGES


@dataclass
class Behind:
    """Rows behind a norm.

    Attributes:
        vectors: the rows with the channels' scale, shift or both, each with the letters `w`, `b` or both.
        activation: the row behind them, with its operation, if kernels do it.
    """

    vectors: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    activation: tuple[Any, Operation] | None = None

    @property
    def chain(self) -> Epilogue:
        """The steps that kernels do on the normalised, scaled and shifted value."""
        step = None if self.activation is None else self.activation[1].as_epilogue(0)
        return () if step is None else (step,)


def rows_behind(
    of: Averaged, value: str, reader: Callable[[str], tuple[Any, Operation, Sequence[str], str] | None]
) -> Behind:
    """The rows behind a norm that its kernels do.

    Args:
        reader: takes a value and gives the only row that reads it, its operation, and what it reads and makes; None
            where several rows read it, or anything moves.
    """
    found = Behind()
    while (one := reader(value)) is not None:
        who, operation, reads, makes = one
        if reads[0] != value or value in reads[1:]:
            break
        letters, by_channel = operation.vectors_of(of) if isinstance(operation, Pointwise) else ("", False)
        so_far = "".join(of_row for _, of_row in found.vectors)
        if letters and by_channel and so_far + letters in ("w", "b", "wb"):
            found.vectors.append((who, letters))
            value = makes
            continue
        if len(reads) == 1 and back_behind(operation, 0) is not None:
            found.activation = (who, operation)
        break
    return found
