"""A calibration as a machine file: the keys of tuning/machines, each with how its number was found."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap

from convgen.calibrate.collectives import KINDS, SIZES
from convgen.calibrate.links import Messages
from convgen.calibrate.local import CONVOLUTION, COPIED
from convgen.calibrate.report import bytes_text, unsteady_text
from convgen.calibrate.result import DIGITS, NOISY, Calibration
from convgen.calibrate.shapes import SHAPES
from convgen.cost.machine import Level, Machine
from convgen.cost.machine_measured import PHASES, left_out
from convgen.cost.machines import load_machine
from convgen.errors import InputError, InternalError
from convgen.files import check_file
from convgen.spec.formats import FORMAT, KEY

SUFFIXES = (".yaml", ".yml")
_COLUMN = 34  # where comments begin, as in the files shipped


def machine_text(found: Calibration) -> str:
    """The file's text."""
    machine, local, nodes = found.machine, found.local, found.nodes
    kind = "cpu" if local.threads else "cuda"
    lines = [
        *_header(found),
        f"{KEY}: {FORMAT}",
        f"name: {_quoted(machine.name)}",
        f"device: {_quoted(machine.device)}",
    ]
    lines.append(f"ranks_per_node: {machine.ranks_per_node}")
    if len(machine.levels) == 1:
        one = found.messages.get("inside") or found.messages["across"]
        lines += _links(machine.levels[0], one, "", "link_bytes_per_s")
    else:
        lines.append("levels:")
        for level, key in zip(machine.levels, ("inside", "across"), strict=True):
            ranks = [] if level.ranks is None else [f"    ranks: {level.ranks}"]
            lines += [f"  - name: {level.name}", *ranks, *_links(level, found.messages[key], "    ", "bytes_per_s")]
            if level.shared_bytes_per_s is not None:
                shared = found.messages["shared"]
                said = f"measured: {nodes.ranks} times one's rate while all send; {_error(shared)}"
                lines += _entry("    shared_bytes_per_s", level.shared_bytes_per_s, said)
    share = "the device's" if kind == "cuda" else f"a share of 1/{nodes.ranks} of a node's"
    lines += _entry("memory_bytes", machine.memory_bytes or 0.0, share)
    copied = f"measured: a copy of {bytes_text(COPIED[kind])}, read and written, all ranks at once"
    lines += _entry("memory_bytes_per_s", machine.memory_bytes_per_s, copied)
    lines += _comment("peak_flops_per_s:", "measured: matrix products, all ranks at once")
    faster = local.convolution_flops_per_s > local.flops_per_s["float32"]
    remarks = {**found.assumed, **({"float32": "the convolution's below, which is faster"} if faster else {})}
    for dtype, flops in machine.peak_flops:
        lines += _entry(f"  {dtype}", flops, remarks.get(dtype, ""))
    reached = f"measured: {CONVOLUTION}, float32, forward, over float32's peak"
    lines += _entry("efficiency", machine.efficiency, reached)
    said = "measured: a third of what a module's smallest step takes beside its collectives"
    lines += _entry("launch_s", machine.launch_s, said)
    if machine.network_launch_s is not None:
        said = "measured: what the rest lacks of a small network's step, over its launches"
        lines += _entry("network_launch_s", machine.network_launch_s, said)
    if machine.processor:
        said = "measured: of a message that another thread sends, the processor's time"
        lines += _entry("message_processor_s", machine.message_processor_s, said)
        lines += _entry("processor_s_per_byte", machine.processor_s_per_byte, "the same")
    if machine.uncertainty:
        said = ", ".join(f"{key}: {share:g}" for key, share in machine.uncertainty)
        lines += _comment(f"uncertainty: {{{said}}} ", "of seconds, one standard deviation: each by the others")
    return "\n".join([*lines, *_misfits(machine), *_probes(machine), ""])


def _misfits(machine: Machine) -> list[str]:
    if not machine.misfits:
        return []
    lines = ["measured_collectives:  # in modules, packing and adding included, over what the links above give"]
    for m in machine.misfits:
        over = ", ".join(f"{n:.{DIGITS}g}" for n in m.over_model)
        lines.append(
            f"  - {{collective: {m.kind}, ranks: {m.ranks}, bytes: [{_whole(m.bytes)}], over_model: [{over}]}}"
        )
    return lines


def _whole(numbers: Sequence[float]) -> str:
    return ", ".join(f"{n:.0f}" for n in numbers)


def _probes(machine: Machine) -> list[str]:
    if not machine.probes:
        return []
    lines = [
        "measured_convolutions:  # float32: forward, backward-data, backward-filter over the peak, memory included"
    ]
    for p in machine.probes:
        kinds = f"groups: {p.groups}, " if p.groups > 1 else ""
        kinds += f"step: {p.step}, " if p.step > 1 else ""
        shape = f"channels: {p.channels}, filters: {p.filters}, taps: {p.taps}, pixels: {p.pixels}, {kinds}"
        lines.append(f"  - {{{shape}efficiency: [{', '.join(f'{e:g}' for e in p.efficiency)}]}}")
    return [*_held_out(machine), *lines]


def _held_out(machine: Machine) -> list[str]:
    """A remark that says how far a probe's share of the peak is off when it is interpolated from the others."""
    off = {phase: sorted(abs(r - 1) for r in left_out(machine.probes, phase)) for phase in PHASES}
    said = [f"{phase.replace('_', '-')} {median(some):.0%} and {some[-1]:.0%}" for phase, some in off.items() if some]
    return _remark(f"Each by all others, off in the median and at most: {', '.join(said)}.") if said else []


def _header(found: Calibration) -> list[str]:
    threads = found.local.threads
    each = f", {threads} thread{'s' if threads > 1 else ''} each" if threads else ", a GPU each"
    lines = [
        f"# Measured by `convgen calibrate` on {found.date}: {found.nodes.text}{each}; {found.backend}, "
        f"torch {found.torch}.",
    ]
    if found.nodes.count == 1:
        lines.append("# One node: links between nodes were not measured, and are taken to be like those inside.")
    elif found.nodes.ranks == 1:
        lines.append("# One rank a node: there are no links inside a node.")
    ratios = [(kind, [c.ratio for c in found.collectives if c.kind == kind]) for kind in KINDS]
    held = ", ".join(f"{kind} {_range(some)}" for kind, some in ratios if some)
    if held:
        lines += _remark(f"Collectives modelled by the links alone, over what they take (corrected below): {held}.")
    if found.quantile != 0.5:
        lines.append(f"# Of repeats the quantile {found.quantile:g} counts, not the median.")
    if missing := _not_measured(found):
        lines += _remark(f"Not measured: {', '.join(missing)}.")
    if (noise := found.noise) > NOISY:
        lines.append(f"# Unsteady: {unsteady_text(noise)}.")
    return lines


def _remark(text: str) -> list[str]:
    return wrap(text, 118, initial_indent="# ", subsequent_indent="# ")


def _not_measured(found: Calibration) -> list[str]:
    """What was not measured, as there was too little time, or too few ranks."""
    seen = {c.kind for c in found.collectives}
    missing = [kind for kind in KINDS if kind not in seen]
    largest = max((c.sent_bytes for c in found.collectives), default=0)
    missing += [f"collectives that send more than {bytes_text(largest)} a rank"] * (largest < SIZES[-1] // 2)
    missing += [f"{len(SHAPES) - len(found.shapes)} of {len(SHAPES)} shapes"] * (len(found.shapes) < len(SHAPES))
    return [*missing, *(d for d, why in found.assumed.items() if why.startswith("assumed"))]


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _links(level: Level, messages: Messages, indent: str, rate: str) -> list[str]:
    return [
        *_entry(f"{indent}latency_s", level.latency_s, f"measured: {_said(messages)}"),
        *_entry(f"{indent}{rate}", level.bytes_per_s, f"the same; {_error(messages)}"),
    ]


def _said(messages: Messages) -> str:
    sizes = [t.size for t in messages.timings]
    return f"{messages.pattern.label}, {bytes_text(sizes[0])} to {bytes_text(sizes[-1])}"


def _error(messages: Messages) -> str:
    fit = messages.fit
    return f"off by {fit.median_error:.0%} (median), {fit.worst_error:.0%} (worst)"


def _entry(key: str, number: float, comment: str) -> list[str]:
    mantissa, _, exponent = f"{number:.{DIGITS - 1}e}".partition("e")
    text = f"{number:.{DIGITS}g}" if 0.01 <= number <= 1 else f"{mantissa}e{int(exponent):+d}"
    return _comment(f"{key}: {text}", comment)


def _comment(text: str, comment: str) -> list[str]:
    return [f"{text:<{_COLUMN}}# {comment}" if comment else text]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def check_output(path: Path) -> None:
    """Raises InputError where the file could not be written, or `--machine` would not read it."""
    check_file(path, "-o")
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} is no name for a machine file", hint=f"-o {path.with_suffix('.yaml')}")


def write_machine(found: Calibration, path: Path) -> None:
    """Write the file, all of it or nothing, once it has been read back as the machine that it stands for.

    Raises:
        InputError: it can't be written.
        InternalError: it reads back as another machine.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
            draft = Path(folder, path.name)
            draft.write_text(machine_text(found), encoding="utf-8")
            if load_machine(str(draft)) != found.machine:
                raise InternalError(f"{path} reads back as another machine")
            os.replace(draft, path)
    except OSError as error:
        fact = f"cannot write {path}: {error.strerror}"
        raise InputError(fact, hint="-o FILE in a folder you may write to") from error
