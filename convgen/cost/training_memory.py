"""Memory of training a layer, and a network of them, in bytes of the rank that needs most.

| part | is |
|---|---|
| weights | w and bias as stored; in 16 bits a copy in float32 besides, which the optimizer updates |
| gradients | dw and db, stored as w and bias |
| optimizer | its states, as large as w and bias each, in float32 (float64 for float64) |
| input, output | x and y as stored; a layer's output is the next one's input |
| held | what forward keeps for backward besides x and w: gathered or windowed x |
| signals | dy and dx |
| temporaries | the most that a phase has at once besides the above: memory.py, step by step |

Not counted: workspaces of libraries, what a transport takes, and fragmentation.

Source: [SP] I and VI (activations are kept until backward has used them), [CF] 4 (a gathered x is held, partial sums
    are
temporary); Adam's two states are Kingma and Ba, arXiv:1412.6980.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.space import Space
from convgen.cost.memory import memory
from convgen.program.build import bias_layout
from convgen.program.nodes import Schedule
from convgen.spec.layer import DTYPE_BYTES

Optimizer = Literal["sgd", "momentum", "adam"]
STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "adam": 2}
Signals = Literal["passing", "kept"]


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer, each part on the rank that has most of it."""

    weights: int
    gradients: int
    optimizer: int
    input: int
    output: int
    held: int
    temporaries: int

    @property
    def signals(self) -> int:
        """dx and dy, which are stored as x and y."""
        return self.input + self.output


def parameter_bytes(elements: int, dtype: str, states: int) -> tuple[int, int, int]:
    """Bytes of so many parameters, of their gradients, and of the optimizer's states; first, a float32 copy included.

    Args:
        states: values a parameter that the optimizer keeps.

    Example:
        >>> parameter_bytes(10, "float32", 1), parameter_bytes(10, "bfloat16", 2)
        ((40, 40, 40), (60, 20, 80))
    """
    element, state = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    copy = state if element < state else 0
    return elements * (element + copy), elements * element, elements * states * state


def layer_memory(
    schedule: Schedule,
    space: Space,
    dtype: str,
    *,
    optimizer: Optimizer = "momentum",
    channels_last: bool = False,
    needs_dx: bool = True,
) -> LayerMemory:
    """What training takes of a layer under a schedule.

    Args:
        needs_dx: False for a network's first layer.
    """
    element = DTYPE_BYTES[dtype]
    stored = dict(schedule.stored)
    elements = {tensor: space.elements(layout) for tensor, layout in stored.items()}
    parameters = elements["w"]
    if space.conv.bias:
        parameters = parameters + space.elements(bias_layout(stored))
    gradients = ("dx", "dw", "db") if needs_dx else ("dw", "db")
    used = memory(schedule, space, channels_last=channels_last, gradients=gradients)
    results = parameters + (elements["x"] if needs_dx else 0)
    besides = np.maximum(used.peak["forward"] - used.held - elements["y"], 0)
    for phase in ("backward_data", "backward_filter"):
        besides = np.maximum(besides, used.peak[phase] - results)
    weights, gradient, states = parameter_bytes(int(parameters.max()), dtype, STATES[optimizer])
    return LayerMemory(
        weights=weights,
        gradients=gradient,
        optimizer=states,
        input=_most(elements["x"], element),
        output=_most(elements["y"], element),
        held=_most(used.held, element),
        temporaries=_most(besides, element),
    )


def _most(elements: NDArray[np.int64], element_bytes: int) -> int:
    return int(elements.max()) * element_bytes


@dataclass(frozen=True, slots=True)
class NetworkMemory:
    """Bytes of a network on the rank that needs most: an upper bound where different ranks need most of different
    layers."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    signals: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.signals + self.temporaries


def network_memory(
    layers: Sequence[LayerMemory], *, signals: Signals = "passing", outputs_kept: int = 1
) -> NetworkMemory:
    """What training takes of layers in a row, each one's output the next one's input.

    Args:
        signals: passing: dy and dx of one layer at a time; kept: one for every activation kept but the network's input.
        outputs_kept: tensors of the size of each convolution's output that stay until backward, e.g. 3 where
            normalisation and ReLU keep theirs.
    """
    kept = outputs_kept * sum(m.output for m in layers)
    return NetworkMemory(
        weights=sum(m.weights for m in layers),
        gradients=sum(m.gradients for m in layers),
        optimizer=sum(m.optimizer for m in layers),
        activations=layers[0].input + kept + sum(m.held for m in layers),
        signals=kept if signals == "kept" else max(m.signals for m in layers),
        temporaries=max(m.temporaries for m in layers),
    )
