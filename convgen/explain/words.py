"""Layers, layouts, roles and ranks in words, for the table and the picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.notation import axes_text
from convgen.algebra.roles import Roles
from convgen.program.nodes import Phase, Schedule
from convgen.program.text import dim_names
from convgen.spec.layer import Layer

PHASE_TITLE: dict[Phase, str] = {
    "forward": "forward",
    "backward_data": "backward-data",
    "backward_filter": "backward-filter",
}
INDEX_WORDS = {
    "N": "samples",
    "C": "channels",
    "F": "filters",
    "G": "groups",
    "D": "slices",
    "H": "rows",
    "W": "columns",
}


def _per_dimension(values: Sequence[object]) -> str:
    """The text of one value where all dimensions have the same, else of one for each, such as 1x2. (A kernel is written
    in full elsewhere, as 3x3.)"""
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def layer_line(layer: Layer) -> str:
    """`conv2d N=8 C=64 H=14 W=14 F=96 K=3x3 stride=1 padding=1 float32`."""
    conv = layer.conv
    words = [layer.kind, f"N={conv.batch}", f"C={conv.channels}"]
    words += [f"{d.name}={d.extent}" for d in conv.dims("x")[2:]]
    words += [f"F={conv.filters}", "K=" + "x".join(str(s.kernel) for s in conv.spatial)]
    words += [f"stride={_per_dimension([s.stride for s in conv.spatial])}", f"padding={_padding(conv.spatial)}"]
    if any(s.output_padding for s in conv.spatial):
        words.append(f"output_padding={_per_dimension([s.output_padding for s in conv.spatial])}")
    if any(s.dilation != 1 for s in conv.spatial):
        words.append(f"dilation={_per_dimension([s.dilation for s in conv.spatial])}")
    if conv.groups != 1:
        words.append(f"groups={conv.groups}")
    if conv.bias:
        words.append("bias")
    words.append(layer.dtype)
    if layer.memory_format != "contiguous":
        words.append(layer.memory_format)
    return " ".join(words)


def output_line(conv: Conv) -> str:
    """`Ho=14 Wo=14`."""
    return " ".join(f"{d.name}o={d.extent}" for d in conv.dims("y")[2:])


def _padding(spatial: Sequence[Spatial]) -> str:
    each = [str(s.pad_lo) if s.pad_lo == s.pad_hi else f"({s.pad_lo},{s.pad_hi})" for s in spatial]
    return _per_dimension(each)


def splits_text(layout: Layout, schedule: Schedule) -> str:
    """`N over data, C over chan; copies over none`; copies over an axis hold the same values."""
    names = dim_names(layout, transposed=schedule.transposed)
    parts = [f"{name} over {axes_text(a)}" for name, a in zip(names, layout.axes, strict=True) if a]
    split = ", ".join(parts) or "whole on every rank"
    return f"{split}; copies over {', '.join(copy_axes(layout, schedule)) or 'none'}"


def copy_axes(layout: Layout, schedule: Schedule) -> Axes:
    """Axes along which ranks hold the same block, those of one rank left out."""
    busy = layout.used | set(layout.partial)
    return tuple(name for name, size in schedule.grid.axes if size > 1 and name not in busy)


def roles_words(roles: Roles) -> str:
    """`splits samples (N) over data, channels (C) over chan`."""
    parts = [f"{INDEX_WORDS[role]} ({role}) over {axes_text(axes)}" for role, axes in roles.nests]
    return "splits " + ", ".join(parts) if parts else "every rank does all of it"


def ranks_text(ranks: Iterable[int], most: int = 6) -> str:
    """The text of a set of ranks, short: `3`, `0-3`, `0,2`, `0,4,…,28`.

    Example:
        >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 2]), ranks_text(range(0, 32, 4))
        ('0-3', '0,2', '0,4,…,28')
    """
    known = sorted(ranks)
    runs: list[list[int]] = []
    for r in known:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    words = [",".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(words) > most:
        words = [words[0], words[1], "…", words[-1]]
    return ",".join(words)


def counted(count: int, index: str) -> str:
    """`1 sample`, `8 channels`: a number of an index's elements."""
    word = INDEX_WORDS[index]
    return f"{count} {word.removesuffix('s') if count == 1 else word}"


def plural(count: int, word: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def bytes_text(count: float) -> str:
    """`0 B`, `512 B`, `1.5 KB`, `98 MB`; thousands, not 1024s.

    Example:
        >>> bytes_text(0), bytes_text(512), bytes_text(1536), bytes_text(98_000_000)
        ('0 B', '512 B', '1.54 kB', '98 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def seconds_text(seconds: float, micro: str = "µs") -> str:
    """`0 s`, `12 µs`, `1.5 ms`.

    Example:
        >>> seconds_text(0.0), seconds_text(1.2e-5), seconds_text(2.5)
        ('0 s', '12 µs', '2.5 s')
    """
    if seconds <= 0:
        return "0 s"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, micro)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
