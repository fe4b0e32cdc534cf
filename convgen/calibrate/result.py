"""What a calibration found, and the machine made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from statistics import median

from convgen.calibrate.collectives import Collective
from convgen.calibrate.fit import Fit
from convgen.calibrate.links import Messages, levels_of
from convgen.calibrate.local import Local
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.shapes import Reached
from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Probe
from convgen.cost.uncertainty import QUANTILES, shares
from convgen.spec.layer import DTYPES

DIGITS = 4  # of a machine file's numbers; times repeat no better
NOISY = 0.5  # where repeats are farther apart, reports say so


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything measured, and the machine made of it.

    Attributes:
        date: of the measurement, as ISO 8601 has it.
        backend: what carried messages: gloo, or nccl (RCCL goes by this name too).
        torch: its version.
        messages: by the keys of links.patterns.
        quantile: the quantile of repeats that counts.
        assumed: the machine's dtypes that were not measured, and why their numbers are what they are.
    """

    date: str
    backend: str
    torch: str
    nodes: Nodes
    messages: Mapping[str, Messages]
    local: Local
    machine: Machine
    assumed: Mapping[str, str]
    shapes: tuple[Reached, ...]
    collectives: tuple[Collective, ...]
    quantile: float = 0.5

    @property
    def noise(self) -> float:
        """How far repeats of one message are apart: (p80 - p20) / median, the median of all sizes and patterns."""
        return noise_of(self.messages)


def noise_of(messages: Mapping[str, Messages]) -> float:
    """(p80 - p20) / median of repeats, the median over all sizes and patterns."""
    return median(t.spread for m in messages.values() for t in m.timings)


def uncertainty_of(machine: Machine, messages: Mapping[str, Messages]) -> tuple[tuple[str, float], ...]:
    """How far the machine's prices may be off: by what interpolating misses, and for links also by how far repeats are
    apart; empty where too little was measured to tell."""
    known = shares(machine)
    if known is None:
        return ()
    computing, links = known
    return ("computing", rounded(computing, 2)), ("links", rounded(hypot(links, noise_of(messages) / QUANTILES), 2))


def machine_of(
    name: str,
    nodes: Nodes,
    messages: Mapping[str, Messages],
    local: Local,
    shapes: Sequence[Reached],
    launch_s: float,
    processor: Fit | None = None,
) -> Machine:
    """The machine with these links and ranks, its numbers rounded as its file has them; without its misfits.

    The peak in float32 is the convolution's where that is faster than a matrix product, as Winograd's may be.
    """
    peak = {**local.flops_per_s, "float32": max(local.flops_per_s["float32"], local.convolution_flops_per_s)}
    whole = rounded(peak["float32"])
    return Machine(
        name=name,
        device=local.device,
        ranks_per_node=nodes.ranks,
        levels=tuple(
            replace(
                level,
                latency_s=rounded(level.latency_s),
                bytes_per_s=rounded(level.bytes_per_s),
                shared_bytes_per_s=None if level.shared_bytes_per_s is None else rounded(level.shared_bytes_per_s),
            )
            for level in levels_of(nodes, messages)
        ),
        memory_bytes=rounded(local.memory_bytes),
        memory_bytes_per_s=rounded(local.bytes_per_s),
        peak_flops=tuple((dtype, rounded(peak[_source(local, dtype)])) for dtype in DTYPES),
        efficiency=rounded(local.convolution_flops_per_s / peak["float32"]),
        launch_s=rounded(launch_s),
        message_processor_s=0.0 if processor is None else rounded(processor.latency_s),
        processor_s_per_byte=0.0 if processor is None else rounded(1 / processor.bytes_per_s),
        probes=tuple(_probe(one, whole) for one in shapes),
    )


def _probe(one: Reached, peak: float) -> Probe:
    s, (forward, data, filter_) = one.shape, (rounded(rate / peak, 3) for rate in one.flops_per_s)
    return Probe(
        channels=s.channels,
        filters=s.filters,
        taps=s.kernel**2,
        pixels=s.pixels,
        groups=s.groups,
        step=s.stride**2,
        efficiency=(forward, data, filter_),
    )


def assumed(local: Local) -> dict[str, str]:
    """The dtypes whose rate is float32's, and why."""
    return {
        dtype: "plain float32 on a CPU" if (dtype, local.threads > 0) == ("tfloat32", True) else "assumed: float32's"
        for dtype in DTYPES
        if _source(local, dtype) != dtype
    }


def _source(local: Local, dtype: str) -> str:
    return dtype if dtype in local.flops_per_s else "float32"


def rounded(number: float, digits: int = DIGITS) -> float:
    """The number with the digits that a machine file has."""
    return float(f"{number:.{digits - 1}e}")
