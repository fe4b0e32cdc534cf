"""Fourier transforms; in graphs each call is along one dimension (spec/exported_complex.py)."""

from __future__ import annotations

from typing import Any

from convgen.operations.fourier import Fourier
from convgen.spec.aten.reader import Reader, knows
from convgen.spec.graph import FOURIER, Call


@knows(FOURIER)
def a_transform(reader: Reader, call: Call) -> bool:
    kind, re, im, *rest = call.args
    settings: Any = rest
    reads = [reader.of(part) for part in (re, im) if part is not None]
    operation = Fourier(reads[0].shape, settings[0], kind, *settings[1:])  # type: ignore[arg-type]
    makes = [v.name if v else reader.made("unread", o.shape, reads[0].dtype).name
             for v, o in zip(call.results, operation.signatures[0].results, strict=True)]  # fmt: skip
    reader.add(operation, reads, makes)
    return True
