"""convgen: a compiler for distributed convolutions.

`from_torch`, `parallelize` (convgen/parallel.py), `serve` (convgen/serving.py), `criterion` (convgen/losses.py),
`methods` (convgen/one_set.py) and `stream` (convgen/streams.py) are imported on first use, so that `import convgen` is
cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LATE = {  # typed in __init__.pyi
    "from_torch": "parallel",
    "parallelize": "parallel",
    "criterion": "losses",
    "methods": "one_set",
    "serve": "serving",
    "stream": "streams",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"convgen.{_LATE[name]}"), name)
    raise AttributeError(f"module 'convgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LATE]
