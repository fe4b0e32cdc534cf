# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false
# (what torch leaves untyped)
"""TF32: what torch's switches say of float32 on a GPU, and networks that take TF32 whatever the switches say.

The switches are read by the newer name, which is what ATen asks and what the older ones set; the older ones can't be
read where both were set.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch

SWITCHES: dict[str, Any] = {
    "convolutions": torch.backends.cudnn.conv,
    "products": torch.backends.cuda.matmul,
    "recurrent layers": torch.backends.cudnn.rnn,
}


def takes_tf32(what: str) -> bool:
    return SWITCHES[what].fp32_precision == "tf32"


def taken() -> str:
    """The operations that take TF32 now, in words."""
    return ", ".join(filter(takes_tf32, SWITCHES)) or "none"


class Taken:
    """A context in which all products take TF32. Torch's switches are the process's: the first thread to enter turns
    them on, and the last one to leave turns off again those that were off."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, dict[str, str]()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            for what in () if self._inside > 1 else SWITCHES:
                if not takes_tf32(what):
                    self._before[what] = SWITCHES[what].fp32_precision
                    SWITCHES[what].fp32_precision = "tf32"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            while not self._inside and self._before:
                what, precision = self._before.popitem()
                SWITCHES[what].fp32_precision = precision


TAKEN = Taken()
