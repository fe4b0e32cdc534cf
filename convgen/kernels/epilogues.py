"""The steps that a kernel does element by element behind its sum, as lines of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from convgen.operations.row import Epilogue


def keeps(epilogue: Epilogue) -> bool:
    """Whether backward needs the sum itself, which then is written, too: some step's gradient reads that step's input,
    or the result of a step that isn't the last."""
    return any(s.back == "input" for s in epilogue) or any(s.back == "result" for s in epilogue[:-1])


def tensors(epilogue: Epilogue) -> list[str]:
    """Names of a kernel's arguments between w and y: other operands, and where the sum itself is written."""
    return [*(name for name, _ in operands(epilogue)), *(["before"] if keeps(epilogue) else [])]


def operands(epilogue: Epilogue) -> Iterator[tuple[str, str]]:
    """The name of each other operand, and how it lies in memory."""
    kinds = (kind for step in epilogue for kind, _ in step.operands)
    return ((f"with_{n}", kind) for n, kind in enumerate(kinds))


def lines(
    epilogue: Epilogue, element: Callable[[str], str], vector: Callable[[str, int], str], keep: str, of: str = "acc"
) -> list[str]:
    """Lines that do the steps on the values of the name `of`.

    Args:
        element: gives the text of the values of an operand that lies as the result does.
        vector: gives the text of a vector over channels, by the operand's number.
        keep: the statement that writes the sum; "" where a gradient makes it again.
    """
    found = ["if KEEP:", f"    {keep}"] if keep and keeps(epilogue) else []
    names = operands(epilogue)
    for step in epilogue:
        values: list[str] = []
        for kind, count in step.operands:
            name, _ = next(names)
            values += [element(name)] if kind == "element" else [vector(name, n) for n in range(count)]
        found.append(f"{of} = {step.text.format(*values, x=of)}")
    return found


def no_vector(name: str, n: int) -> str:
    """A `vector` for steps that read no vectors over channels, as norms' steps."""
    raise AssertionError("a norm's steps read no vectors")
