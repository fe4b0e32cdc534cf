"""What `make check-newest` installs: the newest of all that convgen uses, or the oldest that pyproject.toml allows.

python tests/environments.py newest|oldest
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("torch", "triton", "plot", "tune")
BESIDE = {"oldest": ("pyparsing<3.3",), "newest": ()}  # the oldest matplotlib warns of names that later ones deprecate
TOOLS = ("pytest", "pytest-xdist", "hypothesis")  # of the tests alone: always the newest


def requirements(kind: str, project: dict[str, object]) -> list[str]:
    """Of `newest` as pyproject.toml says; of `oldest` each at the version that it begins with."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict) and isinstance(project["dependencies"], list)
    named = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    named = [one for one in named if not one.startswith("convgen[")]
    if kind == "oldest":
        named = [re.sub(r">=([\d.]+).*", r"==\1.*", one) for one in named]
    return [*named, *BESIDE[kind], *TOOLS]


if __name__ == "__main__":
    (kind,) = sys.argv[1:]
    assert kind in ("newest", "oldest"), kind
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(requirements(kind, project)))
