"""Layers element by element: pieces of all operands come into LDM, and the results go back.

Source: [SW] Principles 1 to 3. The paper has no program of these layers; every element of an operand is read or written
once, in pieces as long as LDM allows, by 64 CPEs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import CPES, LANES, SLOT_BYTES, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.printing import load_program, print_program
from convgen.sw26010.machine.rates import Rates

STREAM_LDM_BYTES = 60 * 1024
Kind = Literal["relu", "relu_backward", "add", "momentum"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a kind reads and writes, and the vector instruction, with how many additions and comparisons it is."""

    title: str
    gets: tuple[str, ...]
    puts: tuple[str, ...]
    instruction: str
    vadd: int = 0
    vmax: int = 0


_LAYERS: dict[Kind, _Layer] = {
    "relu": _Layer("ReLU", ("x",), ("y",), "relu(y, x)", vmax=1),
    "relu_backward": _Layer("ReLU, backward", ("x", "dy"), ("dx",), "relu_backward(dx, x, dy)", vmax=1),
    "add": _Layer("Sum of two", ("a", "b"), ("y",), "add(y, a, b)", vadd=1),
    "momentum": _Layer("A step of SGD", ("w", "v", "g"), ("w", "v"), "momentum(w, v, g, {rate}, {decay})", vadd=3),
}


@dataclass(frozen=True, slots=True)
class Stream:
    """A layer over `elements` elements.

    Args:
        rate, decay: of `momentum`: v = decay v + rate g.
    Raises:
        InputError: no elements.
    """

    kind: Kind
    elements: int
    dtype: Dtype = "float32"
    rate: float = 0.01
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise InputError(f"{self.kind} of {self.elements} elements")

    @property
    def buffers(self) -> tuple[str, ...]:
        layer = _LAYERS[self.kind]
        return tuple(dict.fromkeys((*layer.gets, *layer.puts)))

    @property
    def piece(self) -> int:
        """Elements that a CPE takes at once: its 64th, in whole registers, as far as LDM goes."""
        most = STREAM_LDM_BYTES // (SLOT_BYTES * len(self.buffers)) // LANES * LANES
        return min(most, round_up(round_up(self.elements, CPES) // CPES, LANES))

    @property
    def ldm_bytes(self) -> int:
        return SLOT_BYTES * self.piece * len(self.buffers)


def stream_program(stream: Stream) -> str:
    """Text of the program that one CPE runs."""
    layer = _LAYERS[stream.kind]
    return print_program(
        "stream",
        {
            "header": (f"Printed by convgen {__version__} (sw26010 pointwise).",),
            "title": layer.title, "operands": tuple(name.upper() for name in stream.buffers),
            "buffers": stream.buffers, "gets": layer.gets, "puts": layer.puts,
            "instruction": layer.instruction.format(rate=stream.rate, decay=stream.decay),
            "elements": stream.elements, "piece": stream.piece, "floats": stream.dtype == "float32",
        },
    )  # fmt: skip


def run_stream(stream: Stream, *operands: Any, group: CoreGroup = SW26010) -> tuple[dict[str, Array], Counts]:
    """What the layer writes, by name, and what the mesh did.

    Args:
        operands: what it reads, of `elements` elements each, in the order of the program: x; x, dy; a, b; w, v, g.
    Raises:
        InputError: another number of operands, or of elements.
    """
    layer = _LAYERS[stream.kind]
    if len(operands) != len(layer.gets):
        raise InputError(f"{stream.kind} reads {', '.join(layer.gets)}; {len(operands)} operands are given")
    memory = {name: np.zeros((1, stream.elements), stream.dtype) for name in stream.buffers}
    for name, operand in zip(layer.gets, operands, strict=True):
        given = np.asarray(operand)
        if given.size != stream.elements:
            raise InputError(f"{name} has {given.size} elements, the layer {stream.elements}")
        memory[name][0] = given.reshape(-1)
    drams = [Dram(name.upper(), memory[name]) for name in stream.buffers]
    counts = MessageMesh(group).run(load_program(stream_program(stream)), *drams)
    return {name: memory[name][0] for name in layer.puts}, counts


def stream_counts(stream: Stream) -> Counts:
    """Events of a run, by closed form."""
    layer, counts = _LAYERS[stream.kind], Counts()
    sizes, pieces = tiles_bytes((1, 1), (stream.elements, stream.piece), 4 if stream.dtype == "float32" else 8)
    for block, size in sizes.items():
        counts.add_get(block, len(layer.gets) * size, 0)
        counts.add_put(block, len(layer.puts) * size, 0)
    counts.get_ops, counts.put_ops = len(layer.gets) * pieces, len(layer.puts) * pieces
    vectors = pieces * stream.piece // LANES
    counts.vadd, counts.vmax = layer.vadd * vectors, layer.vmax * vectors
    if stream.dtype == "float32":
        counts.convert = (len(layer.gets) + len(layer.puts)) * vectors
    return counts


def stream_seconds(stream: Stream, rates: Rates) -> float:
    """Of DMA: a round for what comes together and one for what goes, of every piece. Instructions take less."""
    counts = stream_counts(stream)
    pieces = counts.put_ops // len(_LAYERS[stream.kind].puts)
    rounds = 2 * -(-pieces // CPES)
    return rates.transfer_s(counts.get) + rates.transfer_s(counts.put) + rounds * rates.dma_round_s
