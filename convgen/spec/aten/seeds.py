"""Random masks and noise: drawn from the network's seed by an element's number in the whole tensor."""

from __future__ import annotations

from convgen.operations.dropout import Bernoulli, Drawn, Dropout, Noise
from convgen.spec.aten.reader import Reader, Tensor, knows
from convgen.spec.graph import Call
from convgen.spec.graph_edit import NOISE

SEED = "convgen.seed"  # the buffer of a network that draws


def _seed(reader: Reader) -> tuple[Tensor, int]:
    """The seed, and how many rows draw before this one."""
    if SEED not in reader.tensors:
        reader.tensors[SEED] = Tensor(SEED, (2,), "int64", "buffer")
    return reader.tensors[SEED], sum(isinstance(r.operation, Dropout | Drawn) for r in reader.rows)


def dropped(reader: Reader, x: Tensor, p: float, makes: str) -> None:
    """Add a row that sets a share p of x's elements to 0."""
    seed, number = _seed(reader)
    reader.add(Dropout(x.shape, p, number), [x, seed], [makes])


@knows("dropout")
def dropout(reader: Reader, call: Call) -> bool:
    (result,) = call.results
    assert result is not None
    dropped(reader, reader.of(call.args[0]), float(call.args[1]), result.name)  # type: ignore[arg-type]
    return True


@knows("bernoulli.p")
def bernoulli(reader: Reader, call: Call) -> bool:
    """Only the operand's shape counts: masks of channels (dropout2d) and of samples (stochastic depth)."""
    (result,) = call.results
    assert result is not None
    y, (seed, number) = reader.tensors[result.name], _seed(reader)
    reader.add(Bernoulli(y.shape, float(call.args[1]), number, y.dtype), [seed], [y.name])  # type: ignore[arg-type]
    return True


@knows(*NOISE)
def noise(reader: Reader, call: Call) -> bool:
    """Only the operand's shape counts."""
    (result,) = call.results
    assert result is not None
    y, (seed, number) = reader.tensors[result.name], _seed(reader)
    if not y.floats:
        return False
    reader.add(Noise(y.shape, "normal" if "randn" in call.op else "uniform", number, y.dtype), [seed], [y.name])
    return True
