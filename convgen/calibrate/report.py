"""What a calibration found, as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from convgen.calibrate.result import NOISY, Calibration
from convgen.spec.text import aligned

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bytes_text(size: int) -> str:
    """Bytes in the largest unit that fits: 64 B, 256 KiB, 16 MiB.

    Example:
        >>> bytes_text(1 << 18), bytes_text(1000)
        ('256 KiB', '1000 B')
    """
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def unsteady_text(noise: float) -> str:
    """A sentence that says how far repeats of a message are apart, and why they may be."""
    return f"repeats of a message differ by {noise:.0%} (p80 - p20): other work here, or too few cores for the ranks"


def report_text(found: Calibration) -> str:
    """Messages and their lines, collectives beside the model, local work, and convolutions by shape."""
    local, machine = found.local, found.machine
    threads = f"; {local.threads} thread{'s' if local.threads > 1 else ''} a rank" if local.threads else ""
    lines = [f"{found.nodes.text}, {found.backend}, torch {found.torch}; {local.device}{threads}", ""]
    rows = [("messages", "sizes", "laps", "latency", "rate", "error", "worst")]
    for m in found.messages.values():
        sizes = f"{bytes_text(m.timings[0].size)} to {bytes_text(m.timings[-1].size)}"
        rate = f"{m.fit.bytes_per_s / 1e9:.3f} GB/s"
        error, worst = f"{m.fit.median_error:.1%}", f"{m.fit.worst_error:.1%}"
        rows.append((m.pattern.label, sizes, str(m.timings[0].laps), _us(m.fit.latency_s), rate, error, worst))
    lines += [*aligned(rows, range(2, len(rows[0]))), ""]
    rows = [("collective", "ranks", "sent", "in modules", "by the links", "links / modules")]
    rows += [
        (c.kind, str(c.ranks), bytes_text(c.sent_bytes), _us(c.measured_s), _us(c.modelled_s), f"{c.ratio:.2f}")
        for c in found.collectives
    ]
    lines += [*aligned(rows, range(2, len(rows[0]))), ""]
    rows = [("local, all ranks at once", "a rank")]
    rows.append(("copy, read and written", f"{local.bytes_per_s / 1e9:.2f} GB/s"))
    rows += [(f"matrix product, {dtype}", f"{flops / 1e9:.2f} GFLOP/s") for dtype, flops in local.flops_per_s.items()]
    reached = f"{local.convolution_flops_per_s / 1e9:.2f} GFLOP/s"
    rows.append((f"convolution, float32 (efficiency {machine.efficiency:.2f})", reached))
    rows.append(("around a local operation: of a layer's module", _us(machine.launch_s)))
    rows.append(("the same: of a network's package", _us(machine.rows_launch_s)))
    if machine.processor:
        rows.append(("of the processor: a message", _us(machine.message_processor_s)))
        rows.append(("of the processor: a MiB", _us(machine.processor_s_per_byte * (1 << 20))))
    rows.append(("memory", f"{local.memory_bytes / (1 << 30):.1f} GiB"))
    lines += [*aligned(rows, range(1, len(rows[0]))), ""]
    rows = [("convolution", "pixels", "groups", "forward", "backward-data", "backward-filter")]
    for one in found.shapes:
        s = one.shape
        forward, data, filter_ = (f"{rate / 1e9:.1f}" for rate in one.flops_per_s)
        text = f"{s.channels} to {s.filters}, {s.kernel}x{s.kernel}"
        rows.append((text, str(s.pixels), str(s.groups), forward, data, filter_))
    lines += [*aligned(rows, range(1, len(rows[0]))), "(GFLOP/s in float32)"]
    if guessed := [dtype for dtype, why in found.assumed.items() if why.startswith("assumed")]:
        lines.append(f"no time for {', '.join(guessed)}: assumed as fast as float32")
    if found.noise > NOISY:
        lines.append(f"unsteady: {unsteady_text(found.noise)}")
    return "\n".join(lines)


def report_json(found: Calibration, path: str) -> dict[str, Any]:
    """What `report_text` says as plain data, with every size's seconds.

    Args:
        path: the machine file's.
    """
    return {
        "file": path,
        "date": found.date,
        "quantile": found.quantile,
        "backend": found.backend,
        "torch": found.torch,
        "noise": found.noise,
        "nodes": found.nodes.count,
        "ranks_per_node": found.nodes.ranks,
        "messages": {
            key: {
                "what": m.pattern.label,
                **asdict(m.fit),
                "times": [
                    {"bytes": t.size, "seconds": t.seconds, "laps": t.laps, "spread": t.spread} for t in m.timings
                ],
            }
            for key, m in found.messages.items()
        },
        "collectives": [asdict(c) | {"modelled_over_measured": c.ratio} for c in found.collectives],
        "local": asdict(found.local),
        "shapes": [asdict(one) for one in found.shapes],
        "assumed": dict(found.assumed),
        "machine": asdict(found.machine) | {"peak_flops": dict(found.machine.peak_flops)},
    }


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
