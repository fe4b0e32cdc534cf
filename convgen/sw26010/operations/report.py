"""What `convgen sw26010 operations` prints: every operation of a training step, run on the mesh, with its events."""

from __future__ import annotations

from typing import Any

import numpy as np

from convgen.errors import InputError
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.operations.channels import ChannelMap, ChannelSums
from convgen.sw26010.operations.concatenation import Concatenation
from convgen.sw26010.operations.local_response import LocalResponse
from convgen.sw26010.operations.rows import RowShift, RowSums
from convgen.sw26010.operations.softmax_loss import SoftmaxLoss
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import Operation, operation_seconds, run_operation


def operations_of(n: int, c: int, pixels: int, dtype: Dtype) -> dict[str, Operation]:
    """Those of x [N, C, PIXELS], of scores [N, C], and of the weights that make C of C channels."""
    elements, planes = n * c * pixels, (n, c, pixels)
    return {
        "relu": Stream("relu", elements, dtype),
        "relu_backward": Stream("relu_backward", elements, dtype),
        "sum": Stream("add", elements, dtype),
        "dropout": Stream("dropout", elements, dtype, (2.0,)),
        "lrn": LocalResponse(n, c, pixels, 5, dtype=dtype),
        "lrn_backward": LocalResponse(n, c, pixels, 5, dtype=dtype, backward=True),
        "moments": ChannelSums(*planes, dtype, "moments"),
        "normalise": ChannelMap(*planes, dtype, "normalise"),
        "normalise_sums": ChannelSums(*planes, dtype, "products"),
        "normalise_backward": ChannelMap(*planes, dtype, "combine"),
        "bias": ChannelMap(*planes, dtype, "shift"),
        "bias_backward": ChannelSums(*planes, dtype, "total"),
        "concatenation": Concatenation(n, (c * pixels, c * pixels), dtype),
        "concatenation_backward": Concatenation(n, (c * pixels, c * pixels), dtype, backward=True),
        "row_bias": RowShift(n, c, dtype),
        "row_bias_backward": RowSums(n, c, dtype),
        "softmax_loss": SoftmaxLoss(n, c, dtype),
        "softmax_loss_backward": SoftmaxLoss(n, c, dtype, backward=True),
        "sgd": Stream("sgd", c * c, dtype, (0.01, 5e-4)),
        "momentum": Stream("momentum", c * c, dtype, (0.01, 0.9, 5e-4)),
    }


def operation_program(operations: dict[str, Operation], name: str) -> str:
    """Text of the program that one CPE runs. Raises InputError: no operation of this name."""
    if name not in operations:
        raise InputError(f"no operation is named {name}", hint=", ".join(operations))
    return operations[name].program()


def operations_text(operations: dict[str, Operation]) -> str:
    """A line an operation. Raises MeshFault: a run's events are not those of the closed form."""
    rng, rates = np.random.default_rng(0), taken_rates()
    rows: list[list[str]] = []
    for name, operation in operations.items():
        few = min(2, operation.classes) if isinstance(operation, SoftmaxLoss) else 2  # labels, or a mask's 0 and 1
        operands: list[Any] = [
            rng.integers(0, few, place.shape) if place.name in ("labels", "mask") else rng.standard_normal(place.shape)
            for place in operation.reads
        ]
        _, counts = run_operation(operation, *operands)
        rows.append([
            name, *(f"{n:,}" for n in (counts.get_bytes, counts.put_bytes)),
            "-".join(str(f(counts.get)) for f in (min, max)), f"{counts.messages:,}",
            f"{counts.vadd + counts.vmax:,}", f"{counts.functions:,}",
            f"{operation_seconds(operation, rates) * 1e3:.3f}",
        ])  # fmt: skip
    head = ("operation", "DMA get B", "DMA put B", "by B", "messages", "vectors", "functions", "ms")
    return f"{table(head, rows)}\nrun: events equal the closed forms"
