"""Rows of a norm of each sample's groups of channels, or of each channel, that kernels of a GPU take as one."""

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
    """Whether these are a norm of images or volumes of which each sample's groups of channels have moments."""
    if not isinstance(moments, Moments) or not isinstance(normal, Normalise) or normal.rms:
        return False
    of = moments.of
    return of.keep == (0, 1) and not of.parts and len(of.shape) in IMAGES


@dataclass
class Behind:
    """Rows behind a norm.

    Attributes:
        vectors: those with the scale `w` of channels, the shift `b` or both, with these letters.
        activation: the row behind them, if kernels do it; with its operation.
    """

    vectors: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    activation: tuple[Any, Operation] | None = None

    @property
    def chain(self) -> Epilogue:
        """What kernels do with what is normalised, scaled and shifted."""
        step = None if self.activation is None else self.activation[1].as_epilogue(0)
        return () if step is None else (step,)


def rows_behind(
    of: Averaged, value: str, reader: Callable[[str], tuple[Any, Operation, Sequence[str], str] | None]
) -> Behind:
    """Rows that a norm's kernels do behind what is normalised.

    Args:
        reader: of a value, the only one that reads it, its operation, what it reads and makes; None where there are
            several, or anything moves.
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
