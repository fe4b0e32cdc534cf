"""Files that convgen ships beside its code: templates/ and tuning/.

In a checkout they stand next to the package, where people look for them; a wheel has them in convgen/_data.
"""

from __future__ import annotations

from pathlib import Path

from convgen.errors import InternalError

PACKAGE = Path(__file__).resolve().parent


def data_file(*parts: str, package: Path = PACKAGE) -> Path:
    """Path of a shipped file or folder, e.g. `data_file("templates", "module.py.jinja")`.

    Args:
        parts: templates or tuning, and the path below it.
        package: folder of the installed package, for tests.
    Raises:
        InternalError: the file is missing; the message says where it was looked for. A name that a user gives, such as
            a machine's, is looked up in the folder's listing instead.
    """
    places = (package / "_data", package.parent)
    for place in places:
        path = place.joinpath(*parts)
        if path.exists():
            return path
    name, looked = "/".join(parts), " and ".join(map(str, places))
    raise InternalError(f"{name} is missing from convgen's files: looked in {looked}; reinstalling convgen may help")
