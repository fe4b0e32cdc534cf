"""Element by element: pieces of all operands come into LDM, and the results go back.

Source: [SW] Principles 1 to 3. The paper has no program of these layers; every element of an operand is read or written
once, in pieces as long as LDM allows, by 64 CPEs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import CPES, LANES, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import HEADER, TASK_LDM_BYTES, Place, busiest, check_extents, itemsize

Kind = Literal["relu", "relu_backward", "add", "times", "dropout", "sgd", "momentum"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a kind reads and writes, its constants, its vector instruction, and the additions and comparisons of it."""

    title: str
    gets: tuple[str, ...]
    puts: tuple[str, ...]
    instruction: str
    constants: tuple[str, ...] = ()
    vadd: int = 0
    vmax: int = 0


_LAYERS: dict[Kind, _Layer] = {
    "relu": _Layer("ReLU", ("x",), ("y",), "relu(y, x)", vmax=1),
    "relu_backward": _Layer("ReLU, backward", ("x", "dy"), ("dx",), "relu_backward(dx, x, dy)", vmax=1),
    "add": _Layer("Sum of two", ("a", "b"), ("y",), "add(y, a, b)", vadd=1),
    "times": _Layer("Product with a number", ("x",), ("y",), "times(y, x, {0})", ("factor",), vadd=1),
    "dropout": _Layer("Dropout", ("x", "mask"), ("y",), "masked(y, x, mask, {0})", ("factor",), vadd=2),
    "sgd": _Layer("A step of SGD", ("w", "g"), ("w",), "sgd(w, g, {0}, {1})", ("rate", "decay"), vadd=2),
    "momentum": _Layer(
        "A step of SGD with momentum", ("w", "v", "g"), ("w", "v"), "momentum(w, v, g, {0}, {1}, {2})",
        ("rate", "momentum", "decay"), vadd=3,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """An operation over `elements` elements; forward and backward dropout are the same.

    Args:
        constants: of `times` its factor; of `dropout` 1 / (1 - p); of `sgd` the learning rate and the decay; of
            `momentum` the learning rate, the momentum and the decay, for v = momentum v + g + decay w and
            w = w - rate v, as in PyTorch.
    Raises:
        InputError: no elements, another dtype, or other constants.
    """

    kind: Kind
    elements: int
    dtype: Dtype = "float32"
    constants: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_extents(self.kind, (self.elements,), self.dtype)
        names = _LAYERS[self.kind].constants
        if len(self.constants) != len(names) or not all(map(isfinite, self.constants)):
            given = f"{self.kind} has {', '.join(map(str, self.constants)) or 'no constants'}"
            raise InputError(given, hint=", ".join(names) or "none")

    @property
    def reads(self) -> tuple[Place, ...]:
        return self._places(_LAYERS[self.kind].gets)

    @property
    def writes(self) -> tuple[Place, ...]:
        return self._places(_LAYERS[self.kind].puts)

    def _places(self, names: tuple[str, ...]) -> tuple[Place, ...]:
        return tuple(Place(name, (self.elements,), self.dtype, (1, self.elements)) for name in names)

    @property
    def buffers(self) -> tuple[str, ...]:
        layer = _LAYERS[self.kind]
        return tuple(dict.fromkeys((*layer.gets, *layer.puts)))

    @property
    def piece(self) -> int:
        """Elements that a CPE takes at once: its 64th, in whole registers, as far as LDM goes."""
        most = TASK_LDM_BYTES // (SLOT_BYTES * len(self.buffers)) // LANES * LANES
        return min(most, round_up(round_up(self.elements, CPES) // CPES, LANES))

    @property
    def ldm_bytes(self) -> int:
        return SLOT_BYTES * self.piece * len(self.buffers)

    def program(self) -> str:
        layer = _LAYERS[self.kind]
        return print_program(
            "stream",
            {
                "header": HEADER,
                "title": layer.title, "operands": tuple(name.upper() for name in self.buffers),
                "buffers": self.buffers, "gets": layer.gets, "puts": layer.puts,
                "instruction": layer.instruction.format(*map(float, self.constants)),
                "elements": self.elements, "piece": self.piece, "floats": self.dtype == "float32",
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        layer, counts = _LAYERS[self.kind], Counts()
        sizes, pieces = tiles_bytes((1, 1), (self.elements, self.piece), itemsize(self.dtype))
        for block, size in sizes.items():
            counts.add_get(block, len(layer.gets) * size, 0)
            counts.add_put(block, len(layer.puts) * size, 0)
        counts.get_ops, counts.put_ops = len(layer.gets) * pieces, len(layer.puts) * pieces
        vectors = pieces * self.piece // LANES
        counts.vadd, counts.vmax = layer.vadd * vectors, layer.vmax * vectors
        if self.dtype == "float32":
            counts.convert = (len(layer.gets) + len(layer.puts)) * vectors
        return counts

    @property
    def rounds(self) -> int:
        """Two for every piece of the busiest CPE: one for what comes together, one for what goes."""
        return 2 * busiest(-(-self.elements // self.piece))
