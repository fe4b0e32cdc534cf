"""Convolutions, transposed ones, and their biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convgen.algebra.conv import SPATIAL_NAMES, Conv, Spatial
from convgen.operations.convolution import Convolution
from convgen.operations.pointwise import bias
from convgen.operations.transposed import transposed_convolution
from convgen.spec.aten.reader import Reader, Tensor, knows, many, one_sample, promoted
from convgen.spec.graph import Call, Graph, Ref, refs


@knows("conv1d", "conv2d", "conv3d")
@one_sample
def convolution(reader: Reader, call: Call) -> bool:
    """y = conv(x, w, bias, stride, padding, dilation, groups); padding may be "same", "valid", or pairs."""
    x, w, b, stride, padding, dilation, groups = call.args
    x, w = reader.of(x), reader.of(w)
    n = len(w.shape) - 2
    if len(x.shape) != n + 2:
        return False
    dilations = many(dilation, n)
    reach = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
    if padding == "valid":
        pads = [(0, 0)] * n
    elif padding == "same":
        pads = [(r // 2, r - r // 2) for r in reach]
    else:
        pads = [p if isinstance(p, tuple) else (p, p) for p in many(padding, n)]
    sides = tuple(
        Spatial(name, extent, k, s, below, above, d)
        for name, extent, k, s, (below, above), d in zip(
            SPATIAL_NAMES[n], x.shape[2:], w.shape[2:], many(stride, n), pads, dilations, strict=True
        )
    )
    conv = Conv(x.shape[0], x.shape[1], w.shape[0], sides, int(groups))  # type: ignore[arg-type]
    with_bias(reader, call, Convolution("forward", conv), [x, w], b)
    return True


def own_padding(graph: Graph) -> dict[int, Call | None]:
    """Calls of convolutions that take over zeros around their x as padding, where nothing else reads the padded x.

    Args:
        graph: its sizes are numbers.
    Returns:
        By number, a convolution's call with a pair for each dimension as its padding; None for the call that padded its
        x.
    """
    kept = {v for _, v in (*graph.outputs, *graph.updates)}
    readers: dict[str, list[int]] = {}
    for i, call in enumerate(graph.calls):
        for name in refs(call.args):
            readers.setdefault(name, []).append(i)
    found: dict[int, Call | None] = {}
    for i, call in enumerate(graph.calls):
        made = call.results[0] if call.op in ("pad", "constant_pad_nd") else None
        if made is None or made.name in kept or len(readers.get(made.name, ())) != 1:
            continue
        (number,) = readers[made.name]
        one, n = graph.calls[number], len(made.shape) - 2
        zeros = _zeros(call, n)
        if zeros is None or one.op != f"conv{n}d" or one.args[0] != Ref(made.name) or one.args[4] == "same":
            continue
        more = (0,) * n if one.args[4] == "valid" else many(one.args[4], n)
        pairs = tuple((p + below, p + above) for p, (below, above) in zip(more, zeros, strict=True))
        found[i] = None
        found[number] = replace(one, args=(call.args[0], *one.args[1:4], pairs, *one.args[5:]))
    return found


def _zeros(call: Call, n: int) -> list[tuple[int, int]] | None:
    """Rows of zeros below and above for the last n dimensions, in their order; None where it pads in another way."""
    mode, fill = ("constant", call.args[2]) if call.op == "constant_pad_nd" else (call.args[2], call.args[3])
    sides: tuple[int, ...] = call.args[1]  # type: ignore[assignment]
    if mode != "constant" or fill or n < 1 or min(sides, default=0) < 0 or any(sides[2 * n :]):
        return None
    sides = (*sides, *(0,) * (2 * n - len(sides)))
    return [(sides[2 * k], sides[2 * k + 1]) for k in range(n)][::-1]


@knows("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
@one_sample
def transposed(reader: Reader, call: Call) -> bool:
    """y = conv_transpose(x, w, bias, stride, padding, output_padding, groups, dilation)."""
    x, w, b, stride, padding, more, groups, dilation = call.args
    x, w = reader.of(x), reader.of(w)
    n = len(w.shape) - 2
    if len(x.shape) != n + 2:
        return False
    sides = tuple(
        Spatial(name, extent, k, s, p, p, d)
        for name, extent, k, s, p, d in zip(
            SPATIAL_NAMES[n],
            x.shape[2:],
            w.shape[2:],
            many(stride, n),
            many(padding, n),
            many(dilation, n),
            strict=True,
        )
    )
    filters = w.shape[1] * int(groups)  # type: ignore[arg-type]
    operation = transposed_convolution(x.shape, filters, sides, many(more, n), int(groups))  # type: ignore[arg-type]
    with_bias(reader, call, operation, [x, w], b)
    return True


def with_bias(reader: Reader, call: Call, operation: object, reads: Sequence[Tensor], b: object, d: int = 1) -> None:
    """Add an operation, and a row that adds a vector over dimension d to its result."""
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    if b is None:
        reader.add(operation, reads, [y.name])  # type: ignore[arg-type]
        return
    summed = reader.made(f"{y.name}_sum", y.shape, y.dtype)
    reader.add(operation, reads, [summed.name])  # type: ignore[arg-type]
    vector = reader.of(b)
    if vector.shape != (y.shape[d],):  # a linear layer's may be anything that broadcasts
        reader.elementwise("add.Tensor", (Ref(summed.name), b, 1), y)
        return
    reader.add_in(promoted(summed, vector), bias(y.shape, d), [summed, vector], [y.name])
