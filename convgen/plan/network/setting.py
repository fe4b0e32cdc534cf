"""What a plan is for: the machine, and how training uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convgen.cost.machine import Machine
from convgen.cost.model import Measured
from convgen.spec.target import CPU, Target

Statistics = Literal["local", "global"]
Keep = Literal["every", "needed"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """
    Attributes:
        target: of the modules; it decides how local convolutions pad.
        statistics: batch normalisation over each rank's own block, as [SP] III-B has it, or over the whole batch.
        keep: which activations stay for backward: every output, each with an error signal of its size, as the papers'
            framework has it; or what backward reads, error signals freed once used.
        optimizer_states: values a weight besides itself and its gradient; 1 with momentum.
        regather: whether a convolution may gather x again in backward rather than hold it.
        recompute: whether outputs of normalisation, ReLU and dropout may be computed again in backward.
        hide_dw: whether reductions of gradients of filters, biases, scales and shifts take no time, as if backward hid
            them all ([CF] 5 and [SP] VI overlap them); else every step comes after the other.
        measured: seconds of local convolutions where they are known, instead of the roofline; measured_on: the device.
    """

    machine: Machine
    target: Target = CPU
    statistics: Statistics = "local"
    keep: Keep = "every"
    optimizer_states: int = 1
    regather: bool = False
    recompute: bool = False
    hide_dw: bool = False
    measured: Measured | None = None
    measured_on: str = ""
