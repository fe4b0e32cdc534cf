"""Linear layers, products, softmax, losses, dropout, sums."""

from __future__ import annotations

from convgen.operations.calls import Elementwise, Slot
from convgen.operations.contraction import linear, matrix_product
from convgen.operations.dropout import Dropout
from convgen.operations.losses import CrossEntropy, SquaredError
from convgen.operations.reductions import Reduce
from convgen.operations.softmax import Softmax
from convgen.spec.aten.convolutions import with_bias
from convgen.spec.aten.reader import Reader, Tensor, knows
from convgen.spec.graph import Call

SEED = "convgen.seed"  # the buffer of a network that drops


@knows("linear")
def a_linear_layer(reader: Reader, call: Call) -> bool:
    x, w, b = call.args
    x, w = reader.of(x), reader.of(w)
    if len(w.shape) != 2:
        return False
    with_bias(reader, call, linear(x.shape, w.shape[0]), [x, w], b, len(x.shape) - 1)
    return True


@knows("mm", "bmm", "matmul")
def product(reader: Reader, call: Call) -> bool:
    a, b = (reader.of(v) for v in call.args[:2])
    (result,) = call.results
    if result is None or len(a.shape) != len(b.shape) or len(a.shape) < 2 or a.shape[:-2] != b.shape[:-2]:
        return False
    operation = matrix_product(a.shape[:-2], a.shape[-2], a.shape[-1], b.shape[-1])
    reader.add(operation, [a, b], [result.name])
    return True


@knows("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
def softmax(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    if result is None or reader.tensors[result.name].dtype != x.dtype:
        return False
    d = int(call.args[1]) % len(x.shape)  # type: ignore[arg-type]
    reader.add(Softmax(x.shape, d, "log" in call.op), [x], [result.name])
    return True


@knows("dropout")
def dropout(reader: Reader, call: Call) -> bool:
    """Masks are numbered by the drops before them."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    p = float(call.args[1])  # type: ignore[arg-type]
    if SEED not in reader.tensors:
        reader.tensors[SEED] = Tensor(SEED, (2,), "int64", "buffer")
    number = sum(isinstance(r.operation, Dropout) for r in reader.rows)
    reader.add(Dropout(x.shape, p, number), [x, reader.tensors[SEED]], [result.name])
    return True


@knows("mean", "mean.dim", "sum", "sum.dim_IntList")
def total(reader: Reader, call: Call) -> bool:
    x, (result,) = reader.of(call.args[0]), call.results
    if result is None or not x.floats or reader.tensors[result.name].dtype != x.dtype:
        return False
    how = "mean" if call.op.startswith("mean") else "sum"
    given = call.args[1] if "." in call.op else None
    dims = tuple(sorted(int(d) % len(x.shape) for d in given)) if given else tuple(range(len(x.shape)))  # type: ignore[union-attr,arg-type]
    keep = "." in call.op and bool(call.args[2])
    reader.add(Reduce(how, x.shape, dims, keep), [x], [result.name])
    return True


@knows("mse_loss")
def mse_loss(reader: Reader, call: Call) -> bool:
    x, y, reduction = call.args
    x, y = reader.of(x), reader.of(y)
    (result,) = call.results
    if result is None or reduction != 1 or x.shape != y.shape:
        return False
    reader.add(SquaredError(x.shape), [x, y], [result.name])
    return True


@knows("cross_entropy_loss")
def cross_entropy(reader: Reader, call: Call) -> bool:
    """cross_entropy_loss(x, target, weight, reduction, ignored target, smoothing) of classes by number."""
    x, target, w, reduction, ignore, smoothing = call.args
    x, target = reader.of(x), reader.of(target)
    (result,) = call.results
    if result is None or reduction not in (1, 2) or target.floats or len(x.shape) < 2:
        return False
    weights = [reader.of(w)] if w is not None else []
    operation = CrossEntropy(x.shape, int(ignore), float(smoothing), bool(weights))  # type: ignore[arg-type]
    count = reader.made(f"{result.name}_count", (), x.dtype)
    if reduction == 2:
        reader.add(operation, [x, target, *weights], [result.name, count.name])
        return True
    total = reader.made(f"{result.name}_sum", (), x.dtype)
    reader.add(operation, [x, target, *weights], [total.name, count.name])
    mean = Elementwise("div.Tensor", (Slot(0), Slot(1)), (), ((), ()), (True, False))
    reader.add(mean, [total, count], [result.name])
    return True
