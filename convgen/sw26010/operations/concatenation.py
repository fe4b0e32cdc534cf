"""Parts of every sample side by side, and out of one tensor again: channels of several values are one.

Elements pass through LDM as memory has them.
Source: [SW] Principle 2; the paper has no program of it, and the public code copies by the management core.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import CPES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.kernel_cycles import pieces
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import HEADER, TASK_LDM_BYTES, Place, busiest, check_extents, itemsize


@dataclass(frozen=True, slots=True)
class Concatenation:
    """part0 [N, PARTS[0]], part1, ... to whole [N, sum of PARTS]; backward, whole to parts.

    Args:
        parts: elements of a sample, of each.
    Raises:
        InputError: no parts, an extent below 1, or another dtype.
    """

    n: int
    parts: tuple[int, ...]
    dtype: Dtype = "float32"
    backward: bool = False

    def __post_init__(self) -> None:
        check_extents("Concatenation", (self.n, len(self.parts), *self.parts), self.dtype)

    @property
    def piece(self) -> int:
        """Elements that a CPE takes at once: the longest part, as far as LDM goes, up to a 64th of everything."""
        share = -(-self.n * sum(self.parts) // CPES)
        return min(TASK_LDM_BYTES // itemsize(self.dtype), max(self.parts), max(32, share))

    @property
    def reads(self) -> tuple[Place, ...]:
        return (self._whole,) if self.backward else self._parts

    @property
    def writes(self) -> tuple[Place, ...]:
        return self._parts if self.backward else (self._whole,)

    @property
    def _whole(self) -> Place:
        return Place("whole", (self.n, sum(self.parts)), self.dtype)

    @property
    def _parts(self) -> tuple[Place, ...]:
        return tuple(Place(f"part{i}", (self.n, size), self.dtype) for i, size in enumerate(self.parts))

    def program(self) -> str:
        tensors = [place.name.upper() for place in self._parts]
        return print_program(
            "concatenation",
            {
                "header": HEADER, "backward": self.backward, "n": self.n, "parts": self.parts, "piece": self.piece,
                "itemsize": itemsize(self.dtype), "tensors": "".join(f"{name}, " for name in tensors).rstrip(),
                "names": ", ".join(("WHOLE", *tensors) if self.backward else (*tensors, "WHOLE")),
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        counts, size = Counts(), itemsize(self.dtype)
        for part in self.parts:
            for elements, times in pieces(part, self.piece):
                moved = self.n * times * elements * size
                counts.add_get(elements * size, moved, self.n * times)
                counts.add_put(elements * size, moved, self.n * times)
        return counts

    @property
    def rounds(self) -> int:
        return 2 * busiest(self.cost().put_ops)
