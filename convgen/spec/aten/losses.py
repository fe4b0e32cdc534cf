"""Cross entropy, with classes by number or as probabilities."""

from __future__ import annotations

from convgen.operations.losses import CrossEntropy
from convgen.operations.reductions import Reduce
from convgen.operations.softmax import Softmax
from convgen.spec.aten.reader import Reader, Tensor, knows, promoted
from convgen.spec.graph import Call, Ref


@knows("cross_entropy_loss")
def cross_entropy(reader: Reader, call: Call) -> bool:
    """(x, target, weight, reduction, ignore_index, label_smoothing)."""
    x, target, weight, reduction, ignore, smoothing = call.args
    x, target = reader.of(x), reader.of(target)
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    if target.floats:
        if weight is not None or x.shape != target.shape or len(x.shape) < 2 or 0 in x.shape:
            return False
        return _of_probabilities(reader, x, target, int(reduction), float(smoothing), y)  # type: ignore[arg-type]
    w = None if weight is None else reader.of(weight)
    return _of_classes(reader, x, target, w, int(reduction), int(ignore), float(smoothing), False, y)  # type: ignore[arg-type]


@knows("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(reader: Reader, call: Call) -> bool:
    """(x, target, weight, reduction, ignore_index)."""
    x, target, weight, reduction, ignore = call.args
    (result,) = call.results
    assert result is not None
    w, y = None if weight is None else reader.of(weight), reader.tensors[result.name]
    return _of_classes(reader, reader.of(x), reader.of(target), w, int(reduction), int(ignore), 0.0, True, y)  # type: ignore[arg-type]


def _of_classes(
    reader: Reader,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    smoothing: float,
    logs: bool,
    y: Tensor,
) -> bool:
    if len(x.shape) < 2 or target.shape != (x.shape[0], *x.shape[2:]) or target.dtype != "int64":
        return False
    operation = CrossEntropy(x.shape, ignore, smoothing, weight is not None, logs, reduction == 0)
    reads = [x, target, *([] if weight is None else [weight])]
    if reduction != 1:
        count = reader.made(f"{y.name}_count", y.shape, y.dtype)
        reader.add(operation, reads, [y.name, count.name])
        return True
    loss, count = (reader.made(f"{y.name}_{n}", (), y.dtype) for n in ("sum", "count"))
    reader.add(operation, reads, [loss.name, count.name])
    return reader.elementwise("div.Tensor", (Ref(loss.name), Ref(count.name)), y)


def _of_probabilities(reader: Reader, x: Tensor, target: Tensor, reduction: int, smoothing: float, y: Tensor) -> bool:
    """-sum over classes of target * log softmax(x)."""
    classes = x.shape[1]
    logs = reader.made(f"{y.name}_logs", x.shape, x.dtype)
    each = reader.made(f"{y.name}_each", x.shape, promoted(logs, target))
    if smoothing:
        scaled, soft = (reader.made(f"{y.name}_{n}", x.shape, target.dtype) for n in ("scaled", "soft"))
        reader.elementwise("mul.Scalar", (Ref(target.name), 1 - smoothing), scaled)
        reader.elementwise("add.Scalar", (Ref(scaled.name), smoothing / classes, 1), soft)
        target = soft
    reader.add(Softmax(x.shape, 1, True), [x], [logs.name])
    reader.elementwise("mul.Tensor", (Ref(logs.name), Ref(target.name)), each)
    over = (1,) if reduction == 0 else tuple(range(len(x.shape)))
    total = reader.made(f"{y.name}_sum", y.shape, y.dtype)
    if reduction == 1:  # the mean over all, times the classes: no factor holds the number of samples
        mean = reader.made(f"{y.name}_mean", y.shape, y.dtype)
        reader.add(Reduce("mean", x.shape, over), [each], [mean.name])
        return reader.elementwise("mul.Scalar", (Ref(mean.name), -float(classes)), y)
    reader.add(Reduce("sum", x.shape, over), [each], [total.name])
    return reader.elementwise("neg", (Ref(total.name),), y)
