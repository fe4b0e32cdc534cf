"""The options of a script: by name a default, or a default and what it means."""

from __future__ import annotations

import argparse
from typing import Any


def options(doc: str | None, **wanted: Any) -> argparse.Namespace:
    """What stands on the command line: a flag for False, several values for a list, else one of the default's type."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, one in wanted.items():
        default, said = one if isinstance(one, tuple) else (one, None)
        how: dict[str, Any] = {"type": type(default)}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how = {"nargs": "*", "type": type(default[0])}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=said, **how)
    return parser.parse_args()
