"""Where input comes from: the file's name as given, and the line of each key path."""

from __future__ import annotations

from dataclasses import dataclass, field

from convgen.errors import InputError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The file that something was read from, and the line of each key path; () is the whole file."""

    file: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int], hash=False, compare=False)

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key path, or of its nearest parent that has a line; "" without a file."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return self.file


def locate(error: InputError, source: Source) -> InputError:
    """Fill in where an error and its notes stand, unless a deeper boundary has; gives the same error back.

    Example:
        >>> source = Source("a.yaml", {("grid",): 4})
        >>> locate(InputError("7 ranks", path=("grid", "N")), source).where
        'a.yaml:4'
    """
    if not error.where:
        error.where = source.where(error.path)
    for note in error.notes:
        if note.path and note.path not in error.located and (where := source.where(note.path)):
            error.located[note.path] = where
    return error
