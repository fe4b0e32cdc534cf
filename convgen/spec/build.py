"""From a filled-in form to a Layer: what its values mean, and which can't work (README, A layer file)."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, isqrt, prod

from convgen.algebra.conv import PHASES, SPATIAL_NAMES, TENSORS, Conv, Spatial
from convgen.errors import InputError
from convgen.spec.form import MAX_SIZE, LayerForm, fill_form
from convgen.spec.layer import Layer, Options
from convgen.spec.names import check_name
from convgen.spec.placement import build_distribution, build_grid, build_roles, check_letters, with_sizes
from convgen.spec.source import Source, locate
from convgen.spec.target import read_target

MAX_ELEMENTS = 2**62
# Along W, on a CPU, except in float64: oneDNN generates code for the gradient of x, in time and memory that grow with
# the square of the stride. With torch 2.13, 16384 takes it 5 to 25 s, once; 32767 a minute or more; 65536 crashes.
MAX_STRIDE = 2**14


def layer_from_dict(data: object, source: Source = Source()) -> Layer:  # noqa: B008 (frozen)
    """The layer that a mapping describes, in the layer file's keys.

    Args:
        data: plain data, as read from YAML or written by `layer_to_dict`.
        source: the file it is from, for messages and `Layer.source`.
    Raises:
        InputError: a key is unknown or missing, or a value can't work.
    Example:
        >>> data = {"name": "a", "layer": "conv1d", "input": [1, 2, 9], "out_channels": 4, "kernel_size": 3}
        >>> layer_from_dict({**data, "padding": "same", "grid": {"W": 2}}).conv.spatial[0].out
        9
    """
    try:
        return _layer(fill_form(data), source)
    except InputError as error:
        raise locate(error, source) from None


def check_options(layer: Layer) -> None:
    """Refuse options that the layer's target doesn't have."""
    for key, value in (("core_groups", layer.options.core_groups), ("plan", layer.options.plan)):
        if not layer.target.is_mesh and value != getattr(Options(), key):
            fact = f"options.{key} {value} is of target sw26010, the target is {layer.target.text}"
            raise InputError(fact, ("options", key), hint=f"target: sw26010, or remove {key}")


def check_stride(layer: Layer) -> None:
    """Refuse a stride on which the target's library hangs or crashes."""
    s = layer.conv.spatial[-1]
    if not layer.target.is_cpu or layer.dtype == "float64" or s.stride <= MAX_STRIDE:
        return
    fact = f"stride {s.stride} along {s.name}: ATen on a cpu takes up to {MAX_STRIDE} in {layer.dtype}"
    same = replace(s, stride=MAX_STRIDE).out == 1  # row of output, wherever the next would be
    hint = f"{MAX_STRIDE}, with the same output" if same else f"up to {MAX_STRIDE}"
    raise InputError(fact, ("stride",), hint=f"stride: {hint}; or dtype: float64, or a GPU's target")


def _layer(form: LayerForm, source: Source) -> Layer:
    check_name(form.name)
    conv = _conv(form)
    if form.memory_format == "channels_last" and len(conv.spatial) == 1:
        fact = f"{form.layer} has no memory_format channels_last"
        raise InputError(fact, ("memory_format",), hint="memory_format: contiguous")
    target = read_target(form.target)
    if form.machine == "":
        raise InputError("machine is empty", ("machine",), hint="a machine's name or file; or remove the line")
    grid = build_grid(form.grid)
    if form.distribution is not None:
        grid = with_sizes(form.distribution, grid, conv)
    if form.algorithm is not None:
        for key in ("distribution", "roles"):
            if getattr(form, key) is not None:
                fact = f"algorithm {form.algorithm} beside {key}: both say how the layer is laid out"
                raise InputError(fact, (key,), hint=f"remove algorithm, or {key}")
        check_letters(form.algorithm, grid, conv)
    if form.roles is not None and form.distribution is None:
        fact = "roles without distribution: roles say how a phase uses what distribution stores"
        raise InputError(fact, ("roles",), hint="add distribution: {x: ..., w: ..., y: ...}, or remove roles")
    return Layer(
        name=form.name,
        conv=conv,
        dtype=form.dtype,
        memory_format=form.memory_format or target.memory_format(len(conv.spatial)),
        usual_format=form.memory_format is None,
        grid=grid,
        algorithm=None if form.distribution else form.algorithm or "auto",
        distribution=build_distribution(form.distribution, grid, conv) if form.distribution else None,
        roles=build_roles(form.roles, grid, conv) if form.roles else (),
        target=target,
        machine=form.machine,
        options=Options(kernels=_kernels(form), **form.options.model_dump(exclude={"kernels"})),
        source=source,
    )


def _conv(form: LayerForm) -> Conv:
    names, transposed = SPATIAL_NAMES[int(form.layer[-2])], "transpose" in form.layer
    if len(form.input) != 2 + len(names):
        fact = f"input has {len(form.input)} extents, {form.layer} takes {2 + len(names)}"
        raise InputError(fact, ("input",), hint=f"input: [N, C, {', '.join(names)}]")
    batch, channels, *extents = form.input
    kernel = _per_dimension("kernel_size", form.kernel_size, form.layer, names)
    stride = _per_dimension("stride", form.stride, form.layer, names)
    dilation = _per_dimension("dilation", form.dilation, form.layer, names)
    more = _output_padding(form, names, stride, dilation)
    reach = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    padding = _padding(form, names, reach, stride)
    rows = zip(names, extents, kernel, stride, padding, dilation, strict=True)
    spatial = tuple(
        Spatial(name=name, extent=n, kernel=k, stride=s, pad_lo=lo, pad_hi=hi, dilation=d)
        for name, n, k, s, (lo, hi), d in rows
    )
    if transposed:
        spatial = tuple(_made_rows(s, o) for s, o in zip(spatial, more, strict=True))
    else:
        for i, s in enumerate(spatial):
            _check_extent(s, form, i)
    _check_groups(form.groups, channels, form.out_channels)
    conv = Conv(batch, channels, form.out_channels, spatial, form.groups, form.bias, transposed)
    for tensor in TENSORS:
        if conv.elements(tensor) >= MAX_ELEMENTS:
            extents = [d.extent for d in conv.dims(tensor)] + ([conv.taps] if tensor == "w" else [])
            fact = f"{tensor} has {'*'.join(map(str, extents))} = {prod(extents)} elements, 2**62 or more"
            raise InputError(fact, ("kernel_size" if tensor == "w" else "input",), hint="smaller extents")
    return conv


def _per_dimension(key: str, value: int | list[int], layer: str, names: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * len(names)
    if len(value) != len(names):
        fact = f"{key} has length {len(value)}, {layer} has spatial dimensions {', '.join(names)}"
        raise InputError(fact, (key,), hint=f"{key}: one number, or a list of {len(names)}")
    return tuple(value)


def _padding(
    form: LayerForm, names: tuple[str, ...], reach: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Zero rows below and above, per dimension. "same" as torch has it: d(K-1) in all, the odd one above."""
    match form.padding:
        case "valid":
            return ((0, 0),) * len(names)
        case "same" if "transpose" in form.layer:
            # As other libraries mean it: as many rows as x has, times the stride.
            cut = [r + 1 - s for r, s in zip(reach, stride, strict=True)]
            crops = [[max(c, 0) // 2, max(c, 0) - max(c, 0) // 2] for c in cut]
            more = f", output_padding: {[max(-c, 0) for c in cut]}" if min(cut) < 0 else ""
            rows = "stride times the rows of x" if max(stride) > 1 else "as many rows as x"
            fact = f"padding same on {form.layer}: it is defined for convolutions only"
            raise InputError(fact, ("padding",), hint=f"padding: {crops}{more} makes {rows}")
        case "same":
            if any(s != 1 for s in stride):
                fact = f"padding same with stride {list(stride)}: it is defined for stride 1 only"
                totals = [[total // 2, total - total // 2] for total in reach]
                raise InputError(fact, ("padding",), hint=f"stride: 1, or padding: {totals}")
            pairs = tuple((total // 2, total - total // 2) for total in reach)
            if max(max(pair) for pair in pairs) > MAX_SIZE:
                fact = f"padding same of {max(reach)} rows, more than 2**31 - 1 on a side"
                raise InputError(fact, ("padding",), hint="a smaller kernel_size or dilation")
            return pairs
        case int(rows):
            return ((rows, rows),) * len(names)
        case list(entries):
            if len(entries) != len(names):
                fact = f"padding has length {len(entries)}, {form.layer} has spatial dimensions {', '.join(names)}"
                hint = f"padding: one number, a list of {len(names)}, or {[[1, 1]] * len(names)}"
                raise InputError(fact, ("padding",), hint=hint)
            return tuple((e, e) if isinstance(e, int) else (e[0], e[1]) for e in entries)


def _output_padding(
    form: LayerForm, names: tuple[str, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """Rows above that x's rows leave open; torch's bound: fewer than the stride or the dilation."""
    if form.output_padding is None:
        return (0,) * len(names)
    if "transpose" not in form.layer:
        fact = f"output_padding on {form.layer}: it is of transposed convolutions"
        raise InputError(fact, ("output_padding",), hint=f"remove it, or layer: conv_transpose{len(names)}d")
    more = _per_dimension("output_padding", form.output_padding, form.layer, names)
    for i, (name, o, s, d) in enumerate(zip(names, more, stride, dilation, strict=True)):
        if o >= max(s, d):
            path = ("output_padding", i) if isinstance(form.output_padding, list) else ("output_padding",)
            fact = f"output_padding {o} along {name}, with stride {s} and dilation {d}: it is less than one of them"
            raise InputError(fact, path, hint=f"output_padding up to {max(s, d) - 1}")
    return more


def _made_rows(s: Spatial, output_padding: int) -> Spatial:
    """A transposed convolution's dimension by the rows of y, from one by the rows of x."""
    made = s.transposed(s.extent, output_padding)
    spanned = made.extent + s.pad_lo + s.pad_hi
    if made.extent < 1:
        more = f" + output padding {output_padding}" if output_padding else ""
        fact = (
            f"{s.name} has no output: {s.extent} rows with stride {s.stride} and a kernel that spans "
            f"{s.reach + 1}{more} make {spanned}, padding cuts off {s.pad_lo} + {s.pad_hi}"
        )
        raise InputError(fact, ("padding",), hint=f"padding of up to {spanned - 1} rows in all along {s.name}")
    if made.extent > MAX_SIZE:
        fact = f"{s.name} has {made.extent} rows of output, more than 2**31 - 1"
        raise InputError(fact, ("stride",), hint="a smaller stride, dilation or kernel_size")
    return made


def _check_extent(s: Spatial, form: LayerForm, dimension: int) -> None:
    padded = s.extent + s.pad_lo + s.pad_hi
    if s.out < 1:
        fact = (
            f"{s.name} has no output: {s.extent} rows + padding {s.pad_lo} + {s.pad_hi} = {padded}, "
            f"the kernel spans {s.reach + 1}" + (f" (dilation {s.dilation})" if s.dilation > 1 else "")
        )
        largest = (padded - 1) // s.dilation + 1
        hint = f"kernel_size up to {largest} or {s.reach + 1 - s.extent} rows of padding in all along {s.name}"
        path = ("kernel_size", dimension) if isinstance(form.kernel_size, list) else ("kernel_size",)
        raise InputError(fact, path, hint=hint)
    if s.out > MAX_SIZE:
        fact = f"{s.name} has {s.out} rows of output, more than 2**31 - 1"
        raise InputError(fact, ("padding",), hint="less padding")


def _check_groups(groups: int, channels: int, filters: int) -> None:
    if channels % groups == 0 and filters % groups == 0:
        return
    common = gcd(channels, filters)
    small = [d for d in range(1, isqrt(common) + 1) if common % d == 0]
    divisors = sorted({*small, *(common // d for d in small)})
    below = [d for d in divisors if d < groups][-2:]
    above = [d for d in divisors if d > groups][:2]
    fact = f"groups {groups} doesn't divide both C={channels} and out_channels={filters}"
    raise InputError(fact, ("groups",), hint=f"groups: {' or '.join(map(str, below + above))}")


def _kernels(form: LayerForm) -> tuple[tuple[str, str], ...]:
    """Local kernels by phase; making them checks whether they exist."""
    named = form.options.kernels
    return () if named is None else tuple((p, text) for p in PHASES if (text := getattr(named, p)) is not None)
