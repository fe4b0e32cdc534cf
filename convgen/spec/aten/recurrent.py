"""Recurrent layers: split over samples, not over steps. A sample may be a row or a column of an image."""

from __future__ import annotations

from math import prod
from typing import cast

from convgen.operations.calls import Apart
from convgen.spec.aten.reader import Reader, Tensor, knows, slots
from convgen.spec.graph import Call, Ref


@knows("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(reader: Reader, call: Call) -> bool:
    """layer(x, hidden, parameters, has_biases, layers, dropout, train, bidirectional, batch_first)."""
    x, state = reader.of(call.args[0]), call.args[1]
    dropout, train, first = call.args[5], call.args[6], call.args[8]
    if len(x.shape) != 3 or (train and dropout):
        return False
    hidden = len(cast("tuple[Ref, ...]", state)) if isinstance(state, tuple) else 1
    found: list[Tensor] = []
    args = tuple(slots(a, reader, found) for a in call.args)
    steps, sample = (1, 0) if first else (0, 1)
    rows = ("N", "", "") if first else ("", "N", "")
    dims = (rows, *[("", "N", "")] * hidden, *(("",) * len(t.shape) for t in found[1 + hidden :]))
    made = [None if v is None else reader.tensors[v.name] for v in call.results]
    widths = found[1].shape[2] * (found[1].shape[0] // int(call.args[4]))  # type: ignore[arg-type]
    shapes = [(*x.shape[:2], widths), *[t.shape for t in found[1 : 1 + hidden]]]
    operation = Apart(
        call.op,
        args,
        tuple(t.shape for t in found),
        dims,
        tuple(shapes),
        (rows, *[("", "N", "")] * hidden),
        (("N", x.shape[sample]),),
        flops=2 * x.shape[steps] * sum(prod(t.shape) for t in found[1 + hidden :]),
    )
    reader.add(operation, found, [t.name if t else "" for t in made])
    return True
