"""The verifier of a network's values: made once before they are read, as large and stored as readers take them."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.program.network import Program, label


def value_faults(program: Program) -> Iterator[str]:
    """What is wrong, in the order of rows."""
    values = program.values
    there = {name for name, value in values.items() if value.kind != "made"}
    for row in program.rows:
        for operand, name, stored in zip(row.signature.inputs, row.bound.reads, row.reads, strict=True):
            if name not in there:
                yield f"{label(row)} reads {name}, which no row before it makes"
                continue
            if values[name].shape != operand.shape:
                yield f"{label(row)}: {operand.name} has {list(operand.shape)}, {name} has {list(values[name].shape)}"
            if values[name].stored != stored:
                yield f"{label(row)}: {name} is taken to be stored as {stored}, it is as {values[name].stored}"
        for result, name, stored in zip(row.signature.results, row.bound.makes, row.makes, strict=True):
            if not name:
                continue
            if name not in values:
                yield f"{label(row)} makes {name}, which is no value of the network"
                continue
            if name in there:
                yield f"{label(row)} makes {name}, which is there before it"
            there.add(name)
            if values[name].shape != result.shape:
                yield f"{label(row)}: {result.name} has {list(result.shape)}, {name} has {list(values[name].shape)}"
            if values[name].stored != stored:
                yield f"{label(row)}: {name} is made to be stored as {stored}, others read it as {values[name].stored}"
    yield from (f"{name} is a value that no row makes" for name in values if name not in there)
    yield from (
        f"the output {name} is {value}, which no row makes" for name, value in program.outputs if value not in there
    )
    for buffer, value in program.updates:
        if buffer not in values or values[buffer].kind != "buffer":
            yield f"{buffer} becomes {value}, and is no buffer"
        elif value not in there:
            yield f"{buffer} becomes {value}, which no row makes"
        elif (values[buffer].shape, values[buffer].stored) != (values[value].shape, values[value].stored):
            yield f"{buffer} becomes {value}, which is stored otherwise"
