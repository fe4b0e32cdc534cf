"""Linear layers, softmax, sums."""

from __future__ import annotations

from convgen.operations.contraction import linear
from convgen.operations.reductions import Reduce
from convgen.operations.softmax import Softmax
from convgen.spec.aten.along import along_dims, dims_of
from convgen.spec.aten.convolutions import with_bias
from convgen.spec.aten.reader import Reader, knows
from convgen.spec.graph import Call


@knows("linear")
def a_linear_layer(reader: Reader, call: Call) -> bool:
    x, w, b = call.args
    x, w = reader.of(x), reader.of(w)
    if len(w.shape) != 2:
        return False
    with_bias(reader, call, linear(x.shape, w.shape[0]), [x, w], b, len(x.shape) - 1)
    return True


@knows("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
def softmax(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    if result is None or reader.tensors[result.name].dtype != x.dtype or not x.shape:
        return False
    d = int(call.args[1]) % len(x.shape)  # type: ignore[arg-type]
    reader.add(Softmax(x.shape, d, "log" in call.op), [x], [result.name])
    return True


@knows("mean", "mean.dim", "sum", "sum.dim_IntList")
def total(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    if result is None or not x.shape:
        return False
    given = call.args[1] if "." in call.op else None
    dims = dims_of(given, len(x.shape))
    if 0 in x.shape and call.op.startswith("mean"):
        return False
    if not x.floats or reader.tensors[result.name].dtype != x.dtype:
        return along_dims(reader, call, x, dims)
    how = "mean" if call.op.startswith("mean") else "sum"
    keep = "." in call.op and bool(call.args[2])
    reader.add(Reduce(how, x.shape, dims, keep), [x], [result.name])
    return True
